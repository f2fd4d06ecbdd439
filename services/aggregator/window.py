"""What a verdict rests on: a window of a run's steps, and what was measured meanwhile.

A value that was not measured is None, never 0.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from services.aggregator.lagging import Replica

Shares = Mapping[str, float | None]
"""Parts of a step over its length, by name: 0 to 1, or None where absent."""

STEP_PARTS = (
    "rollout_wait_s",
    "straggler_wait_s",
    "data_s",
    "fwd_bwd_s",
    "optimizer_s",
    "weight_sync_s",
    "unaccounted_s",
)
"""What is read of each step, under `perf/`, beside perf/step_s."""

TRAINING = ("fwd_bwd_s", "optimizer_s", "data_s")
"""The trainer's own work on a step; its sum over the step is the share `training_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step. Raises ValueError for a length that is not above 0, or a part that is not
    finite."""

    step: int
    step_s: float
    rollout_wait_s: float | None = None
    straggler_wait_s: float | None = None
    data_s: float | None = None
    fwd_bwd_s: float | None = None
    optimizer_s: float | None = None
    weight_sync_s: float | None = None
    unaccounted_s: float | None = None

    def __post_init__(self) -> None:
        parts = [getattr(self, part) for part in STEP_PARTS]
        if not self.step_s > 0 or not all(
            math.isfinite(part) for part in (self.step_s, *parts) if part is not None
        ):
            raise ValueError(f"step {self.step}: its parts must be finite, and step_s above 0")

    def seconds(self, *parts: str) -> float | None:
        """The parts added up; None when one is absent."""
        found = [getattr(self, part) for part in parts]
        return None if None in found else math.fsum(found)

    def share(self, seconds: float | None) -> float | None:
        """Of the step, 0 to 1: parts are timed apart from it and may differ by a clock's tick."""
        return None if seconds is None else min(1.0, max(0.0, seconds / self.step_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a verdict rests on. Beside the steps: values pooled over all of them, None where
    absent. Raises ValueError for one that is not finite."""

    steps: tuple[Step, ...]
    groups_per_step: float | None = None
    requests_waiting: float | None = None
    requests_held: float | None = None
    """Mean groups that waited for a generator, and that generators held."""
    groups_waiting: float | None = None
    samples_waiting: float | None = None
    """Mean groups that waited for a scorer, and for the trainer."""
    slots_busy_frac: float | None = None
    slots_starved_frac: float | None = None
    scorer_busy_frac: float | None = None
    score_block_s: float | None = None
    backpressure_s: float | None = None
    outstanding_frac: float | None = None
    generator_paused_frac: float | None = None
    duration_s: float | None = None
    tool_s: float | None = None
    env_s: float | None = None
    """Mean seconds of a conversation, and of it in tools and in the environment."""
    groups_generated: float | None = None
    groups_scored: float | None = None
    """Groups that these stages took in the window; None when none."""
    scorer_load_frac: float | None = None
    """Of what scorers can have in work at a time, what they had."""
    tool_latency_s: Mapping[str, float] = field(default_factory=dict)
    """Total seconds of calls, by tool."""
    environment_s: Mapping[str, float] = field(default_factory=dict)
    """Total seconds of conversations in it, by environment."""
    function_s: Mapping[str, float] = field(default_factory=dict)
    """Total seconds of calls, by reward function."""
    generators: tuple[Replica, ...] = ()
    scorers: tuple[Replica, ...] = ()
    """What each live replica did."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{each.name}: {value} is no measurement")


def mean_step_s(steps: Iterable[Step]) -> float:
    """Mean seconds of a step: what a run of many such steps takes. There must be some."""
    lengths = [step.step_s for step in steps]
    return math.fsum(lengths) / len(lengths)


def share_of_step(steps: Iterable[Step], *parts: str) -> float | None:
    """All seconds of the parts over all seconds of the steps; None when fewer than half of the
    steps have them all.

    Totals and not medians: what comes in lumps, as a version every fourth step or a straggler now
    and then, costs what it costs on the average, and has a median of 0.
    """
    steps = tuple(steps)
    if len(steps) == 1:
        return steps[0].share(steps[0].seconds(*parts))
    found = [(each.seconds(*parts), each.step_s) for each in steps]
    known = [(seconds, step_s) for seconds, step_s in found if seconds is not None]
    if not known or 2 * len(known) < len(steps):
        return None
    share = math.fsum(part for part, _ in known) / math.fsum(step_s for _, step_s in known)
    # The parts are timed apart from the step: their sum may differ from it by a clock's tick.
    return min(1.0, max(0.0, share))


def all_shares(steps: tuple[Step, ...]) -> Shares:
    """All parts of STEP_PARTS and `training_s`, over some steps or of one."""
    if len(steps) == 1:
        # A history asks this of thousands of steps: the medians of one value are dear.
        (step,) = steps
        alone = {part: step.share(getattr(step, part)) for part in STEP_PARTS}
        return {**alone, "training_s": step.share(step.seconds(*TRAINING))}
    shares = {part: share_of_step(steps, part) for part in STEP_PARTS}
    return {**shares, "training_s": share_of_step(steps, *TRAINING)}


def environment_frac(window: Window) -> float | None:
    """Of a conversation: in tools and the environment, whichever of them the run has."""
    parts = [part for part in (window.tool_s, window.env_s) if part is not None]
    if not parts or not window.duration_s or window.duration_s < 0:
        return None
    return min(1.0, max(0.0, sum(parts) / window.duration_s))
