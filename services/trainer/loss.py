"""The policy-gradient loss of trained tokens, as sums: denominators are known only at the end of a
step.

Ratios are rho = exp(clamp(log pi - log mu, -20, 20)) in float32, pi the policy being trained and mu
the one that sampled. What is not finite is guarded: left out of numerators and denominators,
counted, and cut off before any exp, so that no gradient is NaN (0 x NaN is NaN: multiplying by a
mask would not do). What a token's ratio and advantage become is in loss_kinds.py.
"""

import math
from dataclasses import dataclass, field, fields, replace

import torch

from services.common.training_config import Loss
from services.trainer.loss_kinds import KINDS, Ratios, TokenLosses
from services.trainer.packing import Terms

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this size: exp(20) is 5e8, well inside float32."""

MAX_TERM = 1e30
"""Largest product of ratio, advantage and log-probability; sums of such terms stay inside
float32."""

KL_RATIO_CAP = 2.0
"""Largest weight of a token in the KL to the reference."""

LAG_KEYS = ("0", "1", "2", "3+")
"""Buckets of a token's lag: optimizer steps between the weights that sampled it and the current
ones."""

GUARDS = ("logprobs", "old_logprobs", "advantages", "reference_logprobs", "ratios", "aux_loss")
"""What can be not finite: of a term the trainer's log-probability (or entropy), the sampler's, the
advantage, the reference's log-probability, and a product of finite ones; of a row the loss of its
routers."""


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
    """Trained, unguarded tokens: the denominator of everything here but the loss."""
    denominator: float = 0.0
    """What the loss is divided by: `tokens`, or conversations, or conversations x the most tokens
    that one may have (`loss.normalise`). A conversation of n trained tokens counts 1/n for each
    that is not guarded, so parts of it add up in any rows."""
    loss_sum: float = 0.0
    """Of what is optimised, with the KL to the reference and the loss of routers."""
    entropy_sum: float = 0.0
    """Of softmax(logits / T), in nats."""
    ratio_sum: float = 0.0
    clip_low_tokens: int = 0
    """Cut off from below by the kind of loss; for clip rho < 1 - low and A < 0."""
    clip_high_tokens: int = 0
    """Cut off from above; for clip rho > 1 + high and A > 0."""
    signal_tokens: int = 0
    """A is not 0."""
    kl_ref_tokens: int = 0
    """Tokens with a reference; 0 without one."""
    kl_ref_sum: float = 0.0
    """Of min(rho, 2) k3, which estimates KL(pi || reference) over what pi would say."""
    aux_loss_sum: float = 0.0
    """Of the rows' router losses, each times the row's part of the denominator."""
    aux_loss_weight: float = 0.0
    """Sum of those parts; 0 for a model without routers."""
    clip_low_min: float = math.inf
    """Smallest share of low-clipped tokens in one sample; inf without samples."""
    clip_high_max: float = -math.inf
    """Largest share of high-clipped tokens in one sample; -inf without samples."""
    lags: tuple[LagStatistics, ...] = field(default_factory=_no_lags)
    """By LAG_KEYS."""
    guarded: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GUARDS, 0))
    """Left out, by the first of GUARDS that applies."""

    @property
    def kl_sum(self) -> float:
        """Sum of the k3 estimate of KL(mu || pi) over all lags."""
        return sum(lag.kl_sum for lag in self.lags)

    @property
    def aux_loss(self) -> float | None:
        """Mean of the router loss over the step; None without routers."""
        return self.aux_loss_sum / self.aux_loss_weight if self.aux_loss_weight else None

    def merge(self, other: "LossStatistics") -> "LossStatistics":
        """Both together; associative and commutative (floats to rounding)."""
        apart = {
            "clip_low_min": min(self.clip_low_min, other.clip_low_min),
            "clip_high_max": max(self.clip_high_max, other.clip_high_max),
            "lags": tuple(a.merge(b) for a, b in zip(self.lags, other.lags, strict=True)),
            "guarded": {place: self.guarded[place] + other.guarded[place] for place in GUARDS},
        }
        names = [each.name for each in fields(self) if each.name not in apart]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return LossStatistics(**(sums | apart))


def policy_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    terms: Terms,
    *,
    num_samples: int,
    settings: Loss,
    reference_logprobs: torch.Tensor | None = None,
    max_completion_tokens: int | None = None,
) -> tuple[torch.Tensor, LossStatistics]:
    """Sum of the losses of a row's terms, and its statistics.

    logprobs [M] float32: log pi of the terms, with gradient. entropy [M] float32.
    reference_logprobs [M] float32, without gradient: with a coefficient, each loss gets the KL of
    `reference_kl`. `terms.samples` is below `num_samples`. max_completion_tokens: most tokens of a
    conversation, needed for `normalise = "constant"`.

    The sum is a scalar; divided by `statistics.denominator`, summed over the step, it is the loss.
    Example: one micro-batch with a token of loss 3 and one with three tokens of loss 1 have sums 3
    and 3 and denominators 1 and 3, so the loss is 6 / 4 = 1.5, as in any other partition.
    """
    faulty = _faults(logprobs, entropy, terms, reference_logprobs)
    valid = ~torch.stack([*faulty.values()]).any(0)
    safe_logprobs = torch.where(valid, logprobs, 0.0)
    difference = safe_logprobs - torch.where(valid, terms.old_logprobs, 0.0)
    ratios = Ratios(
        logprobs=safe_logprobs,
        log_ratio=difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        advantages=torch.where(valid, terms.advantages, 0.0),
        samples=terms.samples,
        valid=valid,
        num_samples=num_samples,
    )
    found = KINDS[settings.kind](ratios, settings)
    losses, kl_ref = found.losses, None
    if reference_logprobs is not None:
        kl_ref = reference_kl(ratios, torch.where(valid, reference_logprobs, 0.0))
        losses = losses + settings.kl_coefficient * kl_ref
    if settings.normalise == "sequence":
        losses = losses * terms.weights
    losses = torch.where(valid, losses, 0.0)
    with torch.no_grad():
        statistics = _statistics(
            ratios,
            found,
            terms,
            faulty=faulty,
            gap=difference.abs(),
            losses=losses,
            entropy=torch.where(valid, entropy, 0.0),
            kl_ref=kl_ref,
        )
    return losses.sum(), _with_denominator(statistics, settings, max_completion_tokens)


def reference_kl(ratios: Ratios, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """sg(min(rho, 2)) (r - 1 - log r) with r = reference / pi, of every token [M].

    Schulman's k3 estimate of KL(pi || reference) (http://joschu.net/blog/kl-approx.html), weighted
    since mu sampled the tokens and not pi. Example: log pi -1, reference -2, rho 1 gives
    exp(-1) - 1 + 1 = 0.3679, with gradient 1 - exp(-1) = 0.6321 for log pi. The weight takes no
    gradient, so that near the reference this is the gradient of either KL, and far from it that of
    KL(reference || pi).
    """
    log_r = (reference_logprobs - ratios.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = ratios.log_ratio.detach().clamp(max=math.log(KL_RATIO_CAP)).exp()
    return weight * (torch.expm1(log_r) - log_r)


def with_router_loss(
    total: torch.Tensor,
    statistics: LossStatistics,
    aux_loss: torch.Tensor,
    *,
    coefficient: float,
) -> tuple[torch.Tensor, LossStatistics]:
    """A row's sum of losses with its routers' load-balancing loss, a scalar, added.

    Its weight is the row's part of the denominator, so that over the step it is a mean. How a row
    was packed changes it: it is the one part of a gradient that depends on the partition. Example:
    rows with denominators 1 and 3 and aux losses 2 and 1.2 add a coefficient times
    (2 + 3.6) / 4 = 1.4 to the loss.
    """
    weight, value = statistics.denominator, float(aux_loss.detach())
    if not math.isfinite(value):
        guarded = statistics.guarded | {"aux_loss": statistics.guarded["aux_loss"] + 1}
        return total, replace(statistics, guarded=guarded)
    return total + (coefficient * weight) * aux_loss, replace(
        statistics,
        loss_sum=statistics.loss_sum + coefficient * weight * value,
        aux_loss_sum=statistics.aux_loss_sum + weight * value,
        aux_loss_weight=statistics.aux_loss_weight + weight,
    )


@torch.no_grad()
def _faults(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    terms: Terms,
    reference_logprobs: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """[M] bool by place: what is not finite in a term, or too large to stay finite."""
    difference = logprobs - terms.old_logprobs
    ratio = difference.clamp(0, MAX_LOG_RATIO).exp()
    size = ratio * terms.advantages.abs() * logprobs.abs().clamp(min=1)
    faulty = {
        "logprobs": ~(logprobs.isfinite() & entropy.isfinite()),
        "old_logprobs": ~terms.old_logprobs.isfinite(),
        "advantages": ~terms.advantages.isfinite(),
    }
    # A comparison with NaN is false: it counts as too large.
    too_large = ~((size <= MAX_TERM) & difference.isfinite())
    if reference_logprobs is not None:
        faulty["reference_logprobs"] = ~reference_logprobs.isfinite()
        too_large = too_large | ~(reference_logprobs - logprobs).isfinite()
    return faulty | {"ratios": too_large}


def _with_denominator(
    statistics: LossStatistics, settings: Loss, max_completion_tokens: int | None
) -> LossStatistics:
    """`denominator` holds conversations until here."""
    if settings.normalise == "tokens":
        return replace(statistics, denominator=float(statistics.tokens))
    if settings.normalise == "sequence":
        return statistics
    assert max_completion_tokens is not None, "normalise = constant needs max_completion_tokens"
    return replace(statistics, denominator=statistics.denominator * max_completion_tokens)


def _statistics(
    ratios: Ratios,
    found: TokenLosses,
    terms: Terms,
    *,
    faulty: dict[str, torch.Tensor],
    gap: torch.Tensor,
    losses: torch.Tensor,
    entropy: torch.Tensor,
    kl_ref: torch.Tensor | None,
) -> LossStatistics:
    """All sums in one transfer from the device. Guarded tokens have gap, loss, entropy and kl 0:
    only the ratio and the counts need the mask. `denominator` holds conversations."""
    valid, log_ratio = ratios.valid, ratios.log_ratio
    low, high = valid & found.low, valid & found.high
    kl = torch.expm1(log_ratio) - log_ratio
    lags = terms.lags.clamp(0, len(LAG_KEYS) - 1)
    by_lag = torch.zeros(3, len(LAG_KEYS), dtype=torch.float64, device=gap.device)
    by_lag.index_add_(1, lags, torch.stack([valid.double(), gap.double(), kl.double()]))
    gap_max = by_lag.new_zeros(len(LAG_KEYS)).scatter_reduce_(0, lags, gap.double(), "amax")
    by_sample = by_lag.new_zeros(3, ratios.num_samples)
    by_sample.index_add_(1, ratios.samples, torch.stack([valid, low, high]).double())
    counts = by_sample[0].clamp(min=1)
    has_tokens = by_sample[0] > 0
    first_faults, seen = {}, torch.zeros_like(valid)
    for place, where in faulty.items():
        first_faults[place] = (where & ~seen).sum()
        seen = seen | where
    signal = valid & (ratios.advantages != 0)
    conversations = torch.where(valid, terms.weights, 0.0)
    counted = {"tokens": valid, "clip_low": low, "clip_high": high, "signal": signal}
    summed = {
        "conversations": conversations,
        "loss": losses,
        "entropy": entropy,
        "ratio": torch.where(valid, log_ratio.exp(), 0.0),
        "kl_ref": torch.zeros_like(losses) if kl_ref is None else torch.where(valid, kl_ref, 0.0),
    }
    scalars = {
        **{name: values.sum(dtype=torch.float64) for name, values in (counted | summed).items()},
        **first_faults,
        "low_min": torch.where(has_tokens, by_sample[1] / counts, math.inf).min(),
        "high_max": torch.where(has_tokens, by_sample[2] / counts, -math.inf).max(),
    }
    flat = torch.cat(
        [by_lag[:2].flatten(), gap_max, by_lag[2], torch.stack([*scalars.values()])]
    ).tolist()
    size = len(LAG_KEYS)
    rows = [flat[i * size : (i + 1) * size] for i in range(4)]
    value = dict(zip(scalars, flat[4 * size :], strict=True))
    return LossStatistics(
        tokens=int(value["tokens"]),
        denominator=value["conversations"],
        loss_sum=value["loss"],
        entropy_sum=value["entropy"],
        ratio_sum=value["ratio"],
        clip_low_tokens=int(value["clip_low"]),
        clip_high_tokens=int(value["clip_high"]),
        signal_tokens=int(value["signal"]),
        kl_ref_tokens=0 if kl_ref is None else int(value["tokens"]),
        kl_ref_sum=value["kl_ref"],
        clip_low_min=value["low_min"],
        clip_high_max=value["high_max"],
        lags=tuple(
            LagStatistics(int(tokens), gap_sum, worst, kl_sum)
            for tokens, gap_sum, worst, kl_sum in zip(*rows, strict=True)
        ),
        guarded={place: int(value.get(place, 0)) for place in GUARDS},
    )
