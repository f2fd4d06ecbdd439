"""Traced conversations as JSON: a line of a list, and one whole."""

from datetime import datetime
from typing import Any

import numpy as np
from headrace.v1 import rollout_pb2, trace_pb2

from services.aggregator.api.models import Answer, moment
from services.aggregator.trace_store import Kept, Outcome


class RolloutSummary(Answer):
    """A traced conversation at a glance."""

    rollout_id: str
    """`group_id/generation`."""
    group_id: str
    row_index: int
    """Of the dataset."""
    version: int
    """The oldest policy version over the trained tokens of its group: what staleness counts
    from."""
    newest_version: int
    """The newest version that sampled a token of it."""
    end: str
    """Why it ended: stop, length, context, turns or time."""
    at: datetime
    """When it was scored."""
    reward: float | None
    """The weighted sum; null where all functions abstained."""
    rewards: dict[str, float | None]
    """By function, before weighting; null where it abstained."""
    advantage: float
    tools: dict[str, int]
    """Calls by name, as the policy wrote the names."""
    num_turns: int
    num_generated_tokens: int
    num_trained_tokens: int
    duration_s: float
    generator: str
    scorer: str
    state: str | None
    """Where its group is; null where the ledger has not heard of it."""
    reason: str
    """Why its group was dropped or given up."""
    step: int | None
    """The optimizer step that trained its group, also where that was rolled back."""

    @classmethod
    def of(cls, kept: Kept, outcome: Outcome | None) -> "RolloutSummary":
        """From the store's."""
        return cls(**_fields(kept, outcome))


class RolloutPage(Answer):
    """Traced conversations, the newest first."""

    run: str
    rollouts: list[RolloutSummary]
    next_page_token: str | None
    """Asks for those before; null after the last."""


class ToolRequest(Answer):
    """A call that a message asks for."""

    id: str
    name: str
    arguments_json: str
    """A JSON object."""


class ChatMessage(Answer):
    """One message."""

    role: str
    """system, user, assistant or tool."""
    content: str
    reasoning: str
    """What a reasoning parser took out of an assistant's text."""
    tool_calls: list[ToolRequest]
    tool_call_id: str
    """Of a tool's message: the call that it answers."""
    name: str
    """Of a tool's message: the tool."""

    @classmethod
    def of(cls, message: rollout_pb2.ChatMessage) -> "ChatMessage":
        """From the wire's."""
        return cls(
            role=message.role,
            content=message.content,
            reasoning=message.reasoning,
            tool_calls=[
                ToolRequest(id=call.id, name=call.name, arguments_json=call.arguments_json)
                for call in message.tool_calls
            ],
            tool_call_id=message.tool_call_id,
            name=message.name,
        )


class CallResult(Answer):
    """What became of a call."""

    name: str
    """Empty where the block that the model wrote does not say."""
    arguments: str
    """A JSON object, or the block as it was written where it cannot be read."""
    text: str
    """What the model was told."""
    failed: bool
    declared: bool
    """There is a tool, or a method of the environment, of that name."""
    by_environment: bool
    duration_s: float


class Turn(Answer):
    """One call of the engine."""

    begin_s: float
    """When it began, from the begin of the conversation's first."""
    duration_s: float
    num_prompt_tokens: int
    num_generated_tokens: int
    text: str
    """As sampled, without the end token."""
    finish_reason: str
    """stop or length."""
    calls: list[CallResult]

    @classmethod
    def of(cls, turn: rollout_pb2.Turn, begin_s: float) -> "Turn":
        """From the wire's."""
        return cls(
            begin_s=begin_s,
            duration_s=turn.duration_s,
            num_prompt_tokens=turn.num_prompt_tokens,
            num_generated_tokens=turn.num_generated_tokens,
            text=turn.text,
            finish_reason=turn.finish_reason,
            calls=[
                CallResult(
                    name=call.name,
                    arguments=call.arguments,
                    text=call.text,
                    failed=call.failed,
                    declared=call.declared,
                    by_environment=call.by_environment,
                    duration_s=call.duration_s,
                )
                for call in turn.calls
            ],
        )


class VersionSpan(Answer):
    """Tokens [start, end) of a sequence that one policy version sampled."""

    version: int
    start: int
    end: int


class TokenSequence(Answer):
    """What was trained on, token by token: all lists but the spans are of the same length."""

    token_ids: list[int]
    texts: list[str]
    """Together they are the sequence's text; of tokens that make one character the last has it."""
    trained: list[bool]
    logprobs: list[float | None]
    """At sampling time; null where the token is not trained."""
    spans: list[VersionSpan]

    @classmethod
    def of(cls, sequence: rollout_pb2.Sequence, texts: rollout_pb2.TokenTexts) -> "TokenSequence":
        """From the wire's."""
        trained = [each == 1 for each in sequence.trained_mask]
        logprobs = np.frombuffer(sequence.logprobs, "<f4").tolist()
        return cls(
            token_ids=np.frombuffer(sequence.token_ids, "<u4").tolist(),
            texts=list(texts.texts),
            trained=trained,
            logprobs=[
                logprob if each else None for logprob, each in zip(logprobs, trained, strict=True)
            ],
            spans=[
                VersionSpan(version=span.version, start=span.start, end=span.end)
                for span in sequence.spans
            ],
        )


class RolloutDetail(RolloutSummary):
    """A traced conversation, whole."""

    prompt: list[ChatMessage]
    """What it began with."""
    completion: list[ChatMessage]
    """What was said after that."""
    turns: list[Turn]
    sequences: list[TokenSequence]
    """One, unless the history was rewritten between turns."""
    environment: str
    """The environment that it lived in; empty without one."""
    environment_reward: float | None
    """What that environment said of it."""
    tool_s: float
    """Of duration_s: in tools."""
    env_s: float
    """Of duration_s: in the environment."""

    @classmethod
    def whole(
        cls, kept: Kept, trace: trace_pb2.RolloutTrace, outcome: Outcome | None
    ) -> "RolloutDetail":
        """From the store's."""
        rollout = trace.rollout
        rewarded = rollout.HasField("environment_reward")
        return cls(
            **_fields(kept, outcome),
            prompt=[ChatMessage.of(each) for each in trace.prompt],
            completion=[ChatMessage.of(each) for each in rollout.completion],
            turns=[
                Turn.of(turn, begin_s)
                for turn, begin_s in zip(rollout.turns, rollout.marks.turn_begins_s, strict=True)
            ],
            sequences=[
                TokenSequence.of(sequence, texts)
                for sequence, texts in zip(rollout.sequences, rollout.marks.sequences, strict=True)
            ],
            environment=rollout.environment,
            environment_reward=rollout.environment_reward if rewarded else None,
            tool_s=rollout.tool_s,
            env_s=rollout.env_s,
        )


def _fields(kept: Kept, outcome: Outcome | None) -> dict[str, Any]:
    """Of a RolloutSummary."""
    return kept.summary | {
        "rollout_id": kept.rollout_id,
        "group_id": kept.group_id,
        "row_index": kept.row_index,
        "version": kept.version,
        "end": kept.end,
        "at": moment(kept.at_s),
        "state": None if outcome is None else outcome.state,
        "reason": "" if outcome is None else outcome.reason,
        "step": None if outcome is None else outcome.step,
    }
