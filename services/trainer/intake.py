"""What comes out of the rollout queue: a scored group admitted to the open step, or dropped with
its reason.

Pure: wire bytes in, dataclasses out. Staleness is decided once for a whole group, from its oldest
token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from headrace.v1 import rollout_pb2, sample_pb2

from services.common.sequences import broken_invariant
from services.trainer.types import TrainSample

MAX_LAG = int(np.iinfo(np.int16).max)
"""Lags are kept in 16 bits; a group so old is stale anyway."""


class Poison(ValueError):
    """An entry that can never be trained on; the message is the reason in the dead letters."""


class Refused(ValueError):
    """A healthy group that this step cannot use; the message is the drop reason."""

    def __init__(self, reason: str, samples: tuple[TrainSample, ...] = ()) -> None:
        super().__init__(reason)
        self.samples = samples


@dataclass(frozen=True)
class AdmittedGroup:
    """One scored group, ready for the planner."""

    group_id: str
    samples: tuple[TrainSample, ...]
    """At least one; sequences without a trained token are left out."""
    zero_signal: bool
    staleness: int
    """Publishes of the line between the group's oldest token and now."""


@dataclass(frozen=True)
class Policy:
    """Where the trainer stands when it admits a group."""

    version: int
    step: int
    """Optimizer steps applied: what the lag of a token counts to."""
    step_of: Mapping[int, int]
    """Optimizer steps applied behind each published version of the surviving line."""
    max_staleness: int
    vocab_size: int
    """Of the model: larger token ids are of another one."""
    publishes_of: Mapping[int, int] | None = None
    """The place of each of these versions in the line, where numbers alone do not tell it: numbers
    of dead lines are no step forward, and weights published again after a restore are none."""

    def staleness(self, version: int) -> int:
        """Publishes of the line since `version`."""
        if self.publishes_of is None:
            return self.version - version
        return self.publishes_of[self.version] - self.publishes_of[version]


def admit(data: bytes, *, group_id: str, policy: Policy) -> AdmittedGroup:
    """Parse, check and admit one group. Raises Poison, or Refused with `stale`, `dead_lineage` or
    `no_trained_tokens`.

    Example: at version 5 with max_staleness 4, groups whose oldest tokens are of versions 5, 4 and
    1 are admitted (staleness 0, 1, 4) and one of version 0 is refused (5).
    """
    try:
        group = sample_pb2.ScoredGroup.FromString(data)
    except DecodeError as error:
        raise Poison(f"not a ScoredGroup: {error}") from None
    if group.group_id != group_id:
        raise Poison(f"the entry is of group {group_id!r}, its bytes of {group.group_id!r}")
    spans = {span.version for sample in group.samples for span in sample.sequence.spans}
    _check_line({group.oldest_version, group.newest_version} | spans, policy)
    staleness = policy.staleness(group.oldest_version)
    parsed = [_sample(sample, policy) for sample in group.samples]
    samples = tuple(sample for sample in parsed if sample is not None)
    if staleness > policy.max_staleness:
        raise Refused("stale", samples)
    if not samples:
        raise Refused("no_trained_tokens")
    return AdmittedGroup(group_id, samples, group.zero_signal, staleness)


def _check_line(versions: set[int], policy: Policy) -> None:
    """Raises Poison for a number that was never published, and Refused for weights that another
    attempt published after the checkpoint that this line goes on from."""
    strange = versions - policy.step_of.keys()
    ahead = {version for version in versions if version > policy.version}
    if never := ahead | strange & {0}:
        raise Poison(f"made with versions that were never published: {sorted(never)}")
    if strange:
        raise Refused("dead_lineage")


def _sample(sample: sample_pb2.Sample, policy: Policy) -> TrainSample | None:
    """None for a sequence of which nothing is trained."""
    broken = broken_invariant(sample.sequence)
    if broken:
        raise Poison(f"sample {sample.rollout_id!r}/{sample.index}: {broken}")
    if not np.isfinite(sample.advantage):
        raise Poison(f"sample {sample.rollout_id!r}: its advantage is {sample.advantage}")
    sequence = sample.sequence
    token_ids = np.frombuffer(sequence.token_ids, "<u4").astype(np.int64)
    mask = np.frombuffer(sequence.trained_mask, np.uint8).astype(bool)
    if token_ids.max() >= policy.vocab_size:
        raise Poison(
            f"sample {sample.rollout_id!r}: token {token_ids.max()} is outside the model's "
            f"vocabulary of {policy.vocab_size}"
        )
    lags = _lags(sequence, mask, policy)
    if not mask.any():
        return None
    return TrainSample(
        rollout_id=sample.rollout_id,
        token_ids=token_ids,
        trained_mask=mask,
        logprobs=np.frombuffer(sequence.logprobs, "<f4").astype(np.float32),
        advantage=sample.advantage,
        lags=lags,
    )


def _lags(
    sequence: rollout_pb2.Sequence, mask: "np.ndarray[Any, np.dtype[np.bool_]]", policy: Policy
) -> "np.ndarray[Any, np.dtype[np.int16]]":
    """Optimizer steps between the weights of each token and the current ones; 0 for context."""
    lags = np.full(mask.shape, -1, np.int16)
    lags[~mask] = 0
    for span in sequence.spans:
        part = slice(span.start, span.end)
        lag = min(policy.step - policy.step_of[span.version], MAX_LAG)
        lags[part] = np.where(mask[part], lag, 0)
    if (lags < 0).any():
        raise Poison("its version spans do not cover the trained tokens")
    return lags
