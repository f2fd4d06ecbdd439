"""The scorer's edge: what is read from a `groups` entry, what its invariants are, and how a scored
group is written.
"""

import json
from operator import itemgetter
from typing import Any

from google.protobuf.message import DecodeError
from headrace.v1 import rollout_pb2, sample_pb2

from services.common.sequences import BrokenSequence, batches, read_sequences
from services.scorer.conversations import Conversation, Conversations, Message
from services.scorer.scoring import Judgement

MAX_NESTING = 100
"""Deepest arguments of a tool call: Python's json and copy give up at a few hundred levels, in the
middle of a call of a reward function."""

END_REASONS = {
    value: name.removeprefix("END_REASON_").lower() for name, value in rollout_pb2.EndReason.items()
} | {rollout_pb2.END_REASON_UNSPECIFIED: ""}
"""As reward functions are told."""


class Malformed(ValueError):
    """What can never be processed; the message is the reason in the dead letters."""


def read_group(data: bytes, *, group_id: str) -> rollout_pb2.RolloutGroup:
    """Parse an entry and check what every sequence promises. Raises Malformed."""
    try:
        group = rollout_pb2.RolloutGroup.FromString(data)
    except DecodeError as error:
        raise Malformed(f"not a RolloutGroup: {error}") from None
    if group.request.group_id != group_id:
        raise Malformed(
            f"the entry is of group {group_id!r}, its bytes of {group.request.group_id!r}"
        )
    check_group(group)
    return group


def check_group(group: rollout_pb2.RolloutGroup) -> None:
    """Raise Malformed when a rollout repeats or a sequence breaks an invariant."""
    seen: set[str] = set()
    for rollout in group.rollouts:
        if rollout.rollout_id in seen:
            raise Malformed(f"rollout {rollout.rollout_id!r} is there twice")
        seen.add(rollout.rollout_id)
    placed = [
        (rollout.rollout_id, index, sequence)
        for rollout in group.rollouts
        for index, sequence in enumerate(rollout.sequences)
    ]
    for batch in batches(placed, sequence_of=itemgetter(2)):
        try:
            read_sequences(sequence for _, _, sequence in batch)
        except BrokenSequence as error:
            rollout_id, index, _ = batch[error.index]
            raise Malformed(f"rollout {rollout_id!r}, sequence {index}: {error}") from None


def read_conversations(group: rollout_pb2.RolloutGroup) -> Conversations:
    """The group as reward functions see it. Raises Malformed when `row_json` or a tool call's
    arguments are no JSON object, or an end reason is unknown.
    """
    try:
        row = json.loads(group.request.row_json or "{}")
    except ValueError as error:
        raise Malformed(f"row_json is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise Malformed(f"row_json is a {type(row).__name__}, not an object of columns")
    asked = [_message(message, where="the request") for message in group.request.messages]
    return Conversations(
        members=[_conversation(rollout, asked=asked) for rollout in group.rollouts], row=row
    )


def _conversation(rollout: rollout_pb2.Rollout, *, asked: list[Message]) -> Conversation:
    where = f"rollout {rollout.rollout_id!r}"
    return Conversation(
        prompt=[_message(message, where=where) for message in rollout.prompt] or asked,
        completion=[_message(message, where=where) for message in rollout.completion],
        end_reason=_end_reason(rollout.end_reason, where=where),
        environment=rollout.environment,
        # An absent reward is no 0.
        environment_reward=(
            rollout.environment_reward if rollout.HasField("environment_reward") else None
        ),
    )


def _end_reason(value: "rollout_pb2.EndReason.ValueType", *, where: str) -> str:
    """END_REASON_TURNS -> "turns"; empty where it was not given."""
    if value not in END_REASONS:
        raise Malformed(f"{where}: there is no end reason {value}")
    return END_REASONS[value]


def _message(message: rollout_pb2.ChatMessage, *, where: str) -> Message:
    read: Message = {"role": message.role, "content": message.content}
    if message.reasoning:
        read["reasoning_content"] = message.reasoning
    if message.tool_calls:
        read["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _arguments(call, where=where),
                },
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        read |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return read


def _arguments(call: rollout_pb2.ToolCall, *, where: str) -> dict[str, Any]:
    where = f"{where}: the arguments of tool call {call.id!r}"
    try:
        arguments = json.loads(call.arguments_json)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{where} are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise Malformed(f"{where} are a {type(arguments).__name__}, not an object")
    if _nesting(arguments) > MAX_NESTING:
        raise Malformed(f"{where} are nested deeper than {MAX_NESTING} levels")
    return arguments


def _nesting(value: Any) -> int:
    """Levels of objects and arrays: 7 -> 0, {} -> 1, {"a": [7]} -> 2."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [
            inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def write_scored(
    group: rollout_pb2.RolloutGroup, judgement: Judgement, *, scorer: str
) -> sample_pb2.ScoredGroup:
    """The scored group. Samples are the sequences of the scored rollouts; evaluation has none: it
    is not trained on.
    """
    evaluation = group.request.evaluation
    scored = sample_pb2.ScoredGroup(
        group_id=group.request.group_id,
        row_index=group.request.row_index,
        oldest_version=group.oldest_version,
        newest_version=group.newest_version,
        zero_signal=judgement.advantages.zero_signal,
        evaluation=evaluation,
        generator=group.producer,
        scorer=scorer,
    )
    for position, rollout in enumerate(group.rollouts):
        advantage = judgement.advantages.advantages[position]
        written = scored.rollouts.add(
            rollout_id=rollout.rollout_id,
            # None leaves the field absent, which is not 0.
            reward=judgement.totals[position],
            advantage=advantage,
            end_reason=rollout.end_reason,
            num_generated_tokens=sum(turn.num_generated_tokens for turn in rollout.turns),
            clipped=bool(rollout.turns) and rollout.turns[-1].finish_reason == "length",
        )
        for verdict in judgement.verdicts:
            written.functions.add(name=verdict.name, reward=verdict.rewards[position])
        if evaluation or judgement.totals[position] is None:
            continue
        for index, sequence in enumerate(rollout.sequences):
            sample = scored.samples.add(
                rollout_id=rollout.rollout_id, index=index, advantage=advantage
            )
            # As an argument of add() it would be encoded and read again.
            sample.sequence.CopyFrom(sequence)
    return scored
