"""The load-path proof and the canary, on plain numbers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generator.proof import PROOF_LIMIT, Canary, LoadNotProven, prove

Array = np.ndarray[Any, Any]

RNG = np.random.default_rng(0)
TRUE: Array = -RNG.random((64, 15)).astype(np.float32)
MOVED: Array = TRUE + RNG.normal(0, 0.1, (64, 15)).astype(np.float32)


def prove_that(**changes: Any) -> Any:
    """The proof of an engine that does all right, `changes` apart."""
    given_: dict[str, Any] = {
        "engine_true": TRUE,
        "engine_perturbed": MOVED,
        "trainer_true": TRUE,
        "trainer_perturbed": MOVED,
        "dtypes": {"float32"},
    }
    return prove(**given_ | changes)


def test_an_engine_that_computes_as_the_trainer_is_proven() -> None:
    proof = prove_that(engine_true=TRUE + 1e-6, engine_perturbed=MOVED - 1e-6)
    assert proof.movement == pytest.approx(0.1, rel=0.1)
    assert proof.movement_error == pytest.approx(2e-6, rel=0.2)
    assert proof.true_error == pytest.approx(1e-6, rel=0.2)


def test_an_engine_that_did_not_move_is_not_proven() -> None:
    with pytest.raises(LoadNotProven, match="a stale tensor, such as a tied output head"):
        prove_that(engine_perturbed=TRUE)


def test_an_engine_that_moves_rightly_from_wrong_weights_is_not_proven() -> None:
    """Its head is stale in both loads: the movement alone would not show a constant shift."""
    with pytest.raises(LoadNotProven, match="on the true weights"):
        prove_that(engine_true=TRUE + 0.5, engine_perturbed=MOVED + 0.5)


@pytest.mark.parametrize("which", ["engine_true", "engine_perturbed", "trainer_perturbed"])
def test_what_is_no_number_is_not_proven(which: str) -> None:
    with pytest.raises(LoadNotProven):
        prove_that(**{which: np.full_like(TRUE, np.nan)})


@given(
    size=st.floats(1e-3, 10.0),
    share=st.floats(0.0, 1.0).filter(lambda share: abs(share - PROOF_LIMIT["bfloat16"]) > 1e-3),
    dtype=st.sampled_from(sorted(PROOF_LIMIT)),
)
def test_the_limit_is_a_share_of_the_movement(size: float, share: float, dtype: str) -> None:
    """What is allowed scales with the movement: no model is too flat or too peaked for it."""
    if abs(share - PROOF_LIMIT[dtype]) < 1e-3:
        return
    true = np.zeros((4, 3))
    moved = np.full((4, 3), size)
    arguments: dict[str, Any] = {
        "engine_true": true,
        "engine_perturbed": moved * (1 + share),
        "trainer_true": true,
        "trainer_perturbed": moved,
        "dtypes": {dtype, "float32"},
    }
    if share < PROOF_LIMIT[dtype]:
        assert prove(**arguments).movement == pytest.approx(size)
    else:
        with pytest.raises(LoadNotProven):
            prove(**arguments)


def test_the_canary_compares_with_the_first_version() -> None:
    """Allowed is three times the first gap: 1e-3 -> 3e-3."""
    canary = Canary()
    assert canary.gap(TRUE + 1e-3, TRUE) == pytest.approx(1e-3, rel=1e-3)
    assert canary.gap(TRUE + 2.9e-3, TRUE) == pytest.approx(2.9e-3, rel=1e-3)
    with pytest.raises(LoadNotProven, match="canary failed"):
        canary.gap(TRUE + 3.1e-3, TRUE)
    # A failure does not become what later ones are compared with.
    assert canary.gap(TRUE + 1e-3, TRUE) == pytest.approx(1e-3, rel=1e-3)


def test_the_canary_ignores_growth_below_rounding() -> None:
    canary = Canary()
    canary.gap(TRUE, TRUE)
    canary.gap(TRUE + 9e-5, TRUE)
    with pytest.raises(LoadNotProven):
        canary.gap(TRUE + 2e-4, TRUE)


def test_a_canary_that_is_no_number_fails_even_at_first() -> None:
    with pytest.raises(LoadNotProven):
        Canary().gap(np.full_like(TRUE, np.nan), TRUE)
