"""The kinds of loss: from importance ratios and advantages to one loss a trained token.

rho = exp(log pi - log mu), pi the policy being trained and mu the one that sampled. Every kind
decides in log space what it clips or masks, and a token that is cut off gets a constant instead of
a product with 0: no gradient passes through it, so none can be NaN there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.common.training_config import Loss


@dataclass(frozen=True, eq=False)
class Ratios:
    """M trained tokens of one row. Guarded ones hold zeros; what is computed for them is not
    used."""

    logprobs: torch.Tensor
    """[M] log pi, with gradient."""
    log_ratio: torch.Tensor
    """[M] log rho, clamped, with gradient."""
    advantages: torch.Tensor
    """[M]."""
    samples: torch.Tensor
    """[M] int64: the sample that each belongs to, below `num_samples`."""
    valid: torch.Tensor
    """[M] bool: not guarded."""
    num_samples: int


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """What a kind makes of them."""

    losses: torch.Tensor
    """[M]."""
    low: torch.Tensor
    """[M] bool: cut off from below, where it matters (A is not 0)."""
    high: torch.Tensor
    """[M] bool: cut off from above, likewise."""


def clip(ratios: Ratios, settings: Loss) -> TokenLosses:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), for A < 0 at most dual_clip |A|.

    PPO's clipping (arXiv:1707.06347) with separate bounds (DAPO, arXiv:2503.14476: 0.2 and 0.28)
    and the dual clip (arXiv:1912.09729), which bounds the one side that plain clipping leaves open.
    Examples (0.2, 0.2, dual clip off): rho 1.5 and A +1 gives -1.2 with gradient 0; rho 100 and
    A -1 gives +100, with dual_clip = 10 it gives +10 with gradient 0.
    """
    outside = _clipped(ratios.log_ratio, ratios.advantages, settings)
    cap = settings.limit("dual_clip")
    too_bad = (ratios.advantages < 0) & (ratios.log_ratio > math.log(cap))
    ratio = torch.where(too_bad, cap, outside.ratio)
    return TokenLosses(-ratio * ratios.advantages, outside.low, outside.high)


def tis(ratios: Ratios, settings: Loss) -> TokenLosses:
    """-sg(min(rho, cap)) A log pi: the policy gradient with truncated importance weights.

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025
    (https://fengyao.notion.site/off-policy-rl), there between a trainer and a sampler of the same
    weights; here between the policy and whatever sampled. Tokens beyond the cap keep the cap's
    weight, so none is silenced. Example (cap 2, log pi -1): rho 4 and A +1 gives 2 with gradient
    -2; rho 0.5 gives 0.5 with gradient -0.5. Only the gradient means something: the value falls and
    rises with log pi itself.
    """
    cap = math.log(settings.limit("tis_cap"))
    log_ratio = ratios.log_ratio.detach()
    weight = log_ratio.clamp(max=cap).exp()
    high = (log_ratio > cap) & (ratios.advantages != 0)
    losses = -weight * ratios.advantages * ratios.logprobs
    return TokenLosses(losses, torch.zeros_like(high), high)


def icepop(ratios: Ratios, settings: Loss) -> TokenLosses:
    """-1[low <= rho <= high] sg(rho) A log pi: tokens on which trainer and sampler disagree too
    much are masked; they stay in the denominator.

    IcePop (Ring-1T, arXiv:2510.18855; https://ringtech.notion.site/icepop: 0.5 and 5). Example
    (log pi -1, A +1): rho 4 gives 4 with gradient -4; rho 6 and rho 0.4 give 0 with gradient 0.
    """
    log_ratio = ratios.log_ratio.detach()
    low = log_ratio < _log(settings.limit("icepop_low"))
    high = log_ratio > math.log(settings.limit("icepop_high"))
    matters = ratios.advantages != 0
    weight = torch.where(low | high, 0.0, log_ratio.exp())
    losses = -weight * ratios.advantages * ratios.logprobs
    return TokenLosses(losses, low & matters, high & matters)


def gspo(ratios: Ratios, settings: Loss) -> TokenLosses:
    """-min(s A, clip(s, 1 - low, 1 + high) A) for every token, s = exp(mean of log rho over the
    sample's unguarded tokens): a sequence is clipped as a whole.

    GSPO (arXiv:2507.18071; 3e-4 and 4e-4 there). Example (0.0003, 0.0004): two tokens with log rho
    +0.0002 and -0.0004 and A +1 give s = exp(-0.0001) and -0.9999 each, and each takes half of the
    gradient of their sum. A sample is one token sequence: a conversation with forks has several.
    """
    samples = ratios.samples
    zeros = torch.zeros(ratios.num_samples, dtype=torch.float64, device=samples.device)
    log_ratio = torch.where(ratios.valid, ratios.log_ratio, 0.0).double()
    counts = zeros.index_add(0, samples, ratios.valid.double()).clamp(min=1)
    means = zeros.index_add(0, samples, log_ratio) / counts
    log_ratio = means.to(ratios.log_ratio.dtype)[samples]
    outside = _clipped(log_ratio, ratios.advantages, settings)
    return TokenLosses(-outside.ratio * ratios.advantages, outside.low, outside.high)


TokenLoss = Callable[[Ratios, Loss], TokenLosses]

KINDS: dict[str, TokenLoss] = {"clip": clip, "tis": tis, "icepop": icepop, "gspo": gspo}
"""By `loss.kind` of the recipe."""


@dataclass(frozen=True, eq=False)
class _Clipped:
    ratio: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def _clipped(log_ratio: torch.Tensor, advantages: torch.Tensor, settings: Loss) -> _Clipped:
    """Ratios held at a bound, without gradient, where going on would be rewarded."""
    low, high = 1 - settings.limit("clip_low"), 1 + settings.limit("clip_high")
    too_low = (advantages < 0) & (log_ratio < math.log(low))
    too_high = (advantages > 0) & (log_ratio > math.log(high))
    ratio = torch.where(too_high, high, torch.where(too_low, low, log_ratio.exp()))
    return _Clipped(ratio, too_low, too_high)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
