import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.training_config import Loss
from services.trainer.loss import GUARDS, LossStatistics, policy_loss
from services.trainer.packing import Terms
from tests.services.trainer.numerics import PLAIN

NAN = float("nan")


def make_terms(
    old: list[float], advantages: list[float], *, samples: list[int] | None = None, lag: int = 0
) -> Terms:
    size = len(old)
    return Terms(
        slots=torch.arange(size),
        targets=torch.zeros(size, dtype=torch.long),
        old_logprobs=torch.tensor(old),
        advantages=torch.tensor(advantages),
        samples=torch.tensor(samples or [0] * size),
        lags=torch.full((size,), lag),
    )


def run(
    new: list[float], terms: Terms, *, settings: Loss = PLAIN
) -> tuple[float, list[float], LossStatistics]:
    """Loss sum, its gradient by log-probability, and statistics."""
    logprobs = torch.tensor(new, requires_grad=True)
    total, statistics = policy_loss(
        logprobs,
        torch.full_like(logprobs, 0.5),
        terms,
        num_samples=int(terms.samples.max()) + 1,
        settings=settings,
    )
    (gradient,) = torch.autograd.grad(total, logprobs)
    return float(total.detach()), gradient.tolist(), statistics


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.5, 1, -1.2, 0, "high"),
        (1.5, -1, 1.5, 1.5, "no"),
        (0.5, 1, -0.5, -0.5, "no"),
        (0.5, -1, 0.8, 0, "low"),
        (100, -1, 100, 100, "no"),
        (1.0, 1, -1, -1, "no"),
        (1.0, 0, 0, 0, "no"),
    ],
)
def test_reference_rows(
    ratio: float, advantage: float, loss: float, slope: float, clipped: str
) -> None:
    total, gradient, statistics = run([math.log(ratio)], make_terms([0.0], [advantage]))
    assert total == pytest.approx(loss, rel=1e-6)
    assert gradient == pytest.approx([slope], rel=1e-5, abs=1e-9)
    assert statistics.clip_low_tokens == (clipped == "low")
    assert statistics.clip_high_tokens == (clipped == "high")
    assert statistics.ratio_sum == pytest.approx(ratio, rel=1e-5)


def test_dual_clip_bounds_the_open_side() -> None:
    settings = PLAIN.model_copy(update={"dual_clip": 10.0})
    new = [math.log(100), math.log(9), math.log(100)]
    total, gradient, _ = run(new, make_terms([0.0] * 3, [-1.0, -1.0, 1.0]), settings=settings)
    assert total == pytest.approx(10 + 9 - 1.2, rel=1e-5)
    assert gradient == pytest.approx([0, 9, 0], rel=1e-5)


def test_log_ratio_is_clamped() -> None:
    total, gradient, statistics = run([0.0, -90.0], make_terms([-80.0, 0.0], [-1.0, 1.0]))
    assert total == pytest.approx(math.exp(20) - math.exp(-20), rel=1e-5)
    assert gradient == [0.0, 0.0]
    assert statistics.lags[0].gap_max == 90.0


def test_token_mean_does_not_depend_on_the_partition() -> None:
    """Losses 3 | 1, 1, 1 give 6 / 4 = 1.5, not the mean of means 2."""
    parts = [make_terms([0.0], [-3.0]), make_terms([0.0] * 3, [-1.0] * 3)]
    merged = LossStatistics()
    for part in parts:
        merged = merged.merge(run([0.0] * part.targets.numel(), part)[2])
    together = run([0.0] * 4, make_terms([0.0] * 4, [-3.0, -1.0, -1.0, -1.0]))[2]
    assert merged == together
    assert together.loss_sum / together.tokens == pytest.approx(1.5)


@pytest.mark.parametrize("broken", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("kind", GUARDS)
def test_what_is_not_finite_is_left_out_and_counted(kind: str, broken: float) -> None:
    new, old, advantages = [-1.0, -2.0, -1.5], [-1.0, -2.2, -1.0], [1.0, -1.0, 2.0]
    wanted = run(new[1:], make_terms(old[1:], advantages[1:]))
    {"logprobs": new, "old_logprobs": old, "advantages": advantages}[kind][0] = broken
    total, gradient, statistics = run(new, make_terms(old, advantages))
    assert total == pytest.approx(wanted[0])
    assert gradient == pytest.approx([0.0, *wanted[1]])
    assert statistics.tokens == 2
    assert statistics.guarded == dict.fromkeys(GUARDS, 0) | {kind: 1}
    assert statistics.ratio_sum == pytest.approx(wanted[2].ratio_sum)
    assert statistics.entropy_sum == pytest.approx(1.0)
    assert statistics.lags == wanted[2].lags


def test_all_guarded_leaves_no_token_and_no_nan() -> None:
    total, gradient, statistics = run([NAN, NAN], make_terms([NAN, 0.0], [1.0, 1.0]))
    assert (total, gradient, statistics.tokens) == (0.0, [0.0, 0.0], 0)
    assert statistics.guarded == {"logprobs": 2, "old_logprobs": 0, "advantages": 0}
    assert statistics.clip_low_min == math.inf
    assert statistics.clip_high_max == -math.inf


def test_statistics_by_lag_and_by_sample() -> None:
    first = make_terms([0.0] * 4, [-1.0, -1.0, 1.0, 0.0], samples=[0, 0, 1, 1])
    *_, one = run([math.log(0.5), 0.0, math.log(1.5), 0.0], first)
    assert (one.tokens, one.signal_tokens) == (4, 3)
    assert (one.clip_low_tokens, one.clip_high_tokens) == (1, 1)
    assert (one.clip_low_min, one.clip_high_max) == (0.0, 0.5)
    assert one.lags[0].tokens == 4
    assert one.lags[0].gap_sum == pytest.approx(math.log(2) + math.log(1.5))
    assert one.kl_sum == pytest.approx(
        (0.5 - 1 + math.log(2)) + (1.5 - 1 - math.log(1.5)), abs=1e-6
    )
    *_, other = run([math.log(0.5)], make_terms([0.0], [-1.0], lag=7))
    assert other.clip_low_min == 1.0
    both = one.merge(other)
    assert [lag.tokens for lag in both.lags] == [4, 0, 0, 1]
    assert both.lags[3].gap_max == pytest.approx(math.log(2))
    assert (both.clip_low_min, both.clip_low_tokens) == (0.0, 2)


finite = st.floats(-6, 2, width=32)


@given(st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=12), st.data())
def test_any_partition_of_terms_gives_the_same_sums_and_gradient(
    rows: list[tuple[float, float, float]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(rows)))
    settings = Loss()
    new, old, advantages = (list(column) for column in zip(*rows, strict=True))
    whole = run(new, make_terms(old, advantages), settings=settings)
    total, gradient, merged = 0.0, [], LossStatistics()
    for part in (slice(0, cut), slice(cut, None)):
        if new[part]:
            terms = make_terms(old[part], advantages[part])
            found, slopes, statistics = run(new[part], terms, settings=settings)
            total += found
            gradient += slopes
            merged = merged.merge(statistics)
    assert gradient == whole[1]
    assert total == pytest.approx(whole[0], rel=1e-6, abs=1e-5)
    assert merged.tokens == whole[2].tokens == len(rows)
    assert merged.kl_sum == pytest.approx(whole[2].kl_sum, rel=1e-6, abs=1e-6)
