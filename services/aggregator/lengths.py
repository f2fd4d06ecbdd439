"""How long a window lasted: what a rate is per second of.

By time it is wall time, clipped to the run. By step it is the sum of the steps' own seconds, as the
trainer measured them; a step without them (the first, and the one that is open) has no rate.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection

from services.aggregator import fine, windows
from services.aggregator.groups import MEAN_NAMES, SUM_NAMES, Floats, Ints, Rows, joined
from services.aggregator.lines import Segment
from services.aggregator.series import RunRow, SeriesRow, find_series
from services.aggregator.windows import StepAxis, Windows

MIN_RATE_S = 5.0
"""Less wall time has no rate: what a flush delivers at once would read as a burst."""

STEP_KEY = "perf/step_s"
"""The trainer's seconds of a step."""


def wall_seconds(run: RunRow, found: Windows, *, unit_s: int) -> Floats:
    """By time: seconds of each window within the run; NaN when it has no rate. `unit_s` are the
    seconds of a position.
    """
    width_s = found.width * unit_s
    begin_s = found.numbers * width_s
    length_s = np.minimum(begin_s + width_s, run.last_s) - np.maximum(begin_s, run.first_s)
    return np.where(length_s >= MIN_RATE_S, length_s, np.nan)


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
    found: Windows,
    *,
    line: tuple[Segment, ...],
    begin: int,
    end: int,
) -> tuple[Windows, Floats]:
    """By step: the windows of a count and the seconds of each, NaN when it has no rate. What steps
    of unknown length counted is taken out: it must not be divided by the others' seconds.
    """
    width, numbers = found.width, found.numbers
    seconds, measured = np.full(len(numbers), np.nan), np.zeros(len(numbers), np.int64)
    begins = numbers * width
    # No end is beyond `end`: the largest steps would not fit otherwise.
    firsts, ends = np.maximum(begin, begins), begins + np.minimum(width, end - begins)
    lengths = find_series(connection, run, STEP_KEY)
    if lengths is not None and lengths.instrument == "observation" and len(numbers):
        held = windows.read(
            connection,
            lengths,
            StepAxis(connection, lengths, line),
            begin=int(firsts[0]),
            end=int(ends[-1]),
            width=width,
            names=MEAN_NAMES,
        )
        _, mine, others = np.intersect1d(
            numbers, held.numbers, assume_unique=True, return_indices=True
        )
        measured[mine] = held.pooled.counts("n")[others]
        seconds[mine] = held.pooled.totals()[others]
    whole, partly = measured >= ends - firsts, (measured > 0) & (measured < ends - firsts)
    seconds[~whole | (seconds == 0.0)] = np.nan
    kept, sources = _of(found, found.rows, whole), _of(found, found.sources, whole)
    only: list[Rows] = []
    for first, last in _stretches(np.flatnonzero(partly), numbers):
        known = step_lengths(
            connection, run, line=line, begin=int(firsts[first]), end=int(ends[last])
        )
        steps = np.array(sorted(known), np.int64)
        at = np.searchsorted(numbers[first : last + 1], steps // width)
        sums = np.bincount(at, [known[step] for step in steps.tolist()], last + 1 - first)
        seconds[first : last + 1] = np.where(sums > 0, sums, np.nan)
        for lane, lowest, stop in StepAxis(connection, series, line).spans(
            int(firsts[first]), int(ends[last])
        ):
            rows = fine.by_step(connection, series.id, lane, lowest, stop, names=SUM_NAMES)
            only.append(Rows.of([row for row in rows if row[0] in known], SUM_NAMES))
    return (
        replace(
            found,
            rows=joined([kept, *only], SUM_NAMES),
            sources=joined([sources, *only] if len(found.sources) else [], SUM_NAMES),
        ),
        seconds,
    )


def _of(found: Windows, rows: Rows, chosen: NDArray[np.bool_]) -> Rows:
    """The rows of the windows that are chosen."""
    return rows.take(chosen[found.grouped(rows).at])


def _stretches(indexes: Ints, numbers: Ints) -> Iterator[tuple[int, int]]:
    """Indexes of windows as (first, last) of each stretch without a hole."""
    cuts = np.flatnonzero(np.diff(numbers[indexes]) != 1) + 1
    for stretch in np.split(indexes, cuts):
        if len(stretch):
            yield int(stretch[0]), int(stretch[-1])
