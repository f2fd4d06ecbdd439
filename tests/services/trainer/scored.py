"""Scored groups as a scorer writes them, for tests."""

from collections.abc import Sequence

import numpy as np
from headrace.v1 import rollout_pb2, sample_pb2

Span = tuple[int, int, int]
"""(version, start, end)."""


def make_sequence(
    token_ids: Sequence[int],
    *,
    num_prompt: int,
    spans: Sequence[Span],
    logprobs: Sequence[float] | None = None,
) -> rollout_pb2.Sequence:
    """A sequence whose tokens from `num_prompt` on are trained; `logprobs` are of these."""
    trained = np.arange(len(token_ids)) >= num_prompt
    values = np.zeros(len(token_ids), "<f4")
    values[trained] = -1.0 if logprobs is None else logprobs
    return rollout_pb2.Sequence(
        token_ids=np.array(token_ids, "<u4").tobytes(),
        trained_mask=trained.astype(np.uint8).tobytes(),
        logprobs=values.tobytes(),
        spans=[rollout_pb2.VersionSpan(version=v, start=start, end=end) for v, start, end in spans],
    )


def make_scored(
    group_id: str = "0.0.1.0",
    *sequences: rollout_pb2.Sequence,
    oldest: int = 1,
    newest: int | None = None,
    advantages: Sequence[float] | None = None,
) -> sample_pb2.ScoredGroup:
    """A scored group with one conversation a sequence; its advantages alternate by default."""
    if advantages is None:
        advantages = [1.0 if number % 2 else -1.0 for number in range(len(sequences))]
    group = sample_pb2.ScoredGroup(
        group_id=group_id,
        oldest_version=oldest,
        newest_version=oldest if newest is None else newest,
        zero_signal=not any(advantages),
    )
    for number, sequence in enumerate(sequences):
        rollout_id = f"{group_id}/{number}"
        group.rollouts.add(rollout_id=rollout_id, reward=0.5, advantage=advantages[number])
        group.samples.add(rollout_id=rollout_id, sequence=sequence, advantage=advantages[number])
    return group
