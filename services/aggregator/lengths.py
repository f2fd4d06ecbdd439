"""How long a window lasted: what a rate is per second of.

By time it is wall time, clipped to the run. By step it is the sum of the steps' own seconds, as the
trainer measured them; a step without them (the first, and the one that is open) has no rate.
"""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import Protocol

from sqlalchemy import Connection, select

from services.aggregator import schema
from services.aggregator.lines import on_line
from services.aggregator.series import RunRow, find_series

MIN_RATE_S = 5.0
"""Less wall time has no rate: what a flush delivers at once would read as a burst."""

STEP_KEY = "perf/step_s"
"""The trainer's seconds of a step."""


class Lengths(Protocol):
    """Seconds of windows."""

    def between(self, begin: int, end: int) -> float | None:
        """Seconds of the window begin <= position < end; None when it has no rate."""


class WallTime:
    """By time: seconds since 1970, clipped to when the run was seen."""

    def __init__(self, first_s: float, last_s: float) -> None:
        self._first_s, self._last_s = first_s, last_s

    def between(self, begin: int, end: int) -> float | None:
        """Seconds of the window within the run."""
        length_s = min(end, self._last_s) - max(begin, self._first_s)
        return length_s if length_s >= MIN_RATE_S else None


class StepLengths:
    """By step."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._seconds = seconds
        self._steps = sorted(seconds)
        self._before = [0.0, *accumulate(seconds[step] for step in self._steps)]

    def __contains__(self, step: int) -> bool:
        return step in self._seconds

    @property
    def newest(self) -> int | None:
        """The last step of known length."""
        return self._steps[-1] if self._steps else None

    def between(self, begin: int, end: int) -> float | None:
        """Seconds of the window's steps of known length."""
        first, last = bisect_left(self._steps, begin), bisect_left(self._steps, end)
        return self._before[last] - self._before[first] or None


def step_lengths(
    connection: Connection,
    run: RunRow,
    *,
    since: float | None = None,
    until: float | None = None,
) -> StepLengths:
    """The seconds of each step of the surviving line, since <= step < until."""
    series = find_series(connection, run, STEP_KEY)
    if series is None or series.instrument != "observation":
        return StepLengths({})
    table = schema.partials
    statement = select(table.c.step, table.c.sum_high).where(
        table.c.series_id == series.id, on_line(run.line)
    )
    if since is not None:
        statement = statement.where(table.c.step >= since)
    if until is not None:
        statement = statement.where(table.c.step < until)
    seconds: dict[int, float] = {}
    for step, length_s in connection.execute(statement):
        seconds[step] = seconds.get(step, 0.0) + length_s
    return StepLengths({step: length_s for step, length_s in seconds.items() if length_s > 0})
