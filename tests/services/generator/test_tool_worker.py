import pytest

from services.generator import tool_worker

HERE = "tests.services.generator.tool_functions"


def test_it_calls_and_gives_text() -> None:
    assert tool_worker.call(f"{HERE}:add", {"a": 1, "b": 2}) == "3"
    assert tool_worker.call(f"{HERE}:Elsewhere.add", {"a": 1}) == "1"
    assert tool_worker.call(f"{HERE}:nothing", {}) == "null"


def test_it_raises_what_the_function_raises() -> None:
    with pytest.raises(KeyError, match="why"):
        tool_worker.call(f"{HERE}:raises", {"why": "why"})


def test_its_reference_names_itself() -> None:
    assert tool_worker.CALL == "services.generator.tool_worker:call"
