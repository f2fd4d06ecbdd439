"""A packed row: many samples as one trie of tokens, and the loss terms that point into it.

A token shared by samples is forwarded once; every sample keeps its own loss terms. A term is a
trained token: the position that predicts it (its predecessor), the token itself (its target), and
what the sampler said of it. So one hidden state serves several targets, at a fork too, and the last
token of a sample is never forwarded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.trainer.attention_plan import AttentionPlan, plan_attention
from services.trainer.trie import build_trie
from services.trainer.types import TrainSample


@dataclass(frozen=True, eq=False)
class Terms:
    """M loss terms of a row, one per trained token of every sample, sample after sample."""

    slots: torch.Tensor
    """[M] int64: which of the row's `positions` predicts the token."""
    targets: torch.Tensor
    """[M] int64: the token."""
    old_logprobs: torch.Tensor
    """[M] float32: its log-probability when sampled."""
    advantages: torch.Tensor
    """[M] float32."""
    samples: torch.Tensor
    """[M] int64: which of the samples given to `pack` the term belongs to."""
    lags: torch.Tensor
    """[M] int64: optimizer steps between the weights that sampled it and the current ones."""
    weights: torch.Tensor
    """[M] float32: 1 / trained tokens of its conversation, all forks together."""

    def to(self, device: torch.device) -> "Terms":
        """The same on another device."""
        return Terms(**{name: tensor.to(device) for name, tensor in vars(self).items()})


@dataclass(frozen=True, eq=False)
class PackedRow:
    """What one forward of the model takes, and the terms of its loss."""

    input_ids: torch.Tensor
    """[1, N] int64."""
    position_ids: torch.Tensor
    """[1, N] int64: depth in the trie, so positions restart with every sample."""
    positions: torch.Tensor
    """[P] int64: positions whose hidden state predicts a trained token, rising, each once."""
    terms: Terms
    attention: AttentionPlan
    num_samples: int
    raw_tokens: int
    """Tokens of the samples, as they came."""

    @property
    def num_forwarded(self) -> int:
        """Tokens that the model forwards."""
        return self.input_ids.shape[1]

    @property
    def num_trained(self) -> int:
        """Trained tokens."""
        return self.terms.targets.shape[0]

    def to(self, device: torch.device) -> "PackedRow":
        """The same on another device; the row itself where it is there already."""
        if self.input_ids.device == device:
            return self
        return PackedRow(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            positions=self.positions.to(device),
            terms=self.terms.to(device),
            attention=self.attention.to(device),
            num_samples=self.num_samples,
            raw_tokens=self.raw_tokens,
        )


def pack(samples: Sequence[TrainSample], *, share_prefixes: bool = True) -> PackedRow:
    """Pack samples, at least one, into one row.

    Example: `[5, 6, 7, 2]` and `[5, 6, 8, 2]`, both with the last two tokens trained, become
    input_ids `[5, 6, 7, 8]`, position_ids `[0, 1, 2, 2]` and four terms: predecessors 1, 2, 1, 3
    and targets 7, 2, 8, 2.

    `share_prefixes=False` keeps a copy of the prefix per sample: for comparisons.
    """
    assert samples, "a row holds at least one sample"
    trained = [sample.trained_positions for sample in samples]
    trie = build_trie(
        [sample.context for sample in samples],
        depths=[positions - 1 for positions in trained],
        share_prefixes=share_prefixes,
    )
    predecessors = np.concatenate(trie.nodes)
    positions, slots = np.unique(predecessors, return_inverse=True)
    chosen = np.concatenate([sample.trained_mask for sample in samples])
    counts = [size.size for size in trained]
    advantages = np.array([sample.advantage for sample in samples], np.float32)
    weights = np.array([sample.token_weight for sample in samples], np.float32)

    def at_trained(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(s, name) for s in samples])[chosen])

    return PackedRow(
        input_ids=torch.from_numpy(trie.token_ids)[None],
        position_ids=torch.from_numpy(trie.depths)[None],
        positions=torch.from_numpy(positions),
        terms=Terms(
            slots=torch.from_numpy(slots),
            targets=at_trained("token_ids").long(),
            old_logprobs=at_trained("logprobs").float(),
            advantages=torch.from_numpy(np.repeat(advantages, counts)),
            samples=torch.from_numpy(np.repeat(np.arange(len(samples)), counts)),
            lags=at_trained("lags").long(),
            weights=torch.from_numpy(np.repeat(weights, counts)),
        ),
        attention=plan_attention(trie),
        num_samples=len(samples),
        raw_tokens=sum(sample.token_ids.size for sample in samples),
    )
