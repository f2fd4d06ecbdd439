"""How long a step would take if what holds it back were faster.

The stages work at the same time, so a step lasts as long as the slowest of them; what one stage
gains counts only down to the next. A prediction is a bound, not a promise: stages also wait for
each other's bad moments.
"""

import math
import statistics
from dataclasses import dataclass

from services.aggregator.rules import Name
from services.aggregator.window import TRAINING, Window, environment_frac, share_of_step


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds that each stage needs for one step's groups, were it never to wait; None where it
    cannot be told."""

    training_s: float | None
    generation_s: float | None
    scoring_s: float | None


def stage_times(window: Window) -> Stages:
    """What each stage needs for a step, with the replicas that it has.

    Example: in 62 s slots were 50 % busy and 62 groups were made, 2 a second of busy slots; so
    steps of 32 groups need 16 s of generation.
    """
    training = (step.seconds(*TRAINING, "weight_sync_s") for step in window.steps)
    known = [seconds for seconds in training if seconds is not None]
    return Stages(
        training_s=max(0.0, statistics.median(known)) if known else None,
        generation_s=_busy_s(window, window.slots_busy_frac, window.groups_generated),
        scoring_s=_busy_s(window, window.scorer_busy_frac, window.groups_scored),
    )


def predict(name: Name, window: Window, stages: Stages, speed_up: float = math.inf) -> float | None:
    """Seconds of a step if what `name` blames were `speed_up` times as fast, by default free: at
    most what a step takes now. None where nothing is to blame or a stage's time is absent.

    Example: training 1.2 s, generation 3.1 s, scoring 0.4 s, generation-bound: 1.55 s at twice the
    speed, 1.2 s for free.
    """
    training_s, generation_s, scoring_s = stages.training_s, stages.generation_s, stages.scoring_s
    if not window.steps or training_s is None or generation_s is None or scoring_s is None:
        return None
    step_s = statistics.median(step.step_s for step in window.steps)
    saved = 1.0 - 1.0 / speed_up
    waited_s = 0.0
    match name:
        case "generation-bound":
            generation_s -= generation_s * saved
        case "environment-bound":
            # The engines' part of a conversation stays.
            generation_s -= generation_s * (environment_frac(window) or 0.0) * saved
        case "scoring-bound":
            scoring_s -= scoring_s * saved
        case "sync-bound":
            # Paused slots are busy slots: both sides of a publish become shorter.
            paused = min(1.0, max(0.0, window.generator_paused_frac or 0.0))
            held_s = (share_of_step(window.steps, "weight_sync_s") or 0.0) * step_s
            training_s -= min(training_s, held_s) * saved
            generation_s -= generation_s * paused * saved
        case "training-bound":
            training_s -= training_s * saved
        case "straggler-bound" | "pacing-bound":
            # No stage is slow: the wait itself is what becomes shorter.
            part = "straggler_wait_s" if name == "straggler-bound" else "rollout_wait_s"
            share = share_of_step(window.steps, part) or 0.0
            waited_s = step_s - share * step_s * saved
        case "balanced" | "not enough data":
            return None
    return min(step_s, max(waited_s, training_s, generation_s, scoring_s))


def _busy_s(window: Window, busy_frac: float | None, num_groups: float | None) -> float | None:
    """Busy seconds of a stage for the groups of one step."""
    if busy_frac is None or window.groups_per_step is None or not num_groups:
        return None
    window_s = math.fsum(step.step_s for step in window.steps)
    busy_s = window.groups_per_step * window_s * busy_frac / num_groups
    return busy_s if math.isfinite(busy_s) and busy_s >= 0 else None
