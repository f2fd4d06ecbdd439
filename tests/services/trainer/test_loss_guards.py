"""What is not finite, or too extreme, leaves no trace but a count."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.training_config import LOSS_LIMITS, Loss
from services.trainer.loss import GUARDS, LossStatistics, with_router_loss
from tests.services.trainer.losses import make_terms, run
from tests.services.trainer.numerics import PLAIN

NAN = float("nan")
TERM_GUARDS = ("logprobs", "old_logprobs", "advantages", "reference_logprobs")

ALL = [
    Loss.model_validate({"kind": kind, "normalise": normalise, "kl_coefficient": coefficient})
    for kind in LOSS_LIMITS
    for normalise in ("tokens", "sequence", "constant")
    for coefficient in (0.0, 0.1)
]
"""gspo's other normalisations are refused in a recipe; they are finite all the same."""


@pytest.mark.parametrize("broken", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("place", [*TERM_GUARDS, "entropy"])
@pytest.mark.parametrize("kind", LOSS_LIMITS)
def test_what_is_not_finite_is_left_out_and_counted(kind: str, place: str, broken: float) -> None:
    given = {
        "logprobs": [-1.0, -2.0, -1.5],
        "old_logprobs": [-1.0, -2.2, -1.0],
        "advantages": [1.0, -1.0, -1.0],
        "reference_logprobs": [-1.0, -1.0, -1.0],
        "entropy": [0.5, 0.5, 0.5],
    }
    loss = Loss.model_validate({"kind": kind, "normalise": "sequence", "kl_coefficient": 0.1})

    def result(part: slice) -> tuple[float, list[float], LossStatistics]:
        values = {name: column[part] for name, column in given.items()}
        terms = make_terms(
            values["old_logprobs"],
            values["advantages"],
            samples=[0, 1, 1][part],
            weights=[0.5, 0.25, 0.25][part],
        )
        return run(
            values["logprobs"],
            terms,
            settings=loss,
            entropy=values["entropy"],
            reference=values["reference_logprobs"],
        )

    wanted = result(slice(1, None))
    given[place][0] = broken
    total, gradient, found = result(slice(None))
    assert total == pytest.approx(wanted[0])
    assert gradient == pytest.approx([0.0, *wanted[1]])
    assert (found.tokens, found.denominator) == (2, 0.5)
    counted_as = "logprobs" if place == "entropy" else place
    assert found.guarded == dict.fromkeys(GUARDS, 0) | {counted_as: 1}
    assert found.ratio_sum == pytest.approx(wanted[2].ratio_sum)
    assert found.entropy_sum == pytest.approx(1.0)
    assert found.kl_ref_sum == pytest.approx(wanted[2].kl_ref_sum)
    assert found.lags == wanted[2].lags


def test_all_guarded_leaves_no_token_and_no_nan() -> None:
    total, gradient, found = run([NAN, NAN], make_terms([NAN, 0.0], [1.0, 1.0]))
    assert (total, gradient, found.tokens, found.denominator) == (0.0, [0.0, 0.0], 0, 0.0)
    assert found.guarded == dict.fromkeys(GUARDS, 0) | {"logprobs": 2}
    assert found.clip_low_min == math.inf
    assert found.clip_high_max == -math.inf


def test_products_that_would_overflow_are_guarded() -> None:
    """Each factor is finite: a ratio of exp(20) with an advantage of 1e35, and a difference of two
    finite log-probabilities that is none."""
    terms = make_terms([-40.0, 3e38, -1.0], [1e35, 1.0, 1.0])
    total, gradient, found = run([-1.0, -3e38, -1.0], terms, settings=Loss())
    assert (total, gradient) == (-1.0, [0.0, 0.0, -1.0])
    assert found.guarded == dict.fromkeys(GUARDS, 0) | {"ratios": 2}
    assert found.lags[0].gap_max == 0.0


def test_log_ratio_is_clamped() -> None:
    total, gradient, found = run([0.0, -90.0], make_terms([-80.0, 0.0], [-1.0, 1.0]))
    assert total == pytest.approx(math.exp(20) - math.exp(-20), rel=1e-5)
    assert gradient == [0.0, 0.0]
    assert found.lags[0].gap_max == 90.0


@pytest.mark.parametrize("broken", [NAN, math.inf, -math.inf])
def test_a_router_loss_that_is_not_finite_adds_nothing(broken: float) -> None:
    total, gradient, found = run([-1.0], make_terms([-1.0], [1.0]))
    aux = torch.tensor(broken, requires_grad=True)
    weight = torch.tensor(total, requires_grad=True)
    added, after = with_router_loss(weight * 1.0, found, aux * 1.0, coefficient=0.01)
    assert float(added.detach()) == total
    added.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert float(weight.grad) == 1.0
    assert aux.grad is None
    assert after.guarded["aux_loss"] == 1
    assert after.aux_loss is None
    assert after.loss_sum == found.loss_sum
    assert gradient == [-1.0]


anything = st.one_of(
    st.sampled_from([NAN, math.inf, -math.inf, 0.0, -1.0, -90.0, 3e38, -3e38, 1e-40]),
    st.floats(width=32),
    st.floats(-8, 2, width=32),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[anything] * 5, st.integers(0, 2)), min_size=1, max_size=6))
def test_no_gradient_and_no_sum_is_ever_nan_or_infinite(
    rows: list[tuple[float, float, float, float, float, int]],
) -> None:
    new, old, advantages, reference, entropy, samples = (list(c) for c in zip(*rows, strict=True))
    for loss in ALL:
        weights = [1 / 3] * len(rows)
        terms = make_terms(old, advantages, samples=[int(s) for s in samples], weights=weights)
        total, gradient, found = run(
            new,
            terms,
            settings=loss,
            entropy=entropy,
            reference=reference if loss.kl_coefficient else None,
            max_completion_tokens=100,
        )
        assert math.isfinite(total), loss
        assert all(map(math.isfinite, gradient)), loss
        assert found.tokens + sum(found.guarded.values()) == len(rows)
        sums = (found.denominator, found.loss_sum, found.ratio_sum, found.kl_ref_sum, found.kl_sum)
        assert all(map(math.isfinite, sums)), loss
        assert all(math.isfinite(lag.gap_sum) for lag in found.lags)


def test_a_recipe_with_plain_clipping_guards_the_same() -> None:
    _, gradient, _ = run([NAN, -1.0], make_terms([-1.0, -1.0], [1.0, 1.0]), settings=PLAIN)
    assert gradient == [0.0, -1.0]
