"""What a chat template is told of a function that the model may call."""

import inspect
from collections.abc import Callable
from typing import Any

from services.common.errors import UserError
from services.generator.parsing import NAME


def is_async(function: Callable[..., Any]) -> bool:
    """It is to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def schema_of(function: Callable[..., Any], key: str) -> dict[str, Any]:
    """What a chat template is told of a function or method: name, description, and a JSON schema
    of its arguments, from its type hints and docstring.

    Raises UserError, naming `key`, for what is missing.
    """
    # Takes seconds: not for those who only want to run calls.
    from transformers.utils import get_json_schema

    what = getattr(function, "__qualname__", repr(function))
    try:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise UserError(
                    f"{key}: {what} takes {parameter}, but the model gives arguments by name; "
                    "name each argument"
                )
        schema: dict[str, Any] = get_json_schema(function)
    except UserError:
        raise
    except Exception as error:
        # Of many kinds: missing hints or docstrings, and whatever evaluating a hint raises.
        raise UserError(
            f"{key}: {what} cannot be described to the model: {' '.join(str(error).split())}; "
            "give every argument a type hint and, under `Args:` in the docstring, a line "
            "`name: what it is`"
        ) from error
    name = schema["function"]["name"]
    if not NAME.fullmatch(name):
        raise UserError(f"{key}: the name {name!r} must match {NAME.pattern}")
    return schema
