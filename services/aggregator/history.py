"""The history of one series: its partials, merged into windows and reduced.

By step a window is a number of steps of the surviving line (or of one attempt); by time a number of
10 s buckets, of all attempts. Windows begin at multiples of their width. A window without a partial
has no point; one whose value is absent has a point of None, so that steps never shift.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from sqlalchemy import Connection, select

from services.aggregator import schema, windows
from services.aggregator.groups import BAD_NAMES, Floats, needed
from services.aggregator.lasts import Lasts, sums_of_lasts
from services.aggregator.lengths import wall_seconds, with_step_seconds
from services.aggregator.lines import Segment
from services.aggregator.points import NO_POINTS, Points
from services.aggregator.points import Point as Point
from services.aggregator.reduce import REDUCTIONS, Observation, Partial, Reduction
from services.aggregator.rollup import ENVELOPE
from services.aggregator.schema import BUCKET_S
from services.aggregator.series import RunRow, SeriesRow
from services.aggregator.windows import StepAxis, TimeAxis, Windows

SEED_WINDOWS, SEED_POSITIONS = 8, 64
"""How far before a page the lasts of sum_last are looked for."""

Axis = Literal["step", "time"]


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked of a series. `since` <= position < `until`: steps, or seconds since 1970."""

    axis: Axis
    reduction: Reduction
    since: float | None = None
    until: float | None = None
    max_points: int = 1000
    """Windows are made so wide that all of the range has at most so many."""
    by_producer: bool = False
    attempt: int | None = None
    """Only this attempt; by default the surviving line by step, all attempts by time."""
    width: int | None = None
    """Steps or seconds of a window, instead of max_points: what the first page of several said."""
    limit: int | None = None
    """Points at most; what follows is on the next page, which begins at `History.next_x`."""


@dataclass(frozen=True, slots=True)
class History:
    """Points in ascending order; `width` is a window's steps or seconds."""

    width: int
    points: Points
    by_producer: dict[str, Points]
    next_x: int | None = None
    """Where the next page begins; None after the last."""


