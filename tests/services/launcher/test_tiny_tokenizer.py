"""Text to tokens and back, and what the chat templates promise about histories."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launcher import tiny_tokenizer
from services.launcher.tiny_tokenizer import ALPHABET, CALL_PIECES, END, build_tokenizer

PLAIN = build_tokenizer()
WITH_TOOLS = build_tokenizer(tools=True)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 4, "b": 7}}</tool_call>'


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "integer"} for parameter in parameters}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [tool("add", "a", "b"), tool("look"), tool("guess", "number")]

texts = st.lists(
    st.one_of(st.sampled_from(ALPHABET), st.sampled_from(CALL_PIECES)), max_size=20
).map("".join)
arguments = st.dictionaries(
    st.text("abxy", min_size=1), st.one_of(st.integers(), st.booleans(), texts), max_size=3
)
calls = st.builds(
    lambda name, given: f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>",
    st.sampled_from(["add", "look", "nothing"]),
    arguments,
)
said = st.lists(st.one_of(texts, calls), max_size=3).map("".join)
results = st.lists(texts, max_size=3)
turns = st.lists(st.tuples(said, results, st.one_of(st.none(), texts)), min_size=1, max_size=4)
"""What the assistant says, the tools' results, and perhaps what the user says then."""


def ids(text: str, tokenizer: Any = WITH_TOOLS) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def rendered(messages: list[dict[str, Any]], **options: Any) -> str:
    text = WITH_TOOLS.apply_chat_template(
        messages, tools=TOOLS, tokenize=False, **({"add_generation_prompt": True} | options)
    )
    return str(text)


@given(texts)
@pytest.mark.parametrize("tokenizer", [PLAIN, WITH_TOOLS], ids=["plain", "tools"])
def test_decoding_gives_back_what_was_encoded(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(ids(text, tokenizer)) == text


@given(st.text(st.sampled_from(ALPHABET)))
def test_a_character_is_a_token_where_no_special_one_is_spelled_out(text: str) -> None:
    if not any(token in text for token in PLAIN.all_special_tokens):
        assert len(ids(text, PLAIN)) == len(text)


def test_a_call_is_short_and_survives_the_leaving_out_of_special_tokens() -> None:
    assert (len(CALL), len(ids(CALL)), len(ids(CALL, PLAIN))) == (69, 15, 69)
    assert WITH_TOOLS.decode(ids(CALL), skip_special_tokens=True) == CALL


def test_a_call_written_letter_by_letter_has_other_tokens_when_it_is_read_again() -> None:
    letters = WITH_TOOLS.convert_tokens_to_ids(list(CALL))
    assert WITH_TOOLS.decode(letters) == CALL
    assert len(letters) == 69
    assert len(ids(WITH_TOOLS.decode(letters))) == 15


def test_the_plain_template_spends_one_token_on_a_role_and_one_on_its_end() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "1 + 2\n"}]
    text = PLAIN.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<system>a<end><user>1 + 2\n<end><assistant>"
    assert len(ids(text, PLAIN)) == 3 + 8 + 1


@pytest.mark.parametrize("tokenizer", [PLAIN, WITH_TOOLS], ids=["plain", "tools"])
def test_an_unknown_role_is_refused(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="unknown role: robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": ""}], tokenize=False)


def test_tools_come_first_and_results_follow_each_other() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "4 + 7?"},
        {"role": "assistant", "content": CALL + CALL},
        {"role": "tool", "content": "11"},
        {"role": "tool", "content": "12"},
    ]
    assert rendered(messages) == (
        "<tools>add(a, b)\nlook()\nguess(number)<end><system>be brief<end><user>4 + 7?<end>"
        f"<assistant>{CALL}{CALL}<end><tool>11<end><tool>12<end><assistant>"
    )
    without = WITH_TOOLS.apply_chat_template(messages[1:2], tokenize=False)
    assert without == "<user>4 + 7?<end>"


def test_calls_that_are_not_in_the_content_are_written_behind_it() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 4, "b": 7}}}
    as_text = {"function": {"name": "add", "arguments": '{"a": 4, "b": 7}'}}
    user = {"role": "user", "content": "q"}

    def shown(content: str | None, *tool_calls: dict[str, Any]) -> str:
        message = {"role": "assistant", "content": content, "tool_calls": list(tool_calls)}
        text = rendered([user, message], add_generation_prompt=False)
        return text.split("<assistant>")[1]

    assert shown(None, call) == f"{CALL}<end>"
    assert shown("well: ", call, as_text) == f"well: {CALL}{CALL}<end>"
    assert shown(CALL, call) == f"{CALL}<end>"


@given(texts, turns)
def test_a_history_begins_with_what_was_sampled(
    question: str, turns: list[tuple[str, list[str], str | None]]
) -> None:
    """For any text that the assistant says in its usual tokens: each turn's prompt begins with the
    turn before it, token by token, any number of tool results between them."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    held: list[int] = []
    for said, results, more in turns:
        prompt = ids(rendered(messages))
        assert prompt[: len(held)] == held
        held = prompt + ids(said + END)
        messages.append({"role": "assistant", "content": said})
        messages += [{"role": "tool", "content": result} for result in results]
        if more is not None:
            messages.append({"role": "user", "content": more})
    assert ids(rendered(messages))[: len(held)] == held


def test_the_vocabulary_of_the_demo_is_what_it_was() -> None:
    assert len(PLAIN) == 3 + 4 + 96
    assert len(WITH_TOOLS) == len(PLAIN) + 1 + len(CALL_PIECES)
    assert PLAIN.chat_template == tiny_tokenizer.CHAT_TEMPLATE
