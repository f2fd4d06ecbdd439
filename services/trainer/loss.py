"""The policy-gradient loss of trained tokens, as sums: denominators are known only at the end of a
step.

Ratios are rho = exp(clamp(log pi - log mu, -20, 20)) in float32, pi the policy being trained and mu
the one that sampled. What is not finite is guarded: left out of numerators and denominators,
counted, and cut off before any exp, so that no gradient is NaN (0 x NaN is NaN: multiplying by a
mask would not do).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from services.common.training_config import Loss
from services.trainer.packing import Terms

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this size: exp(20) is 5e8, well inside float32."""

LAG_KEYS = ("0", "1", "2", "3+")
"""Buckets of a token's lag: optimizer steps between the weights that sampled it and the current
ones."""

GUARDS = ("logprobs", "old_logprobs", "advantages")
"""What can be not finite in a term: the trainer's log-probability, the sampler's, the advantage."""

TokenLoss = Callable[[torch.Tensor, torch.Tensor, Loss], torch.Tensor]


@dataclass(frozen=True)
class LagStatistics:
    """Trainer against sampler over the tokens of one lag bucket."""

    tokens: int = 0
    gap_sum: float = 0.0
    """Sum of |log pi - log mu|."""
    gap_max: float = 0.0
    kl_sum: float = 0.0
    """Sum of the k3 estimate, rho - 1 - log rho."""

    def merge(self, other: "LagStatistics") -> "LagStatistics":
        """Both together."""
        return LagStatistics(
            self.tokens + other.tokens,
            self.gap_sum + other.gap_sum,
            max(self.gap_max, other.gap_max),
            self.kl_sum + other.kl_sum,
        )


def _no_lags() -> tuple[LagStatistics, ...]:
    return tuple(LagStatistics() for _ in LAG_KEYS)


@dataclass(frozen=True)
class LossStatistics:
    """Sums over trained, unguarded tokens; they merge over rows, micro-batches and ranks by adding
    up."""

    tokens: int = 0
    """Trained, unguarded tokens: the denominator of everything here."""
    loss_sum: float = 0.0
    entropy_sum: float = 0.0
    """Of softmax(logits / T), in nats."""
    ratio_sum: float = 0.0
    clip_low_tokens: int = 0
    """rho < 1 - low and A < 0."""
    clip_high_tokens: int = 0
    """rho > 1 + high and A > 0."""
    signal_tokens: int = 0
    """A is not 0."""
    clip_low_min: float = math.inf
    """Smallest share of low-clipped tokens in one sample; inf without samples."""
    clip_high_max: float = -math.inf
    """Largest share of high-clipped tokens in one sample; -inf without samples."""
    lags: tuple[LagStatistics, ...] = field(default_factory=_no_lags)
    """By LAG_KEYS."""
    guarded: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GUARDS, 0))
    """Terms left out, by the first of GUARDS that applies."""

    @property
    def kl_sum(self) -> float:
        """Sum of the k3 estimate of KL(mu || pi) over all lags."""
        return sum(lag.kl_sum for lag in self.lags)

    def merge(self, other: "LossStatistics") -> "LossStatistics":
        """Both together; associative and commutative (floats to rounding)."""
        return LossStatistics(
            tokens=self.tokens + other.tokens,
            loss_sum=self.loss_sum + other.loss_sum,
            entropy_sum=self.entropy_sum + other.entropy_sum,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            clip_low_tokens=self.clip_low_tokens + other.clip_low_tokens,
            clip_high_tokens=self.clip_high_tokens + other.clip_high_tokens,
            signal_tokens=self.signal_tokens + other.signal_tokens,
            clip_low_min=min(self.clip_low_min, other.clip_low_min),
            clip_high_max=max(self.clip_high_max, other.clip_high_max),
            lags=tuple(a.merge(b) for a, b in zip(self.lags, other.lags, strict=True)),
            guarded={kind: self.guarded[kind] + other.guarded[kind] for kind in GUARDS},
        )


