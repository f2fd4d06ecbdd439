import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.training_config import Loss
from services.trainer.loss import LossStatistics, with_router_loss
from tests.services.trainer.losses import make_terms, run
from tests.services.trainer.numerics import PLAIN


def test_token_mean_does_not_depend_on_the_partition() -> None:
    """Losses 3 | 1, 1, 1 give 6 / 4 = 1.5, not the mean of means 2."""
    parts = [make_terms([0.0], [-3.0]), make_terms([0.0] * 3, [-1.0] * 3)]
    merged = LossStatistics()
    for part in parts:
        merged = merged.merge(run([0.0] * part.targets.numel(), part)[2])
    together = run([0.0] * 4, make_terms([0.0] * 4, [-3.0, -1.0, -1.0, -1.0]))[2]
    assert merged == together
    assert together.loss_sum / together.denominator == pytest.approx(1.5)


def mean(settings: Loss, *, max_completion_tokens: int | None = None) -> float:
    """Three conversations on policy, where a token's loss is -A: one of two tokens with A = 1, one
    of forks with one and three tokens and A = -2, one of a token with A = 5."""
    terms = make_terms(
        [0.0] * 7,
        [1.0, 1.0, -2.0, -2.0, -2.0, -2.0, 5.0],
        samples=[0, 0, 1, 2, 2, 2, 3],
        weights=[1 / 2] * 2 + [1 / 4] * 4 + [1.0],
    )
    total, _, found = run(
        [0.0] * 7, terms, settings=settings, max_completion_tokens=max_completion_tokens
    )
    assert found.loss_sum == pytest.approx(total)
    return found.loss_sum / found.denominator


def test_normalisations() -> None:
    assert mean(Loss()) == pytest.approx((-2 + 8 - 5) / 7)
    assert mean(Loss(normalise="sequence")) == pytest.approx((-1 + 2 - 5) / 3)
    constant = Loss(normalise="constant")
    assert mean(constant, max_completion_tokens=100) == pytest.approx((-2 + 8 - 5) / 300)
    with pytest.raises(AssertionError, match="needs max_completion_tokens"):
        mean(constant)


@pytest.mark.parametrize("normalise", ["sequence", "constant"])
def test_forks_count_as_one_conversation_in_any_rows(normalise: str) -> None:
    settings = Loss.model_validate({"normalise": normalise})
    merged = LossStatistics()
    for size in (1, 3):
        terms = make_terms([0.0] * size, [-2.0] * size, weights=[0.25] * size)
        merged = merged.merge(
            run([0.0] * size, terms, settings=settings, max_completion_tokens=10)[2]
        )
    assert merged.denominator == (1.0 if normalise == "sequence" else 10.0)
    assert merged.tokens == 4


def test_guarded_tokens_leave_their_part_of_the_conversation_out() -> None:
    terms = make_terms([0.0, math.nan], [-2.0, -2.0], weights=[0.5, 0.5])
    for normalise, denominator, loss in (("sequence", 0.5, 2.0), ("constant", 4.0, 0.5)):
        settings = Loss.model_validate({"normalise": normalise})
        *_, found = run([0.0, 0.0], terms, settings=settings, max_completion_tokens=8)
        assert found.denominator == denominator
        assert found.loss_sum / found.denominator == pytest.approx(loss)


def test_statistics_by_lag_and_by_sample() -> None:
    first = make_terms([0.0] * 4, [-1.0, -1.0, 1.0, 0.0], samples=[0, 0, 1, 1])
    *_, one = run([math.log(0.5), 0.0, math.log(1.5), 0.0], first)
    assert (one.tokens, one.signal_tokens) == (4, 3)
    assert (one.clip_low_tokens, one.clip_high_tokens) == (1, 1)
    assert (one.clip_low_min, one.clip_high_max) == (0.0, 0.5)
    assert one.ratio_sum == pytest.approx(0.5 + 1 + 1.5 + 1)
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


def test_statistics_of_means_are_by_token_under_every_normalisation() -> None:
    terms = make_terms([0.0] * 3, [1.0] * 3, weights=[1.0, 0.5, 0.5])
    plain = run([0.0, 0.1, -0.1], terms)[2]
    other = run([0.0, 0.1, -0.1], terms, settings=Loss(clip_high=0.2, normalise="sequence"))[2]
    assert other.ratio_sum == plain.ratio_sum
    assert (other.tokens, other.denominator, plain.denominator) == (3, 2.0, 3.0)


