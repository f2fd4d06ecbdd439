"""Proof that a weight load did what it reported: once per start by perturbed weights, then by a
canary at each load.

A canary alone passes a stale tensor: one optimizer step moves log-probabilities by less than
rounding noise. So before a replica is ready it loads a perturbed copy of the weights (each tensor
times 1 + 0.05 u), and the movement of its canary must be the movement that the trainer computed for
the same perturbation. A tensor left behind shows plainly.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

PROOF_LIMIT = {"float32": 0.02, "bfloat16": 0.3}
"""Largest error of the movement (and of the true weights' log-probabilities) relative to the
movement's own size, by dtype: above rounding, far below what one stale matrix causes."""

CANARY_FLOOR = 1e-4
"""Canary errors below this never count as growth."""

CANARY_GROWTH = 3.0
"""A canary error above so many times that of the first version loaded is a failed load."""


class LoadNotProven(RuntimeError):
    """The engine does not compute with the weights that were loaded into it."""


@dataclass(frozen=True)
class Proof:
    """What the load-path proof measured, all as root mean squares over the canary's
    log-probabilities."""

    movement: float
    """How far the perturbation moved the trainer's values."""
    movement_error: float
    """How far the engine's movement is from the trainer's."""
    true_error: float
    """How far the engine's values for the true weights are from the trainer's."""


def prove(
    *,
    engine_true: "np.ndarray[Any, Any]",
    engine_perturbed: "np.ndarray[Any, Any]",
    trainer_true: "np.ndarray[Any, Any]",
    trainer_perturbed: "np.ndarray[Any, Any]",
    dtypes: Collection[str],
) -> Proof:
    """Compare movements; all arrays float32 [rows, tokens - 1]. dtypes: the trainer's and the
    engine's; the coarsest sets the limit. Raises LoadNotProven, saying what is off by how much."""
    moved = trainer_perturbed.astype(np.float64) - trainer_true
    error = (engine_perturbed.astype(np.float64) - engine_true) - moved
    proof = Proof(
        movement=_rms(moved),
        movement_error=_rms(error),
        true_error=_rms(engine_true.astype(np.float64) - trainer_true),
    )
    limit = max(PROOF_LIMIT[dtype] for dtype in dtypes) * proof.movement
    if not (proof.movement_error <= limit and proof.true_error <= limit):
        raise LoadNotProven(
            "weight load not proven: the engine does not compute with the weights that were loaded "
            "(a stale tensor, such as a tied output head?): perturbed weights move the canary by "
            f"{proof.movement:.3g}, the engine is off by {proof.movement_error:.3g} there and by "
            f"{proof.true_error:.3g} on the true weights (allowed: {limit:.3g})"
        )
    return proof


class Canary:
    """The canary's error over the versions that this replica loads, against the first one's."""

    def __init__(self) -> None:
        self.first_gap: float | None = None

    def gap(self, engine: "np.ndarray[Any, Any]", trainer: "np.ndarray[Any, Any]") -> float:
        """Mean absolute difference of log-probabilities. Raises LoadNotProven when it has grown,
        or is no number."""
        gap = float(np.abs(engine.astype(np.float64) - trainer).mean())
        if self.first_gap is None:
            self.first_gap = gap
        allowed = max(CANARY_FLOOR, CANARY_GROWTH * self.first_gap)
        if not gap <= allowed:
            raise LoadNotProven(
                f"canary failed: the engine's log-probabilities are {gap:.3g} off the trainer's on "
                f"average (allowed: {allowed:.3g}; at the first version: {self.first_gap:.3g})"
            )
        return gap


def _rms(values: "np.ndarray[Any, Any]") -> float:
    return float(np.sqrt(np.mean(np.square(values))))
