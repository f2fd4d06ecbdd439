"""The scorer's edge: what is read from a `groups` entry, what its invariants are, and how a scored
group is written.
"""

import json

from google.protobuf.message import DecodeError
from headrace.v1 import rollout_pb2, sample_pb2

from services.common.sequences import broken_invariant
from services.scorer.rewards import Conversations, Message
from services.scorer.scoring import Judgement


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
        for index, sequence in enumerate(rollout.sequences):
            broken = broken_invariant(sequence)
            if broken:
                raise Malformed(f"rollout {rollout.rollout_id!r}, sequence {index}: {broken}")


def read_conversations(group: rollout_pb2.RolloutGroup) -> Conversations:
    """The group as reward functions see it. Raises Malformed when `row_json` is no JSON object."""
    try:
        row = json.loads(group.request.row_json or "{}")
    except ValueError as error:
        raise Malformed(f"row_json is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise Malformed(f"row_json is a {type(row).__name__}, not an object of columns")
    return Conversations(
        prompt=[_message(message) for message in group.request.messages],
        completions=[
            [_message(message) for message in rollout.completion] for rollout in group.rollouts
        ],
        row=row,
    )


def _message(message: rollout_pb2.ChatMessage) -> Message:
    return {"role": message.role, "content": message.content}


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
        )
        for verdict in judgement.verdicts:
            written.functions.add(name=verdict.name, reward=verdict.rewards[position])
        if evaluation or judgement.totals[position] is None:
            continue
        for index, sequence in enumerate(rollout.sequences):
            scored.samples.add(
                rollout_id=rollout.rollout_id, index=index, sequence=sequence, advantage=advantage
            )
    return scored
