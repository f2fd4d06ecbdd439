"""How long a window lasted: what a rate is per second of.

By time it is wall time, clipped to the run. By step it is the sum of the steps' own seconds, as the
trainer measured them; a step without them (the first, and the one that is open) has no rate.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from sqlalchemy import Connection

from services.aggregator import fine, windows
from services.aggregator.lines import Segment
from services.aggregator.reduce import Observation
from services.aggregator.rows import SCALAR_NAMES, N, pool
from services.aggregator.series import RunRow, SeriesRow, find_series
from services.aggregator.windows import StepAxis, Window

MIN_RATE_S = 5.0
"""Less wall time has no rate: what a flush delivers at once would read as a burst."""

STEP_KEY = "perf/step_s"
"""The trainer's seconds of a step."""


def wall_seconds(run: RunRow, found: Mapping[int, Window], width_s: int) -> dict[int, float | None]:
    """By time: seconds of each window within the run; None when it has no rate."""
    seconds: dict[int, float | None] = {}
    for number in found:
        begin_s = number * width_s
        length_s = min(begin_s + width_s, run.last_s) - max(begin_s, run.first_s)
        seconds[number] = length_s if length_s >= MIN_RATE_S else None
    return seconds


class StepLengths:
    """Seconds of single steps."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._steps = sorted(seconds)
        self._before = [0.0, *accumulate(seconds[step] for step in self._steps)]

    @property
    def newest(self) -> int | None:
        """The last step of known length."""
        return self._steps[-1] if self._steps else None

    def between(self, begin: int, end: int) -> float | None:
        """Seconds of the steps begin <= step < end that are of known length."""
        first, last = bisect_left(self._steps, begin), bisect_left(self._steps, end)
        return self._before[last] - self._before[first] or None


def step_lengths(
    connection: Connection, run: RunRow, *, line: Sequence[Segment], begin: int, end: int
) -> dict[int, float]:
    """The seconds of each step of begin <= step < end that has them."""
    series = find_series(connection, run, STEP_KEY)
    if series is None or series.instrument != "observation":
        return {}
    seconds: dict[int, float] = {}
    for lane, first, last in StepAxis(connection, series, tuple(line)).spans(begin, end):
        for row in fine.by_step(connection, series.id, lane, first, last, names=("sum_high",)):
            seconds[row[0]] = seconds.get(row[0], 0.0) + row[fine.KEY_COLUMNS]
    return {step: length_s for step, length_s in seconds.items() if length_s > 0}


def with_step_seconds(
    connection: Connection,
    run: RunRow,
    series: SeriesRow,
    found: dict[int, Window],
    *,
    line: tuple[Segment, ...],
    begin: int,
    end: int,
    width: int,
) -> dict[int, float | None]:
    """By step: seconds of each window. What steps of unknown length counted is taken out of the
    windows: it must not be divided by the others' seconds.
    """
    lengths = find_series(connection, run, STEP_KEY)
    seconds: dict[int, float | None] = dict.fromkeys(found)
    held: dict[int, Window] = {}
    if lengths is not None and lengths.instrument == "observation" and found:
        first, last = min(found) * width, (max(found) + 1) * width
        axis = StepAxis(connection, lengths, line)
        held = windows.read(
            connection, lengths, axis, begin=max(first, begin), end=min(last, end), width=width
        )
    for number, window in found.items():
        first, last = max(begin, number * width), min(end, (number + 1) * width)
        rows = held[number].rows if number in held else []
        if not rows:
            window.rows.clear()
            window.sources.clear()
            continue
        if sum(row[N] for row in rows) >= last - first:
            total = pool("observation", rows)
            assert isinstance(total, Observation)
            seconds[number] = total.sum.value or None
            continue
        known = step_lengths(connection, run, line=line, begin=first, end=last)
        _only(connection, series, window, line=line, begin=first, end=last, steps=known)
        seconds[number] = sum(known.values()) or None
    return seconds


def _only(
    connection: Connection,
    series: SeriesRow,
    window: Window,
    *,
    line: tuple[Segment, ...],
    begin: int,
    end: int,
    steps: Mapping[int, float],
) -> None:
    """Make a window of some of its steps."""
    window.rows.clear()
    window.sources.clear()
    for lane, first, last in StepAxis(connection, series, line).spans(begin, end):
        for row in fine.by_step(connection, series.id, lane, first, last, names=SCALAR_NAMES):
            if row[0] in steps:
                window.rows.append(row[fine.KEY_COLUMNS :])
                window.sources[row[1]].append(row[fine.KEY_COLUMNS :])
