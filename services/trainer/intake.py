"""What comes out of the rollout queue: a scored group admitted to the open step, or dropped with
its reason.

Pure: wire bytes in, dataclasses out. Staleness is decided once for a whole group, from its oldest
token.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter

import numpy as np
from google.protobuf.message import DecodeError
from headrace.v1 import sample_pb2
from numpy.typing import NDArray

from services.common.sequences import BrokenSequence, Tokens, batches, read_sequences
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
        return self.place(self.version) - self.place(version)

    def place(self, version: int) -> int:
        """Of a version in the line."""
        return version if self.publishes_of is None else self.publishes_of[version]


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
    samples = tuple(
        sample
        for batch in batches(group.samples, sequence_of=attrgetter("sequence"))
        for sample in _samples(batch, policy)
    )
    if staleness > policy.max_staleness:
        raise Refused("stale", samples)
    if not samples:
        raise Refused("no_trained_tokens")
    return AdmittedGroup(group_id, _with_conversations(samples), group.zero_signal, staleness)


def _with_conversations(samples: tuple[TrainSample, ...]) -> tuple[TrainSample, ...]:
    """Samples that know how many tokens are trained in their conversation, all forks together.

    Example: conversation a with forks of 3 and 5 trained tokens and b with 4 give 8, 8 and None.
    """
    if len({sample.rollout_id for sample in samples}) == len(samples):
        return samples
    tokens: Counter[str] = Counter()
    for sample in samples:
        tokens[sample.rollout_id] += sample.num_trained
    return tuple(
        sample
        if tokens[sample.rollout_id] == sample.num_trained
        else replace(sample, conversation_tokens=tokens[sample.rollout_id])
        for sample in samples
    )


def _check_line(versions: set[int], policy: Policy) -> None:
    """Raises Poison for a number that was never published, and Refused for weights that another
    attempt published after the checkpoint that this line goes on from."""
    strange = versions - policy.step_of.keys()
    ahead = {version for version in versions if version > policy.version}
    if never := ahead | strange & {0}:
        raise Poison(f"made with versions that were never published: {sorted(never)}")
    if strange:
        raise Refused("dead_lineage")


def _samples(batch: list[sample_pb2.Sample], policy: Policy) -> list[TrainSample]:
    """The samples of which something is trained; their arrays are slices of common ones."""
    try:
        tokens = read_sequences(sample.sequence for sample in batch)
    except BrokenSequence as error:
        broken = batch[error.index]
        raise Poison(f"sample {broken.rollout_id!r}/{broken.index}: {error}") from None
    largest = tokens.token_ids.max()
    if largest >= policy.vocab_size:
        strange = batch[tokens.index_at(int(tokens.token_ids.argmax()))]
        raise Poison(
            f"sample {strange.rollout_id!r}: token {largest} is outside the model's vocabulary of "
            f"{policy.vocab_size}"
        )
    lags = _lags(batch, tokens, policy)
    token_ids = tokens.token_ids.astype(np.int64)
    mask = tokens.trained_mask.view(np.bool_)
    num_trained = np.add.reduceat(mask, tokens.starts[:-1], dtype=np.int64)
    samples = []
    for sample, (start, end), trained in zip(
        batch, pairwise(tokens.starts), num_trained.tolist(), strict=True
    ):
        advantage = sample.advantage
        if not math.isfinite(advantage):
            raise Poison(f"sample {sample.rollout_id!r}: its advantage is {advantage}")
        if not trained:
            continue
        samples.append(
            TrainSample(
                rollout_id=sample.rollout_id,
                token_ids=token_ids[start:end],
                trained_mask=mask[start:end],
                logprobs=tokens.logprobs[start:end],
                advantage=advantage,
                lags=lags[start:end],
            )
        )
    return samples


def _lags(batch: list[sample_pb2.Sample], tokens: Tokens, policy: Policy) -> NDArray[np.int16]:
    """Optimizer steps between the weights of each token and the current ones; 0 for context."""
    lags = np.full(tokens.trained_mask.shape, -1, np.int16)
    for sample, (start, end) in zip(batch, pairwise(tokens.starts), strict=True):
        for span in sample.sequence.spans:
            # No span reaches into the next sample.
            part = slice(start + span.start, min(start + span.end, end))
            lags[part] = min(policy.step - policy.step_of[span.version], MAX_LAG)
    lags *= tokens.trained_mask
    if lags.min() < 0:
        sample = batch[tokens.index_at(int(lags.argmin()))]
        raise Poison(
            f"sample {sample.rollout_id!r}: its version spans do not cover the trained tokens"
        )
    return lags
