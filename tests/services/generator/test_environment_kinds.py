import inspect

import pytest

from services.common.errors import UserError
from services.generator.types import EnvironmentFailed
from tests.services.generator.running_environments import HERE, entry, environments_of, only


@pytest.mark.parametrize(
    ("chosen", "wrong"),
    [
        ("guess", r"environments.classes\[0\].environment: 'guess' is neither module:Class nor"),
        (f"{HERE}:Gess", r"classes\[0\].environment: .* has no Gess"),
        (f"{HERE}:no_class", r"no_class' is not a class"),
        (f"{HERE}:Abstract", r"Abstract' is abstract"),
        (f"{HERE}:WithoutReset", r"WithoutReset' has no method reset"),
        (f"{HERE}:DoneMethod", r"DoneMethod': done is an attribute or a property"),
        (f"{HERE}:Mixed", r"either all methods are async or none is; reset are, act are not"),
        (f"{HERE}:Untold", r"environments.classes\[0\]: act: .*Untold.act cannot be described"),
        (f"{HERE}:Closing", r"environments.classes\[0\].params: Closing: missing .* 'path'"),
    ],
)
def test_what_cannot_be_used_is_said_with_its_key(chosen: str, wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        environments_of({"environment": chosen})


def test_parameters_and_names_are_checked() -> None:
    with pytest.raises(UserError, match=r"classes\[1\].params: Doubling: got an unexpected .*'to'"):
        environments_of("Odd", entry("Doubling", params={"to": 3}), column="c")
    with pytest.raises(UserError, match=r"classes\[0\]: the environment's method add has the name"):
        environments_of("Doubling", taken=("add",))


def test_public_methods_are_what_the_model_can_call() -> None:
    kind = only(environments_of("Doubling"))
    assert (kind.name, kind.has_reward) == ("Doubling", True)
    assert kind.methods == ("add", "fail", "hang", "die", "lazily", "shout")
    assert str(kind.signature("add")) == "(amount: int, times: int = 1) -> dict[str, int]"
    assert list(kind.signature("shout").parameters) == ["text"]
    assert kind.schemas[0]["function"]["name"] == "add"
    assert kind.schemas[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "amount": {"type": "integer", "description": "how much"},
            "times": {"type": "integer", "description": "how often"},
        },
        "required": ["amount"],
    }
    assert not only(environments_of(entry("Closing", params={"path": "x"}))).has_reward


def test_a_row_chooses_its_environment() -> None:
    one = environments_of("Doubling")
    assert only(one).name == "Doubling"
    two = environments_of("Doubling", entry("Numbered", name="numbers"), column="where")
    chosen = [two.choose({"where": name}) for name in ("numbers", "Doubling", None)]
    assert [kind and kind.name for kind in chosen] == ["numbers", "Doubling", None]
    assert two.choose({"question": "?"}) is None
    for wrong in ("Numbered", 3):
        with pytest.raises(EnvironmentFailed, match=r"where names .*only Doubling, numbers"):
            two.choose({"where": wrong})


def test_signatures_are_without_self() -> None:
    kind = only(environments_of("Numbered"))
    assert kind.signature("count") == inspect.Signature(return_annotation=int)
