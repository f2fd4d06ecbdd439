import re

import pytest

from services.common.errors import UserError
from services.generator.tool_schema import is_async, schema_of
from tests.services.generator import tool_functions


def test_it_says_what_the_signature_and_the_docstring_say() -> None:
    assert schema_of(tool_functions.add, "key") == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second."},
                },
                "required": ["a"],
            },
            "return": {"type": "integer", "description": "The sum."},
        },
    }
    assert schema_of(tool_functions.nothing, "key")["function"]["parameters"] == {
        "type": "object",
        "properties": {},
    }


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("undocumented", "undocumented because it has no docstring"),
        ("half_documented", "no description for the argument 'b'"),
        ("untyped", "Argument a is missing a type hint"),
        ("many", "takes *numbers: int, but the model gives arguments by name"),
        ("odd", "has no docstring"),
    ],
)
def test_what_is_missing_is_named(name: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"^key: .*{re.escape(why)}") as caught:
        schema_of(getattr(tool_functions, name), "key")
    assert "\n" not in str(caught.value)


def test_a_name_that_no_format_can_carry_is_refused() -> None:
    def fine(a: int) -> int:
        """Add.

        Args:
            a: The first.
        """
        return a

    fine.__name__ = "<lambda>"
    with pytest.raises(UserError, match="the name '<lambda>' must match"):
        schema_of(fine, "key")


def test_what_is_to_be_awaited() -> None:
    class Callable:
        async def __call__(self) -> None: ...

    assert is_async(tool_functions.async_add)
    assert is_async(Callable())
    assert not is_async(tool_functions.add)
