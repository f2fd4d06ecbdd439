"""Traces of conversations at the aggregator's edge: checked, and made of plain values.

What is said is users' data: it is stored and shown, never logged, and in no rejection's reason.
"""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from headrace.v1 import rollout_pb2, trace_pb2

from services.aggregator import group_ids
from services.aggregator.table import MAX_AGE_S, MAX_INTEGER
from services.common.sequences import BrokenSequence, read_sequences
from services.common.traces_config import MAX_TRACE_BYTES

END_REASONS: dict[int, str] = {
    number: name.removeprefix("END_REASON_").lower()
    for name, number in rollout_pb2.EndReason.items()
    if number
}
"""Why a conversation ended, in words."""

MAX_NAME = 200
"""Longest name of a process, a function or a tool."""

MAX_NAMES = 100
"""Functions, and tools, of one conversation: a policy can invent any number of names."""

ROLLOUT = re.compile(r"(?P<group>.+)/(?:0|[1-9][0-9]{0,8})")

FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


class BadTrace(ValueError):
    """A trace that breaks a rule; the message says which, without a word of what was said."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One conversation to be kept."""

    rollout_id: str
    group_id: str
    row_index: int
    version: int
    end_reason: int
    at_s: float
    """Producer's monotonic time."""
    per_version: int
    """So many of its version are kept."""
    summary: dict[str, Any]
    """What lists show and filters ask for, as JSON takes it; see summary_of()."""
    body: bytes
    """The message, encoded."""


def decode(message: trace_pb2.RolloutTrace, *, now_s: float, service: str) -> Trace:
    """The trace of a message that a `service` sent at `now_s`. Raises BadTrace."""
    rollout, scored = message.rollout, message.scored
    group = group_ids.parse(message.group_id)
    named = ROLLOUT.fullmatch(rollout.rollout_id)
    _require(service == "scorer", f"only scorers send traces, not a {service}")
    _require(group is not None, "a group_id is epoch.ordinal.attempt.try")
    _require(
        named is not None and named["group"] == message.group_id,
        "a rollout_id is group_id/generation, of the trace's group",
    )
    _require(scored.rollout_id == rollout.rollout_id, "its scores are of another conversation")
    _require(message.ByteSize() <= MAX_TRACE_BYTES, f"larger than {MAX_TRACE_BYTES} bytes")
    _require(
        max(message.row_index, message.version) <= MAX_INTEGER, "row_index or version is too large"
    )
    _require(rollout.end_reason in END_REASONS, f"{rollout.end_reason} is no end reason")
    _require(
        now_s - MAX_AGE_S <= message.at_s <= now_s,
        f"at_s {message.at_s} is after now_s {now_s}, or years before it",
    )
    _require(_finite(message), "a number is NaN or infinite")
    _require(_marked(rollout), "its marks are not one for each turn, sequence and token")
    try:
        read_sequences(rollout.sequences)
    except BrokenSequence as error:
        raise BadTrace(f"sequence {error.index}: {error}") from None
    return Trace(
        rollout_id=rollout.rollout_id,
        group_id=message.group_id,
        row_index=message.row_index,
        version=message.version,
        end_reason=rollout.end_reason,
        at_s=message.at_s,
        per_version=message.per_version,
        summary=summary_of(message),
        body=message.SerializeToString(),
    )


def summary_of(message: trace_pb2.RolloutTrace) -> dict[str, Any]:
    """What lists show of a trace. Rewards are None where a function abstained; `tools` are calls
    by name, the names that the policy wrote.
    """
    rollout, scored = message.rollout, message.scored
    functions = {each.name[:MAX_NAME]: _reward(each) for each in scored.functions[:MAX_NAMES]}
    tools = Counter(call.name[:MAX_NAME] for turn in rollout.turns for call in turn.calls)
    versions = [span.version for each in rollout.sequences for span in each.spans]
    return {
        "reward": _reward(scored),
        "rewards": functions,
        "advantage": scored.advantage,
        "tools": dict(tools.most_common(MAX_NAMES)),
        "newest_version": max(versions, default=message.version),
        "num_turns": len(rollout.turns),
        "num_generated_tokens": sum(turn.num_generated_tokens for turn in rollout.turns),
        "num_trained_tokens": sum(each.trained_mask.count(1) for each in rollout.sequences),
        "duration_s": rollout.duration_s,
        "generator": message.generator[:MAX_NAME],
        "scorer": message.scorer[:MAX_NAME],
    }


def encode_summary(trace: Trace) -> str:
    """The summary as it is stored. Characters beyond ASCII are escaped: PostgreSQL takes no NUL."""
    return json.dumps(trace.summary, separators=(",", ":"), allow_nan=False)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BadTrace(message)


def _reward(scored: Any) -> float | None:
    return scored.reward if scored.HasField("reward") else None


def _marked(rollout: rollout_pb2.Rollout) -> bool:
    marks = rollout.marks
    return (
        len(marks.turn_begins_s) == len(rollout.turns)
        and len(marks.sequences) == len(rollout.sequences)
        and all(
            len(texts.texts) == len(sequence.trained_mask)
            for texts, sequence in zip(marks.sequences, rollout.sequences, strict=True)
        )
    )


def _finite(message: Message) -> bool:
    """Whether all floating-point fields of a message and of those in it are finite."""
    for field, value in message.ListFields():
        repeated = not isinstance(value, Message) and hasattr(value, "__len__")
        values = value if repeated else (value,)
        if field.cpp_type in FLOATS:
            if not all(map(math.isfinite, values)):
                return False
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE and not all(map(_finite, values)):
            return False
    return True
