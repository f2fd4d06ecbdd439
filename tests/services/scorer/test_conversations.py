from typing import Any

import pytest

from services.scorer.conversations import Conversation, Conversations

ASKS = {"role": "assistant", "content": "<tool_call>…</tool_call>", "tool_calls": [{"id": "a"}]}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "a", "name": "add"}


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ([ASKS, RESULT, {"role": "assistant", "content": "It is 7."}], "It is 7."),
        ([ASKS, RESULT], "<tool_call>…</tool_call>"),
        ([RESULT], ""),
        ([], ""),
    ],
)
def test_the_text_is_what_the_assistant_said_last(completion: list[Any], text: str) -> None:
    assert Conversation([], completion, end_reason="turns").text == text


def test_arguments_have_one_entry_a_conversation() -> None:
    first = Conversation([ASKS], [RESULT], "time", environment="Guess", environment_reward=0.0)
    second = Conversation([], [ASKS], "stop")
    conversations = Conversations([first, second], row={"answer": 7, "texts": "hidden"})
    assert conversations.arguments() == {
        "prompts": [[ASKS], []],
        "completions": [[RESULT], [ASKS]],
        "texts": ["", "<tool_call>…</tool_call>"],
        "end_reasons": ["time", "stop"],
        "environments": ["Guess", ""],
        "environment_rewards": [0.0, None],
        "answer": [7, 7],
    }
