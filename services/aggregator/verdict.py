"""The verdict: which stage holds a run back, as a pure function of a window of its steps.

Every rule is a list of conditions on shares of a step and on what was measured meanwhile. Of the
rules whose conditions all hold, the one that costs the largest share of a step wins; of two that
cost the same, the earlier in RULES. A value that is absent is never taken for 0: a condition on it
does not hold, and where it could have decided, it is named as missing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from services.aggregator.lagging import Lag, lagging
from services.aggregator.prediction import Stages, predict, stage_times
from services.aggregator.rules import RULES, Evidence, Finding, Name, distinct, find, holds
from services.aggregator.window import Window, all_shares, mean_step_s

Confidence = Literal["high", "medium", "low"]

DEFAULT_STEPS = 20
"""Steps of a window; a shorter one is never judged with high confidence."""

MIN_STEPS = 3
"""Of fewer steps one may be anything."""

HIGH_FRAC, MEDIUM_FRAC = 0.8, 0.5
"""Share of the steps in which the conditions hold, for this confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer. Shares are 0 to 1; of "balanced" and "not enough data" there is no share."""

    name: Name
    num_steps: int
    first_step: int | None
    last_step: int | None
    step_s: float | None = None
    """Mean seconds of a step."""
    share: float | None = None
    """Of a step, that the verdict costs."""
    confidence: Confidence | None = None
    evidence: tuple[Evidence, ...] = ()
    """The verdict's conditions; without one that holds, all conditions of the table."""
    missing: tuple[str, ...] = ()
    """Metrics whose absence left something undecided."""
    unaccounted_share: float | None = None
    stages: Stages | None = None
    step_s_if_free: float | None = None
    """Predicted, if what holds the run back took no time."""
    speed_up: float | None = None
    step_s_at_speed_up: float | None = None
    """Predicted, if it were `speed_up` times as fast."""
    culprit: str | None = None
    """Of environment-bound: the tool or the environment. Of scoring-bound: the reward function."""
    lag: Lag | None = None
    """The replica that lags in what the verdict is about: of generation-bound, environment-bound,
    straggler-bound and sync-bound a generator, of scoring-bound a scorer."""


def judge(window: Window, *, speed_up: float | None = None) -> Verdict:
    """The verdict on a window. Raises ValueError for a `speed_up` below 1.

    Example: steps of 3.1 s with 1.9 s of rollout_wait_s, 32 groups a step, 0.5 groups and 3 samples
    waiting, slots 97 % busy: generation-bound, at a share of 1.9 / 3.1 = 0.61.
    """
    if speed_up is not None and not 1 <= speed_up < math.inf:
        raise ValueError("speed_up: must be a number, 1 or more")
    steps = window.steps
    numbers = [step.step for step in steps]
    first, last = min(numbers, default=None), max(numbers, default=None)
    if len(steps) < MIN_STEPS:
        return Verdict(
            name="not enough data",
            num_steps=len(steps),
            first_step=first,
            last_step=last,
            missing=("perf/step_s",),
        )
    shares = all_shares(steps)
    findings = [find(rule, shares, window) for rule in RULES]
    holding = [finding for finding in findings if finding.holds]
    undecided = [finding for finding in findings if finding.holds is None]
    missing = distinct(key for finding in undecided for key in finding.missing)
    # max() keeps the first of equals.
    best = max(holding, key=lambda finding: finding.share or 0.0, default=None)
    everything = distinct(each for finding in findings for each in finding.evidence)
    name: Name = "not enough data" if undecided else "balanced"
    if best is not None:
        name = best.rule.name
    stages = stage_times(window)
    return Verdict(
        name=name,
        num_steps=len(steps),
        first_step=first,
        last_step=last,
        step_s=mean_step_s(steps),
        share=None if best is None else best.share,
        confidence=_confidence(best, undecided, window),
        evidence=everything if best is None else best.evidence,
        missing=missing,
        unaccounted_share=shares["unaccounted_s"],
        stages=stages,
        step_s_if_free=predict(name, window, stages),
        speed_up=speed_up,
        step_s_at_speed_up=None if speed_up is None else predict(name, window, stages, speed_up),
        culprit=_culprit(name, window),
        lag=_lag(name, window),
    )


def _confidence(
    best: Finding | None, undecided: Sequence[Finding], window: Window
) -> Confidence | None:
    """By the steps in which the verdict's own conditions hold; of balanced (no `best`), in which no
    rule's do. What is pooled holds in all or none.
    """
    if best is None and undecided:
        return None
    if best is not None and best.share is not None:
        for other in undecided:
            if other.share is None or other.share > best.share:
                # What is missing may have named a larger cost.
                return "low"
    rules = RULES if best is None else (best.rule,)
    spread = 0 if best is None else best.rule.spread
    num_holding = 0
    for place in range(len(window.steps)):
        shares = all_shares(window.steps[max(0, place - spread) : place + spread + 1])
        found = any(holds(rule, shares, window) for rule in rules)
        num_holding += found == (best is not None)
    frac = num_holding / len(window.steps)
    if frac >= HIGH_FRAC and len(window.steps) >= DEFAULT_STEPS:
        return "high"
    return "medium" if frac > MEDIUM_FRAC else "low"


def _culprit(name: Name, window: Window) -> str | None:
    """What took most of the time of a stage that users bring along."""
    match name:
        case "environment-bound":
            if (window.env_s or 0.0) > (window.tool_s or 0.0):
                slowest = _slowest(window.environment_s)
                return "the environment" if slowest is None else f"the environment {slowest}"
            slowest = _slowest(window.tool_latency_s)
            return "the tools" if slowest is None else f"the tool {slowest}"
        case "scoring-bound":
            slowest = _slowest(window.function_s)
            return "the reward functions" if slowest is None else f"the reward function {slowest}"
    return None


def _lag(name: Name, window: Window) -> Lag | None:
    """The replica to look at first; of sync-bound only one that new weights hold."""
    match name:
        case "generation-bound" | "environment-bound":
            return next(iter(lagging(window.generators)), None)
        case "straggler-bound":
            # All conversations of a slow engine are late.
            lags = (lag for lag in lagging(window.generators) if lag.why == "pace")
            return min(lags, key=lambda lag: lag.value, default=None)
        case "sync-bound":
            held = (lag for lag in lagging(window.generators) if lag.why == "paused")
            return max(held, key=lambda lag: lag.value, default=None)
        case "scoring-bound":
            return next(iter(lagging(window.scorers)), None)
    return None


def _slowest(seconds: Mapping[str, float]) -> str | None:
    return max(seconds, key=lambda name: seconds[name], default=None)
