import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.training_config import LOSS_LIMITS, Loss
from services.trainer.loss_kinds import KINDS
from tests.services.trainer.losses import make_terms, run
from tests.services.trainer.numerics import PLAIN

TIS, ICEPOP = Loss(kind="tis"), Loss(kind="icepop")
GSPO = Loss(kind="gspo", normalise="sequence")


def of_ratio(ratio: float, advantage: float, *, settings: Loss) -> tuple[float, float, str]:
    """Loss of one token with log pi = -1, its gradient, and where it was cut off."""
    terms = make_terms([-1 - math.log(ratio)], [advantage])
    total, [slope], found = run([-1.0], terms, settings=settings)
    cut = {(0, 0): "no", (1, 0): "low", (0, 1): "high"}
    return total, slope, cut[found.clip_low_tokens, found.clip_high_tokens]


def check(
    settings: Loss, ratio: float, advantage: float, loss: float, slope: float, cut: str
) -> None:
    found = of_ratio(ratio, advantage, settings=settings)
    assert found[0] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert found[1] == pytest.approx(slope, rel=1e-5, abs=1e-7)
    assert found[2] == cut


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "cut"),
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
def test_clip(ratio: float, advantage: float, loss: float, slope: float, cut: str) -> None:
    check(PLAIN, ratio, advantage, loss, slope, cut)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [(100, -1, 10, 0), (9, -1, 9, 9), (9, -2, 18, 18), (100, 1, -1.28, 0), (1.25, 1, -1.25, -1.25)],
)
def test_clip_by_default_has_a_wider_upper_bound_and_the_dual_clip(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    check(Loss(), ratio, advantage, loss, slope, "high" if loss == -1.28 else "no")


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "cut"),
    [
        (4, 1, 2, -2, "high"),
        (4, -1, -2, 2, "high"),
        (4, 0, 0, 0, "no"),
        (1.5, 2, 3, -3, "no"),
        (0.5, 1, 0.5, -0.5, "no"),
        (1e-6, -1, -1e-6, 1e-6, "no"),
    ],
)
def test_tis(ratio: float, advantage: float, loss: float, slope: float, cut: str) -> None:
    check(TIS, ratio, advantage, loss, slope, cut)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "cut"),
    [
        (4, 1, 4, -4, "no"),
        (4.99, -1, -4.99, 4.99, "no"),
        (6, 1, 0, 0, "high"),
        (6, -1, 0, 0, "high"),
        (0.51, 1, 0.51, -0.51, "no"),
        (0.4, 1, 0, 0, "low"),
        (0.4, -1, 0, 0, "low"),
        (0.4, 0, 0, 0, "no"),
    ],
)
def test_icepop(ratio: float, advantage: float, loss: float, slope: float, cut: str) -> None:
    check(ICEPOP, ratio, advantage, loss, slope, cut)


def test_icepop_keeps_masked_tokens_in_the_denominator() -> None:
    *_, found = run([-1.0, -1.0], make_terms([-9.0, -1.0], [1.0, 1.0]), settings=ICEPOP)
    assert (found.tokens, found.denominator, found.loss_sum) == (2, 2.0, 1.0)


def test_limits_of_icepop_may_be_open() -> None:
    settings = Loss(kind="icepop", icepop_low=0.0)
    assert of_ratio(1e-6, 1, settings=settings)[1] == pytest.approx(-1e-6)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "loss", "slope"),
    [
        # s = exp(-0.0001): inside, and each token has half of the gradient of 2 x -s / 2.
        ((2e-4, -4e-4), 1, -0.9999, -0.49995),
        # One token far out does not matter while the mean is inside.
        ((0.3, -0.3), 1, -1.0, -0.5),
        # s = exp(0.0005) > 1.0004.
        ((5e-4, 5e-4), 1, -1.0004, 0),
        ((5e-4, 5e-4), -1, math.exp(5e-4), math.exp(5e-4) / 2),
        # s = exp(-0.0004) < 0.9997.
        ((-4e-4, -4e-4), -1, 0.9997, 0),
        ((-4e-4, -4e-4), 1, -math.exp(-4e-4), -math.exp(-4e-4) / 2),
    ],
)
def test_gspo(log_ratios: tuple[float, float], advantage: float, loss: float, slope: float) -> None:
    terms = make_terms([0.0, 0.0], [advantage] * 2, weights=[0.5, 0.5])
    total, gradient, found = run(log_ratios, terms, settings=GSPO)
    assert total == pytest.approx(loss, rel=1e-6)
    assert gradient == pytest.approx([slope, slope], rel=1e-4)
    assert found.denominator == 1.0
    clipped = 0 if slope else 2
    assert found.clip_high_tokens + found.clip_low_tokens == clipped
    assert found.clip_high_tokens == (clipped if advantage > 0 else 0)


