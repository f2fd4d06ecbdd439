"""Terms and losses of hand-written numbers, for the tests of the loss."""

from collections.abc import Sequence

import torch

from services.common.training_config import Loss
from services.trainer.loss import LossStatistics, policy_loss
from services.trainer.packing import Terms
from tests.services.trainer.numerics import PLAIN


def make_terms(
    old: Sequence[float],
    advantages: Sequence[float],
    *,
    samples: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    lag: int = 0,
) -> Terms:
    """Terms with these log-probabilities of the sampler; of one sample and weight 1 by default."""
    size = len(old)
    return Terms(
        slots=torch.arange(size),
        targets=torch.zeros(size, dtype=torch.long),
        old_logprobs=torch.tensor(old),
        advantages=torch.tensor(advantages),
        samples=torch.tensor(samples or [0] * size),
        lags=torch.full((size,), lag),
        weights=torch.tensor(weights or [1.0] * size),
    )


def run(
    new: Sequence[float],
    terms: Terms,
    *,
    settings: Loss = PLAIN,
    entropy: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    max_completion_tokens: int | None = None,
) -> tuple[float, list[float], LossStatistics]:
    """Loss sum, its gradient by log-probability, and statistics. Entropies are 0.5 by default."""
    logprobs = torch.tensor(new, requires_grad=True)
    total, statistics = policy_loss(
        logprobs,
        torch.tensor(entropy or [0.5] * len(new)),
        terms,
        num_samples=int(terms.samples.max()) + 1,
        settings=settings,
        reference_logprobs=None if reference is None else torch.tensor(reference),
        max_completion_tokens=max_completion_tokens,
    )
    (gradient,) = torch.autograd.grad(total, logprobs)
    return float(total.detach()), gradient.tolist(), statistics
