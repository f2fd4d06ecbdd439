"""One group of conversations as reward functions see it: plain values, and the arguments made of
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""`role` and `content`. An assistant's has `tool_calls` and `reasoning_content` where there are
any; a tool's has `tool_call_id` and `name`. A tool call is `{"id", "type": "function", "function":
{"name", "arguments"}}` with the arguments as a dict."""


@dataclass(frozen=True)
class Conversation:
    """One conversation that came to an end."""

    prompt: list[Message]
    """Its own where an environment's observation changed it, else the request's."""
    completion: list[Message]
    """What was said after the prompt."""
    end_reason: str
    """"stop", "length", "context", "turns" or "time"; empty where the generator did not say."""
    environment: str = ""
    """The one that it ran in, by its name in the recipe; empty without one."""
    environment_reward: float | None = None
    """What that environment says of it; None where it says nothing."""

    @property
    def text(self) -> str:
        """What the assistant said last; empty when it said nothing.

        Example: assistant "A", tool "B" -> "A": of a conversation that was cut off while it asked
        for tools, the message that asks.
        """
        said = [message["content"] for message in self.completion if message["role"] == "assistant"]
        return said[-1] if said else ""


@dataclass(frozen=True)
class Conversations:
    """One group; conversations that failed are not in it, so groups differ in size."""

    members: Sequence[Conversation]
    row: Mapping[str, Any]
    """The dataset row's columns."""

    def arguments(self) -> dict[str, Any]:
        """What the scorer gives, and each column of a name that is not among it, as lists with one
        entry a conversation.
        """
        columns = {name: [value] * len(self.members) for name, value in self.row.items()}
        return columns | {
            "prompts": [member.prompt for member in self.members],
            "completions": [member.completion for member in self.members],
            "texts": [member.text for member in self.members],
            "end_reasons": [member.end_reason for member in self.members],
            "environments": [member.environment for member in self.members],
            "environment_rewards": [member.environment_reward for member in self.members],
        }