# KL to the reference

KL = PLAIN.model_copy(update={"kl_coefficient": 0.5})


@pytest.mark.parametrize(
    ("new", "old", "reference", "kl", "slope"),
    [
        (-1.0, -1.0, -1.0, 0.0, 0.0),
        # r = exp(-1): r - 1 - log r, and 1 - r for log pi.
        (-1.0, -1.0, -2.0, math.exp(-1), 1 - math.exp(-1)),
        (-1.0, -1.0, 0.0, math.e - 2, 1 - math.e),
        # rho = 0.5 halves both; rho = 5 counts as 2.
        (-1.0, -1.0 + math.log(2), -2.0, math.exp(-1) / 2, (1 - math.exp(-1)) / 2),
        (-1.0, -1.0 - math.log(5), -2.0, 2 * math.exp(-1), 2 * (1 - math.exp(-1))),
        # Far from the reference log r is held at 20.
        (-60.0, -60.0, -1.0, math.exp(20) - 21, 0.0),
    ],
)
def test_kl_to_the_reference(
    new: float, old: float, reference: float, kl: float, slope: float
) -> None:
    # Without an advantage the KL is all there is.
    total, gradient, found = run(
        [new], make_terms([old], [0.0]), settings=KL, reference=[reference]
    )
    assert total == pytest.approx(0.5 * kl, rel=1e-5, abs=1e-7)
    assert gradient == pytest.approx([0.5 * slope], rel=1e-5, abs=1e-7)
    assert found.kl_ref_sum == pytest.approx(kl, rel=1e-5, abs=1e-7)
    assert found.kl_ref_tokens == 1
    assert found.loss_sum == pytest.approx(total)


def test_kl_to_the_reference_is_normalised_as_the_loss() -> None:
    terms = make_terms([-1.0] * 3, [1.0] * 3, weights=[1.0, 0.5, 0.5])
    settings = KL.model_copy(update={"normalise": "sequence"})
    total, _, found = run([-1.0] * 3, terms, settings=settings, reference=[-2.0] * 3)
    assert total / found.denominator == pytest.approx(-1 + 0.5 * math.exp(-1))
    assert found.kl_ref_sum == pytest.approx(3 * math.exp(-1))


def test_without_a_reference_there_is_no_kl_to_it() -> None:
    *_, found = run([-1.0], make_terms([-1.0], [1.0]))
    assert (found.kl_ref_tokens, found.kl_ref_sum) == (0, 0.0)


# Routers


def test_router_losses_are_a_mean_by_the_rows_parts_of_the_denominator() -> None:
    merged, slopes = LossStatistics(), []
    for size, aux in ((1, 2.0), (3, 1.2)):
        total, _, found = run([0.0] * size, make_terms([0.0] * size, [0.0] * size))
        value = torch.tensor(aux, requires_grad=True)
        added, found = with_router_loss(torch.tensor(total), found, value, coefficient=0.5)
        slopes += [float(s) for s in torch.autograd.grad(added, value)]
        assert float(added.detach()) == pytest.approx(0.5 * size * aux)
        merged = merged.merge(found)
    assert merged.aux_loss == pytest.approx((2 + 3.6) / 4)
    assert merged.loss_sum / merged.denominator == pytest.approx(0.5 * 1.4)
    assert slopes == [0.5, 1.5]


def test_without_routers_there_is_no_router_loss() -> None:
    assert run([0.0], make_terms([0.0], [1.0]))[2].aux_loss is None


# Partitions

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


counts = st.integers(0, 5)
statistics = st.builds(
    LossStatistics,
    tokens=counts,
    denominator=counts.map(float),
    kl_ref_tokens=counts,
    aux_loss_sum=counts.map(float),
    aux_loss_weight=counts.map(float),
    clip_low_min=st.sampled_from([0.0, 0.5, math.inf]),
    clip_high_max=st.sampled_from([1.0, 0.5, -math.inf]),
)


@given(statistics, statistics, statistics)
def test_merging_is_associative_and_commutative(
    a: LossStatistics, b: LossStatistics, c: LossStatistics
) -> None:
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(b) == b.merge(a)
    assert a.merge(LossStatistics()) == a
