"""How long a step would take if what holds it back were faster.

The stages work at the same time, so a step lasts as long as the slowest of them; what one stage
gains counts only down to the next. A prediction is a bound, not a promise: stages also wait for
each other's bad moments. All seconds are means over the window, as a run's time is.
"""

import math
from dataclasses import dataclass

from services.aggregator.rules import Name, sync_share
from services.aggregator.window import (
    TRAINING,
    Window,
    all_shares,
    environment_frac,
    mean_step_s,
    share_of_step,
)


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds that each stage needs for one step's groups, were it never to wait; None where it
    cannot be told."""

    training_s: float | None
    """All of a step in which the trainer does not wait for groups: checkpoints, evaluations and
    what nobody measured are in it, since nothing else becomes shorter by them."""
    generation_s: float | None
    scoring_s: float | None


def stage_times(window: Window) -> Stages:
    """What each stage needs for a step, with the replicas that it has.

    Example: in 62 s slots were 50 % busy and 62 groups were made, 2 a second of busy slots; so
    steps of 32 groups need 16 s of generation.
    """
    waited = share_of_step(window.steps, "rollout_wait_s")
    # A trainer that waits for no straggler need not say so.
    waited_late = share_of_step(window.steps, "straggler_wait_s") or 0.0
    training_s = None
    if waited is not None:
        training_s = mean_step_s(window.steps) * max(0.0, 1.0 - waited - waited_late)
    return Stages(
        training_s=training_s,
        generation_s=_busy_s(window, window.slots_busy_frac, window.groups_generated),
        scoring_s=_busy_s(window, _scoring_frac(window), window.groups_scored),
    )


def predict(name: Name, window: Window, stages: Stages, speed_up: float = math.inf) -> float | None:
    """Seconds of a step if what `name` blames were `speed_up` times as fast, by default free: at
    most what a step takes now. None where nothing is to blame or a stage's time is absent.

    Example: steps of 3.1 s in which slots are 97 % busy, training 1.2 s, scoring 0.4 s,
    generation-bound: 1.6 s at twice the speed (3.1 s less half of 97 % of it), 1.2 s for free.
    """
    training_s, generation_s, scoring_s = stages.training_s, stages.generation_s, stages.scoring_s
    if not window.steps or training_s is None or generation_s is None or scoring_s is None:
        return None
    step_s = mean_step_s(window.steps)
    saved = 1.0 - 1.0 / speed_up
    # What the stage to blame is not busy of a step stays: requests on their way, versions loaded.
    # Its busy time is a share of the step, since all others wait for it; how many groups it made
    # tells less: in a short window some are made before their step, or for the next one.
    match name:
        case "generation-bound":
            left_s = step_s * (1.0 - _frac(window.slots_busy_frac) * saved)
            generation_s = 0.0
        case "environment-bound":
            # The engines' part of a conversation stays.
            part = _frac(window.slots_busy_frac) * _frac(environment_frac(window))
            left_s = step_s * (1.0 - part * saved)
            generation_s = 0.0
        case "scoring-bound":
            left_s = step_s * (1.0 - _frac(_scoring_frac(window)) * saved)
            scoring_s = 0.0
        case "sync-bound":
            left_s, training_s, generation_s = _synced(window, stages, saved)
        case "training-bound":
            share = share_of_step(window.steps, *TRAINING) or 0.0
            left_s = step_s - share * step_s * saved
            training_s = 0.0
        case "straggler-bound" | "pacing-bound":
            # No stage is slow: the wait itself is what becomes shorter.
            wait = "straggler_wait_s" if name == "straggler-bound" else "rollout_wait_s"
            share = share_of_step(window.steps, wait) or 0.0
            left_s = step_s - share * step_s * saved
        case "balanced" | "not enough data":
            return None
    return min(step_s, max(left_s, training_s, generation_s, scoring_s))


def _synced(window: Window, stages: Stages, saved: float) -> tuple[float, float, float]:
    """With a faster sync: what is left of a step, what training needs, and what generation.

    Publishing holds the trainer, and loading the generators, whose busy slots are paused: the one
    that is held for longer is the one that counts.
    """
    assert stages.training_s is not None
    assert stages.generation_s is not None
    step_s = mean_step_s(window.steps)
    paused = _frac(window.generator_paused_frac)
    held = share_of_step(window.steps, "weight_sync_s") or 0.0
    saved_s = (sync_share(all_shares(window.steps), window) or 0.0) * step_s * saved
    return (
        step_s - saved_s,
        max(0.0, stages.training_s - held * step_s * saved),
        stages.generation_s * (1.0 - paused * saved),
    )


def _scoring_frac(window: Window) -> float | None:
    """Of what scorers can have in work; of one that does not say it what it may be at most."""
    load = window.scorer_load_frac
    return window.scorer_busy_frac if load is None else load


def _frac(value: float | None) -> float:
    return min(1.0, max(0.0, value or 0.0))


def _busy_s(window: Window, busy_frac: float | None, num_groups: float | None) -> float | None:
    """Busy seconds of a stage for the groups of one step."""
    if busy_frac is None or window.groups_per_step is None or not num_groups:
        return None
    window_s = math.fsum(step.step_s for step in window.steps)
    busy_s = window.groups_per_step * window_s * busy_frac / num_groups
    return busy_s if math.isfinite(busy_s) and busy_s >= 0 else None
