import logging
from functools import cache
from typing import Any

import pytest

from services.common.errors import UserError
from services.generator.parsing import Parser, make_parser
from services.generator.types import Parsed, ToolCall
from services.launcher import tiny_tokenizer

pytest.importorskip("vllm")

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "A number."}},
            "required": ["a"],
        },
        "return": {"type": "integer"},
    },
}


@cache
def tokenizer() -> Any:
    """The tiny model's, with the tokens that some formats need."""
    made = tiny_tokenizer.build_tokenizer()
    made.add_tokens(["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"])
    return made


def parser(calls: str, reasoning: str | None = None) -> Parser:
    return make_parser(calls, reasoning, tokenizer=tokenizer(), tools=[ADD])


def test_calls_come_out_of_the_text() -> None:
    text = '{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {}}'
    assert parser("llama3_json").parse(text) == Parsed(
        content="",
        calls=(
            ToolCall(text='add({"a": 1})', name="add", arguments={"a": 1}),
            ToolCall(text="sub({})", name="sub", arguments={}),
        ),
        calls_in_content=False,
    )
    (found,) = parser("pythonic").parse("[add(a=1)]").calls
    assert (found.name, found.arguments) == ("add", {"a": 1})
    xml = (
        "I will. <tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    found_by_engine = parser("qwen3_coder").parse(xml)
    assert [(c.name, c.arguments) for c in found_by_engine.calls] == [("add", {"a": 3})]
    assert found_by_engine.content.strip() == "I will."
    assert not found_by_engine.calls_in_content


@pytest.mark.parametrize("name", ["llama3_json", "pythonic", "qwen3_coder", "mistral", "xlam"])
def test_a_text_without_calls_is_content(name: str) -> None:
    text = "It is [1, 2]."
    assert parser(name).parse(text).calls == ()
    assert parser(name).parse(text).content == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1'),
        ("llama3_json", '{"name": "add"}'),
        ("pythonic", "[add(a=1"),
        ("pythonic", "[add(a=b.c)]"),
        ("granite4", "<tool_call>{broken}</tool_call>"),
        ("hunyuan_a13b", "<tool_calls>[broken]</tool_calls>"),
        ("apertus", "<|tools_prefix|>[{broken"),
        ("step3", "<｜tool_calls_begin｜>broken"),
        ("qwen3_coder", "<tool_call>broken</tool_call>"),
        ("minimax_m2", "<minimax:tool_call>broken</minimax:tool_call>"),
        ("internlm", '<|action_start|><|plugin|>{"name": broken'),
        ("olmo3", "<function_calls>add(</function_calls>"),
    ],
)
def test_a_start_without_a_call_is_one_mistake(
    name: str, text: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    found = parser(name).parse(text)
    (broken,) = found.calls
    assert broken.text == found.content == text
    assert broken.mistake is not None
    assert broken.mistake.startswith("the call cannot be read")
    assert found.calls_in_content
    # Nor is the log full of tracebacks of what is an event of the rollout.
    assert "Traceback" not in capfd.readouterr().err + caplog.text


def test_arguments_are_checked_as_our_own_formats() -> None:
    (found,) = parser("xlam").parse('[{"name": "add", "arguments": "[1]"}]').calls
    assert (found.name, found.mistake) == ("add", "arguments must be a JSON object")
    (found,) = parser("xlam").parse('[{"name": "a b", "arguments": {}}]').calls
    assert (found.name, found.mistake) == (None, "the call names no tool")


def test_each_turn_has_a_parser_of_its_own() -> None:
    parses = parser("qwen3_coder")
    text = "<tool_call><function=add><parameter=a>3</parameter></function></tool_call>"
    assert parses.parse(text) == parses.parse(text)
    assert parses.parse("plain").calls == ()
    assert len(parses.parse(text).calls) == 1


THOUGHT = "<think>hm</think>"
BLOCK = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_reasoning_is_taken_out_before_calls_are_read(reasoning: str) -> None:
    assert parser("hermes", reasoning).parse(f"{THOUGHT}\nI add. {BLOCK}") == Parsed(
        content=f"\nI add. {BLOCK}",
        calls=(ToolCall(text=BLOCK, name="add", arguments={"a": 1}),),
        reasoning="hm",
        calls_in_content=True,
    )
    found = parser("llama3_json", reasoning).parse(
        '<think>{"name": "no"}</think>{"name": "add", "parameters": {"a": 1}}'
    )
    assert [call.name for call in found.calls] == ["add"]
    assert found.reasoning == '{"name": "no"}'
    assert not found.calls_in_content
    assert parser("hermes", reasoning).parse("<think>cut off").content == ""


def test_what_a_call_within_reasoning_is_depends_on_the_parser() -> None:
    text = f"<think>hm {BLOCK}</think> done"
    assert parser("hermes", "deepseek_r1").parse(text) == Parsed(
        content=" done", reasoning=f"hm {BLOCK}"
    )
    # Qwen 3 is known to call without ending its reasoning.
    assert [call.name for call in parser("hermes", "qwen3").parse(text).calls] == ["add"]


def test_reasoning_stays_in_the_text_where_nobody_is_to_take_it() -> None:
    text = "<think>hm</think> four"
    assert parser("qwen3_coder").parse(text).content == text


def test_reasoning_can_be_taken_where_there_are_no_tools() -> None:
    parses = make_parser("no_such", "qwen3", tokenizer=tokenizer(), tools=[])
    assert parses.parse(f"{THOUGHT}{BLOCK}") == Parsed(content=BLOCK, reasoning="hm")


@pytest.mark.parametrize(
    ("calls", "reasoning", "why"),
    [
        ("lama3_json", None, "tools.format: vLLM has no parser 'lama3_json'; did you mean llama3_"),
        ("Hermes", None, "did you mean hermes"),
        ("#", None, "tools.format: vLLM has no parser '#'; choose one of hermes, apertus"),
        ("jamba", None, "tools.format: vLLM's parser 'jamba' cannot be used with this model"),
        ("openai", None, "tools.format: vLLM's parser 'openai' cannot be used with this model"),
        ("hermes", "qwen_3", r"generation.reasoning_parser: vLLM has no parser 'qwen_3'; did you"),
        ("hermes", "step3", "generation.reasoning_parser: vLLM's parser 'step3' cannot be used"),
    ],
)
def test_names_that_cannot_be_used_are_told(calls: str, reasoning: str | None, why: str) -> None:
    # Without the tokens of any format.
    made = tiny_tokenizer.build_tokenizer()
    with pytest.raises(UserError) as caught:
        make_parser(calls, reasoning, tokenizer=made, tools=[ADD])
    assert why in str(caught.value)