def test_gspo_takes_every_sample_by_itself_and_guarded_tokens_out_of_its_mean() -> None:
    alone = make_terms([0.0] * 2, [1.0] * 2, weights=[0.25] * 2)
    other = make_terms([0.0], [-1.0], weights=[1.0])
    wanted = [run([2e-4, -4e-4], alone, settings=GSPO), run([-3e-4], other, settings=GSPO)]
    together = make_terms(
        [0.0, 0.0, 0.0, math.nan],
        [1.0, -1.0, 1.0, 1.0],
        samples=[0, 1, 0, 0],
        weights=[0.25, 1.0, 0.25, 0.25],
    )
    total, gradient, found = run([2e-4, -3e-4, -4e-4, 5.0], together, settings=GSPO)
    assert total == pytest.approx(wanted[0][0] + wanted[1][0], rel=1e-6)
    expected = [wanted[0][1][0], wanted[1][1][0], wanted[0][1][1], 0.0]
    assert gradient == pytest.approx(expected, rel=1e-6)
    assert found.denominator == pytest.approx(1.5)


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_every_kind_has_the_policy_gradient(kind: str) -> None:
    """With pi = mu the gradient of the sum is -A for every token, whatever the kind."""
    settings = Loss.model_validate({"kind": kind})
    old, advantages = [-1.0, -0.5, -2.0], [1.5, 1.5, 1.5]
    _, gradient, found = run(old, make_terms(old, advantages), settings=settings)
    assert gradient == pytest.approx([-1.5] * 3)
    assert (found.clip_low_tokens, found.clip_high_tokens) == (0, 0)


def test_every_kind_has_its_function_and_its_limits() -> None:
    assert KINDS.keys() == LOSS_LIMITS.keys()


row = st.tuples(st.floats(-4, 0, width=32), st.floats(-4, 0, width=32), st.integers(0, 2))


@pytest.mark.parametrize("kind", ["clip", "tis", "icepop"])
@given(st.lists(row, min_size=1, max_size=8))
def test_gradients_are_those_of_the_formulas(
    kind: str, rows: list[tuple[float, float, int]]
) -> None:
    """Against the table's formulas written with min and clamp, in double precision."""
    settings = Loss.model_validate({"kind": kind})
    advantages = [float(choice - 1) for _, _, choice in rows]
    terms = make_terms([old for _, old, _ in rows], advantages)
    _, found, _ = run([new for new, _, _ in rows], terms, settings=settings)
    logprobs = torch.tensor([new for new, _, _ in rows], dtype=torch.float64, requires_grad=True)
    rho = (logprobs - terms.old_logprobs.double()).exp()
    a = terms.advantages.double()
    if kind == "clip":
        kept = torch.minimum(rho * a, rho.clamp(0.8, 1.28) * a)
        losses = -torch.where(a < 0, torch.maximum(kept, 10 * a), kept)
    elif kind == "tis":
        losses = -rho.detach().clamp(max=2) * a * logprobs
    else:
        inside = (rho >= 0.5) & (rho <= 5)
        losses = -torch.where(inside, rho, 0.0).detach() * a * logprobs
    (wanted,) = torch.autograd.grad(losses.sum(), logprobs)
    edges = [0.8, 1.28, 10.0] if kind == "clip" else [2.0] if kind == "tis" else [0.5, 5.0]
    for got, right, ratio in zip(found, wanted.tolist(), rho.tolist(), strict=True):
        # At an edge float32 and float64 may fall on different sides.
        if all(abs(ratio / edge - 1) > 1e-5 for edge in edges):
            assert got == pytest.approx(right, rel=1e-4, abs=1e-7)