def clip_token_loss(
    log_ratio: torch.Tensor, advantages: torch.Tensor, settings: Loss
) -> torch.Tensor:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), for A < 0 at most dual_clip |A|; [M] float32.

    PPO's clipping (arXiv:1707.06347) with separate bounds (DAPO, arXiv:2503.14476) and the dual
    clip (arXiv:1912.09729), which bounds the one side that plain clipping leaves open. Examples
    (0.2, 0.2, dual clip off): rho 1.5 and A +1 gives -1.2 with gradient 0; rho 100 and A -1 gives
    +100, with dual_clip = 10 it gives +10 with gradient 0.
    """
    low, high, cap = 1 - settings.clip_low, 1 + settings.clip_high, settings.dual_clip
    too_high = (advantages > 0) & (log_ratio > math.log(high))
    too_low = (advantages < 0) & (log_ratio < (math.log(low) if low > 0 else -math.inf))
    too_bad = (advantages < 0) & (log_ratio > math.log(cap))
    # Chosen in log space: a token outside keeps its value and gets no gradient.
    ratio = log_ratio.exp()
    ratio = torch.where(too_high, high, torch.where(too_low, low, torch.where(too_bad, cap, ratio)))
    return -ratio * advantages


TOKEN_LOSSES: dict[str, TokenLoss] = {"clip": clip_token_loss}
"""Loss kinds of the recipe: (log ratios [M], advantages [M], settings) -> losses [M]."""


def policy_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    terms: Terms,
    *,
    num_samples: int,
    settings: Loss,
) -> tuple[torch.Tensor, LossStatistics]:
    """Sum of the losses of a row's terms, and its statistics.

    logprobs [M] float32: log pi of the terms, with gradient. entropy [M] float32. `terms.samples`
    is below `num_samples`. The sum is a scalar; divided by `statistics.tokens`, summed over the
    step, it is the loss.
    """
    faulty = {
        "logprobs": ~logprobs.isfinite(),
        "old_logprobs": ~terms.old_logprobs.isfinite(),
        "advantages": ~terms.advantages.isfinite(),
    }
    valid = ~torch.stack([faulty[kind] for kind in GUARDS]).any(0)
    difference = torch.where(valid, logprobs, 0.0) - torch.where(valid, terms.old_logprobs, 0.0)
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = torch.where(valid, terms.advantages, 0.0)
    losses = TOKEN_LOSSES[settings.kind](log_ratio, advantages, settings)
    total = torch.where(valid, losses, 0.0).sum()
    with torch.no_grad():
        guarded = {}
        seen = torch.zeros_like(valid)
        for kind in GUARDS:
            guarded[kind] = (faulty[kind] & ~seen).sum()
            seen = seen | faulty[kind]
        statistics = _statistics(
            valid,
            log_ratio=log_ratio.detach(),
            gap=difference.detach().abs(),
            advantages=advantages,
            entropy=entropy.detach(),
            terms=terms,
            num_samples=num_samples,
            settings=settings,
            totals=[total.detach(), *guarded.values()],
        )
    return total, statistics


def _statistics(
    valid: torch.Tensor,
    *,
    log_ratio: torch.Tensor,
    gap: torch.Tensor,
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    terms: Terms,
    num_samples: int,
    settings: Loss,
    totals: list[torch.Tensor],
) -> LossStatistics:
    """All sums in one transfer from the device. `totals`: the loss sum, then the guarded counts in
    the order of GUARDS."""
    ratio = log_ratio.exp()
    low = valid & (ratio < 1 - settings.clip_low) & (advantages < 0)
    high = valid & (ratio > 1 + settings.clip_high) & (advantages > 0)
    # Guarded tokens have log ratio 0, gap 0 and kl 0; only the ratio and the counts need the mask.
    kl = ratio - 1 - log_ratio
    lag = terms.lags.clamp(0, len(LAG_KEYS) - 1)
    columns = torch.stack([valid.double(), gap.double(), kl.double()])
    by_lag = torch.zeros(3, len(LAG_KEYS), dtype=torch.float64, device=gap.device)
    by_lag.index_add_(1, lag, columns)
    gap_max = torch.zeros(len(LAG_KEYS), device=gap.device).scatter_reduce_(0, lag, gap, "amax")
    flags = torch.stack([valid, low, high]).double()
    by_sample = torch.zeros(3, num_samples, dtype=torch.float64, device=gap.device)
    by_sample.index_add_(1, terms.samples, flags)
    counts = by_sample[0].clamp(min=1)
    has_tokens = by_sample[0] > 0
    low_min = torch.where(has_tokens, by_sample[1] / counts, math.inf).min()
    high_max = torch.where(has_tokens, by_sample[2] / counts, -math.inf).max()
    values = torch.stack(
        [
            torch.where(valid, entropy, 0.0).sum(dtype=torch.float64),
            torch.where(valid, ratio, 0.0).sum(dtype=torch.float64),
            (valid & (advantages != 0)).sum().double(),
            low_min,
            high_max,
            *(value.double() for value in totals),
        ]
    )
    flat = torch.cat([flags.sum(1), by_lag.flatten(), gap_max.double(), values]).tolist()
    tokens, clip_low, clip_high = flat[:3]
    lag_tokens, lag_gap, lag_kl, lag_max = (flat[3 + 4 * i : 7 + 4 * i] for i in range(4))
    entropy_sum, ratio_sum, signal, low_least, high_most, loss_sum, *guarded = flat[19:]
    return LossStatistics(
        tokens=int(tokens),
        loss_sum=loss_sum,
        entropy_sum=entropy_sum,
        ratio_sum=ratio_sum,
        clip_low_tokens=int(clip_low),
        clip_high_tokens=int(clip_high),
        signal_tokens=int(signal),
        clip_low_min=low_least,
        clip_high_max=high_most,
        lags=tuple(
            LagStatistics(int(n), gap_sum, worst, kl_sum)
            for n, gap_sum, worst, kl_sum in zip(lag_tokens, lag_gap, lag_max, lag_kl, strict=True)
        ),
        guarded={kind: int(count) for kind, count in zip(GUARDS, guarded, strict=True)},
    )