def history(connection: Connection, run: RunRow, series: SeriesRow, query: Query) -> History:
    """The points of a series. Raises ValueError for a reduction that its instrument has not."""
    if query.reduction not in REDUCTIONS[series.instrument]:
        raise ValueError(f"{query.reduction} is not for {series.instrument}")
    axis: windows.Axis
    line = run.line if query.attempt is None else (Segment(query.attempt, 0, None),)
    if query.axis == "step":
        axis = StepAxis(connection, series, line)
    else:
        axis = TimeAxis(connection, run, series, query.attempt)
    begin, end = windows.position(query.since, axis.unit), windows.position(query.until, axis.unit)
    extent = axis.extent(begin, end)
    if extent is None:
        return History(width=query.width or axis.unit, points=NO_POINTS, by_producer={})
    low, high = extent
    if query.width is not None:
        width = max(1, query.width // axis.unit)
    else:
        width = windows.width_for(low, high, max_points=query.max_points, levels=axis.levels)
    shown = _Shown(series, query, width, axis.unit, first=low if query.width is None else 0)
    found, at = _page(connection, axis, shown, low=low, high=high, end=end)
    seconds: Floats | None = None
    if query.reduction == "rate" and query.axis == "step":
        found, seconds = with_step_seconds(
            connection, run, series, found, line=line, begin=low, end=high + 1
        )
    elif query.reduction == "rate":
        seconds = wall_seconds(run, found, unit_s=axis.unit)
    names = producer_names(connection, run) if shown.by_source else {}
    lasts: Lasts = {}
    if query.reduction == "sum_last" and begin is not None:
        back = max(SEED_POSITIONS, SEED_WINDOWS * width)
        before = shown.read(connection, axis, low - back, low)
        sums_of_lasts(before, lasts, names)
    by_producer = {}
    if query.by_producer:
        by_producer = _by_producer(found, seconds, lasts, names, shown)
    return History(
        width=width * axis.unit,
        points=shown.points(found, seconds, dict(lasts), names),
        by_producer=by_producer,
        next_x=None if at is None else at // width * width * axis.unit,
    )


def _page(
    connection: Connection,
    axis: windows.Axis,
    shown: "_Shown",
    *,
    low: int,
    high: int,
    end: int | None,
) -> tuple[Windows, int | None]:
    """The windows of a page, and the position at which the next one begins."""
    query, width = shown.query, shown.width
    parts: list[Windows] = []
    at: int | None = low
    room = query.limit
    while at is not None and (room is None or room > 0):
        stop = high + 1 if room is None else min(high + 1, (at // width + room) * width)
        parts.append(shown.read(connection, axis, at, stop))
        if room is not None:
            room -= len(parts[-1].numbers)
        rest = axis.extent(stop, end) if stop <= high else None
        at = None if rest is None else rest[0]
    return windows.together(parts), at


@dataclass(frozen=True, slots=True)
class _Shown:
    """How windows are read, and become points."""

    series: SeriesRow
    query: Query
    width: int
    unit: int
    first: int
    """The position that the first point is not before."""

    @property
    def by_source(self) -> bool:
        """Whether each source's rows are needed."""
        return self.query.by_producer or self.query.reduction == "sum_last"

    @property
    def per(self) -> int:
        """What the envelope has to be divided by: it is stored of sums."""
        return BUCKET_S if self.query.reduction == "rate" and self.query.axis == "time" else 1

    @property
    def enveloped(self) -> bool:
        """Whether points have an envelope."""
        kept = self.query.reduction == ENVELOPE[self.series.instrument]
        return self.width > 1 and (kept or self.per > 1)

    def read(self, connection: Connection, axis: windows.Axis, begin: int, end: int) -> Windows:
        """The windows of a range, with what the query needs of them."""
        return windows.read(
            connection,
            self.series,
            axis,
            begin=begin,
            end=end,
            width=self.width,
            names=needed(self.series.instrument, self.query.reduction),
            enveloped=self.enveloped,
            by_source=self.by_source,
        )

    def points(
        self, found: Windows, seconds: Floats | None, lasts: Lasts, names: Mapping[int, str]
    ) -> Points:
        """A point of each window. `lasts` is carried from one to the next (sum_last)."""
        groups, reduction = found.pooled, self.query.reduction
        if reduction == "sum_last":
            value = sums_of_lasts(found, lasts, names)
        else:
            value = _known(groups.values(reduction, seconds=seconds))
        return Points(
            (np.maximum(found.numbers * self.width, self.first) * self.unit).tolist(),
            value,
            _known(found.low / self.per),
            _known(found.high / self.per),
            *(groups.counts(name).tolist() for name in BAD_NAMES),
        )


def _known(values: Floats) -> list[float | None]:
    """NaN as None."""
    known: list[float | None] = values.tolist()
    for index in np.flatnonzero(np.isnan(values)).tolist():
        known[index] = None
    return known


def _by_producer(
    found: Windows,
    seconds: Floats | None,
    lasts: Lasts,
    names: Mapping[int, str],
    shown: _Shown,
) -> dict[str, Points]:
    """The points of each producer alone, by its name: of the windows that it has rows in."""
    named: dict[str, list[int]] = {}
    for source_id in np.unique(found.sources.source).tolist():
        named.setdefault(names[source_id], []).append(source_id)
    points = {}
    for name in sorted(named):
        rows = found.sources.take(np.isin(found.sources.source, named[name]))
        at = np.unique(found.grouped(rows).at)
        nothing = np.full(len(at), np.nan)
        alone = Windows(found.width, found.numbers[at], rows, rows, nothing, nothing)
        own = {name: lasts[name]} if name in lasts else {}
        points[name] = shown.points(alone, None if seconds is None else seconds[at], own, names)
    return points


def producer_names(connection: Connection, run: RunRow) -> dict[int, str]:
    """By source, the name of its producer."""
    sources, producers = schema.sources, schema.producers
    rows = connection.execute(
        select(sources.c.id, producers.c.name)
        .join(producers, producers.c.id == sources.c.producer_id)
        .where(producers.c.run_id == run.id)
    )
    return {row.id: row.name for row in rows}


def point(x: int, value: float | None, pooled: Partial) -> Point:
    """A point, with the counts of what is in no sum."""
    if not isinstance(pooled, Observation):
        return Point(x, value)
    return Point(x, value, None, None, pooled.num_nan, pooled.num_pos_inf, pooled.num_neg_inf)
