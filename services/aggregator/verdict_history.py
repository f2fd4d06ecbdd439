"""The verdict over time: a run's steps in windows one after another, each judged by itself.

Every metric is read once for all windows, so that the history of thousands of steps costs little
more than that of one window.
"""

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import Connection

from services.aggregator import windows
from services.aggregator.evidence import POOLED, values
from services.aggregator.lengths import STEP_KEY
from services.aggregator.schema import STEP_LEVELS
from services.aggregator.series import RunRow, find_series
from services.aggregator.verdict import Verdict, judge
from services.aggregator.window import STEP_PARTS, Step, Window
from services.aggregator.windows import StepAxis

MAX_STEPS = 20_000
"""The last steps that a history looks at."""


@dataclass(frozen=True, slots=True)
class VerdictHistory:
    """Verdicts, oldest first. They name no tool, function or replica, and predict nothing."""

    width: int
    """Steps of a window."""
    verdicts: tuple[Verdict, ...]


def judge_history(
    connection: Connection, run: RunRow, *, num_steps: int, max_points: int
) -> VerdictHistory:
    """The verdicts on windows of `num_steps` steps, which begin at multiples of it; wider ones
    where more than `max_points` would be needed. Together they cover the run's last MAX_STEPS
    steps; a window without a step of known length has no verdict.

    Example: 10,000 steps in windows of 20 would be 500; for at most 200 each has 56 steps.
    """
    width, found = read_windows(connection, run, num_steps=num_steps, max_points=max_points)
    return VerdictHistory(width, tuple(judge(window) for window in found))


def read_windows(
    connection: Connection, run: RunRow, *, num_steps: int, max_points: int
) -> tuple[int, list[Window]]:
    """The steps of a window, and the windows, oldest first, with what verdicts rest on."""
    series = find_series(connection, run, STEP_KEY)
    extent = None if series is None else StepAxis(connection, series, run.line).extent(None, None)
    if extent is None:
        return num_steps, []
    low, high = max(extent[0], extent[1] - MAX_STEPS + 1), extent[1]
    needed = windows.width_for(low, high, max_points=max_points, levels=STEP_LEVELS)
    width = max(num_steps, needed)
    since, until = low, high + 1
    lengths = values(connection, run, STEP_KEY, "mean", since, until, until - since)
    parts = {
        part: values(connection, run, f"perf/{part}", "mean", since, until, until - since)
        for part in STEP_PARTS
    }
    pooled = {
        field: values(connection, run, key, reduction, since, until, until - since, width=width)
        for field, (key, reduction) in POOLED.items()
    }
    steps: defaultdict[int, list[Step]] = defaultdict(list)
    for step, step_s in sorted(lengths.items()):
        if step_s > 0:
            known = {part: found.get(step) for part, found in parts.items()}
            steps[step // width * width].append(Step(step=step, step_s=step_s, **known))
    return width, [
        Window(
            steps=tuple(held),
            tool_latency_s={},
            environment_s={},
            function_s={},
            generators=(),
            scorers=(),
            **{field: found.get(begin) for field, found in pooled.items()},
        )
        for begin, held in sorted(steps.items())
    ]
