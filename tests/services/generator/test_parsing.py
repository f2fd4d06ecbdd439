import inspect
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generator.parsing import Hermes, Plain, make_parser, validate
from services.generator.types import Parsed, ToolCall
from tests.services.generator import tool_functions

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def block(inside: str) -> str:
    return f"<tool_call>\n{inside}\n</tool_call>"


def call(name: str, arguments: Any) -> str:
    return block(json.dumps({"name": name, "arguments": arguments}))


def parsed(text: str) -> Parsed:
    return make_parser("hermes", None, tokenizer=None, tools=[TOOL]).parse(text)


def only(text: str) -> ToolCall:
    (found,) = parsed(text).calls
    return found


def test_blocks_become_calls_in_order_and_the_text_stays_as_it_is() -> None:
    text = f"First. {call('add', {'a': 1})}\nthen {call('sub', {'b': [None]})} done"
    assert parsed(text) == Parsed(
        content=text,
        calls=(
            ToolCall(text=call("add", {"a": 1}), name="add", arguments={"a": 1}),
            ToolCall(text=call("sub", {"b": [None]}), name="sub", arguments={"b": [None]}),
        ),
        calls_in_content=True,
    )


def test_a_text_without_blocks_is_content() -> None:
    assert parsed("no </tool_call> here") == Parsed(content="no </tool_call> here")


def test_without_tools_nothing_is_a_call() -> None:
    text = call("add", {})
    assert make_parser("hermes", None, tokenizer=None, tools=[]).parse(text) == Parsed(content=text)
    assert Plain().parse(text).calls == ()


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "now"}',
        '{"name": "now", "arguments": null}',
        '{"name": "now", "arguments": {}}',
        '{"name": "now", "arguments": ""}',
        '{"name": "now", "arguments": "{}"}',
        '{"name": "now", "arguments": "null"}',
        '{"arguments": {}, "name": "now", "id": 3}',
    ],
)
def test_no_arguments_are_the_empty_object(inside: str) -> None:
    assert only(block(inside)) == ToolCall(text=block(inside), name="now", arguments={})


def test_arguments_may_be_a_text_that_holds_them() -> None:
    assert only(call("add", json.dumps({"a": "x"}))).arguments == {"a": "x"}


@pytest.mark.parametrize(
    ("inside", "name", "why"),
    [
        ('{"name": "add", "arguments": {"a": 1,', "add", "not valid JSON"),
        ("", None, "not valid JSON"),
        ("add(1)", None, "not valid JSON"),
        ('{"name": "add", "arguments": [1, 2]}', "add", "arguments must be a JSON object"),
        ('{"name": "add", "arguments": "x"}', "add", "arguments are not valid JSON"),
        ('{"name": "add", "arguments": "[1]"}', "add", "arguments must be a JSON object"),
        ('{"name": "add", "arguments": 3}', "add", "arguments must be a JSON object"),
        ('{"name": "add", "arguments": false}', "add", "arguments must be a JSON object"),
        ('{"name": "add", "arguments": {"a": NaN}}', "add", "NaN"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "add", "NaN"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "add", "surrogate"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "add", "too long"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}", "add", "nested"),
        ('{"name": "add", "arguments": ' + '{"a":' * 30000, "add", "nested too deep"),
        ("[" * 100_000, None, "nested too deep"),
        ("[1, 2]", None, "must be a JSON object with name and arguments"),
        ('"add"', None, "must be a JSON object with name and arguments"),
        ("{}", None, "name is missing"),
        ('{"arguments": {}}', None, "name is missing"),
        ('{"name": 3}', None, "name must be a tool's name"),
        ('{"name": "a b"}', None, "name must be a tool's name"),
        ('{"name": ""}', None, "name must be a tool's name"),
        ('{"name": "' + "a" * 65 + '"}', None, "name must be a tool's name"),
        ('{"name": "add"} and more', "add", "text follows"),
    ],
)
def test_a_broken_block_is_one_mistake_and_costs_no_other(
    inside: str, name: str | None, why: str
) -> None:
    good = call("add", {"a": 1})
    first, broken, last = parsed(f"{good} {block(inside)} {good}").calls
    assert first == last == ToolCall(text=good, name="add", arguments={"a": 1})
    assert broken.text == block(inside)
    assert broken.name == name
    assert broken.arguments is None
    assert broken.mistake is not None
    assert why in broken.mistake


def test_a_key_that_is_there_twice_ends_nothing() -> None:
    assert only(block('{"name": "add", "arguments": {"a": 1, "a": 2}}')).arguments == {"a": 2}


def test_a_text_in_the_arguments_may_hold_the_tags() -> None:
    arguments = {"a": "</tool_call> and <tool_call> and \"'"}
    text = call("add", arguments) + call("sub", {})
    assert [(c.name, c.arguments) for c in parsed(text).calls] == [("add", arguments), ("sub", {})]


@pytest.mark.parametrize(
    "cut", ['{"name": "add", "argum', '{"name": "add"}', '{"name": "add"}</tool']
)
def test_a_block_without_an_end_goes_up_to_the_end(cut: str) -> None:
    found = only(f"text <tool_call>{cut}")
    assert found.text == f"<tool_call>{cut}"
    assert found.mistake is not None


def test_a_block_without_an_end_leaves_the_next_alone() -> None:
    good = call("sub", {})
    broken, fine = parsed(f'<tool_call>{{"name": "add"}} {good}').calls
    assert (broken.name, broken.mistake) == ("add", "</tool_call> is missing")
    assert fine == ToolCall(text=good, name="sub", arguments={})


@given(st.text(alphabet='{}[]":,<tool_call>/name argus1\\ \n', max_size=200))
def test_no_text_ends_a_rollout(text: str) -> None:
    for whole in (text, f"<tool_call>{text}", f"{text}<tool_call>{text}</tool_call>"):
        found = Hermes().parse(whole)
        assert found.content == whole
        assert len(found.calls) <= whole.count("<tool_call>")
        position = 0
        for each in found.calls:
            assert (each.mistake is None) == (each.arguments is not None)
            position = whole.index(each.text, position) + len(each.text)


@pytest.mark.parametrize(
    "unit", ["<tool_call>", "<tool_call>{", '<tool_call>{"', "<tool_call>[[1,"]
)
def test_time_grows_with_the_length_of_the_text(unit: str) -> None:
    begin_s = time.monotonic()
    assert len(parsed(unit * 10_000).calls) >= 5000
    # Quadratic reading would take minutes.
    assert time.monotonic() - begin_s < 20


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"a": 1}, None),
        ({"a": 1, "b": 2}, None),
        ({}, "a is missing (the arguments are a, b)"),
        ({"a": 1, "zz": 2}, "there is no argument zz (the arguments are a, b)"),
        ({"zz": 2}, "a is missing; there is no argument zz (the arguments are a, b)"),
    ],
)
def test_arguments_must_fit_the_signature(arguments: dict[str, Any], why: str | None) -> None:
    signature = inspect.signature(tool_functions.add)
    assert validate(ToolCall(text="", name="add", arguments=arguments), signature) == why


def test_a_function_without_arguments_takes_none() -> None:
    signature = inspect.signature(tool_functions.nothing)
    assert validate(ToolCall(text="", arguments={}), signature) is None
    why = validate(ToolCall(text="", arguments={"a": 1}), signature)
    assert why == "there is no argument a (it takes no arguments)"
