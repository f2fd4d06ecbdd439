"""The history of one series: its partials, merged into windows and reduced.

By step a window is a number of steps of the surviving line (or of one attempt); by time a number of
10 s buckets, of all attempts. Windows begin at multiples of their width. A window without a partial
has no point; one whose value is absent has a point of None, so that steps never shift.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, select

from services.aggregator import schema, windows
from services.aggregator.lengths import wall_seconds, with_step_seconds
from services.aggregator.lines import Segment
from services.aggregator.reduce import (
    PERCENTILES,
    REDUCTIONS,
    Count,
    Observation,
    Partial,
    Reduction,
    reduce,
)
from services.aggregator.rollup import ENVELOPE
from services.aggregator.rows import pool
from services.aggregator.schema import BUCKET_S
from services.aggregator.series import RunRow, SeriesRow
from services.aggregator.windows import StepAxis, TimeAxis, Window

LIVE_S = 15.0
"""A producer whose last observation is older than this, beside the newest one, is not alive:
sum_last leaves it out.
"""

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
class Point:
    """One window's value."""

    x: int
    """Its first step, or its begin in seconds since 1970; not before the query's `since`."""
    value: float | None
    low: float | None = None
    high: float | None = None
    """The envelope: smallest and largest value of the steps (by time: 10 s) in the window, each
    reduced as the window is. None in a window of one step, and where a reduction has none.
    """
    num_nan: int = 0
    num_pos_inf: int = 0
    num_neg_inf: int = 0
    """Values that are in no sum: they tell "NaN" and "infinite" from "absent"."""


@dataclass(frozen=True, slots=True)
class History:
    """Points in ascending order; `width` is a window's steps or seconds."""

    width: int
    points: tuple[Point, ...]
    by_producer: dict[str, tuple[Point, ...]]
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
        return History(width=query.width or axis.unit, points=(), by_producer={})
    low, high = extent
    if query.width is not None:
        width = max(1, query.width // axis.unit)
    else:
        width = windows.width_for(low, high, max_points=query.max_points, levels=axis.levels)
    by_source = query.by_producer or query.reduction == "sum_last"
    found: dict[int, Window] = {}
    at: int | None = low
    while at is not None and (query.limit is None or len(found) < query.limit):
        stop = high + 1
        if query.limit is not None:
            stop = min(stop, (at // width + query.limit - len(found)) * width)
        found |= windows.read(
            connection,
            series,
            axis,
            begin=at,
            end=stop,
            width=width,
            histograms=query.reduction in PERCENTILES,
            by_source=by_source,
        )
        rest = axis.extent(stop, end) if stop <= high else None
        at = None if rest is None else rest[0]
    seconds: Mapping[int, float | None] = {}
    if query.reduction == "rate" and query.axis == "step":
        seconds = with_step_seconds(
            connection, run, series, found, line=line, begin=low, end=high + 1, width=width
        )
    elif query.reduction == "rate":
        seconds = wall_seconds(run, found, width * axis.unit)
    names = producer_names(connection, run) if by_source else {}
    before: dict[int, Window] = {}
    if query.reduction == "sum_last" and begin is not None:
        back = max(SEED_POSITIONS, SEED_WINDOWS * width)
        before = windows.read(
            connection, series, axis, begin=low - back, end=low, width=width, by_source=True
        )
    shown = _Shown(series, query, width, seconds, first=low if query.width is None else 0)
    return History(
        width=width * axis.unit,
        points=shown.points(found, _seeded(series, before, names), names),
        by_producer=_by_producer(found, before, names, shown) if query.by_producer else {},
        next_x=None if at is None else at // width * width * axis.unit,
    )


@dataclass(frozen=True, slots=True)
class _Shown:
    """How windows become points."""

    series: SeriesRow
    query: Query
    width: int
    seconds: Mapping[int, float | None]
    first: int
    """The position that the first point is not before."""

    def points(
        self, found: Mapping[int, Window], lasts: dict[str, Observation], names: Mapping[int, str]
    ) -> tuple[Point, ...]:
        """A point of each window. `lasts` is carried from one to the next (sum_last)."""
        query, instrument = self.query, self.series.instrument
        unit = 1 if query.axis == "step" else BUCKET_S
        # What the envelope is stored of, and what it has to be divided by.
        per = BUCKET_S if query.reduction == "rate" and query.axis == "time" else 1
        enveloped = self.width > 1 and (query.reduction == ENVELOPE[instrument] or per > 1)
        points = []
        for number, window in found.items():
            # Without a row: a count all of whose steps are of unknown length.
            partial = pool(instrument, window.rows) if window.rows else Count()
            if query.reduction == "sum_last":
                value = _sum_last(lasts, window, names)
            else:
                value = reduce(partial, query.reduction, seconds=self.seconds.get(number))
            low, high = (window.low, window.high) if enveloped else (None, None)
            points.append(
                point(
                    max(number * self.width, self.first) * unit,
                    value,
                    partial,
                    low=None if low is None else low / per,
                    high=None if high is None else high / per,
                )
            )
        return tuple(points)


def _by_producer(
    found: Mapping[int, Window],
    before: Mapping[int, Window],
    names: Mapping[int, str],
    shown: _Shown,
) -> dict[str, tuple[Point, ...]]:
    """The points of each producer alone, by its name."""
    alone: dict[str, dict[int, Window]] = {}
    for number, window in found.items():
        for source_id, rows in window.sources.items():
            held = alone.setdefault(names[source_id], {}).setdefault(number, Window())
            held.rows.extend(rows)
            held.sources[source_id].extend(rows)
    lasts = _seeded(shown.series, before, names)
    return {
        name: shown.points(alone[name], {name: lasts[name]} if name in lasts else {}, names)
        for name in sorted(alone)
    }


def producer_names(connection: Connection, run: RunRow) -> dict[int, str]:
    """By source, the name of its producer."""
    sources, producers = schema.sources, schema.producers
    rows = connection.execute(
        select(sources.c.id, producers.c.name)
        .join(producers, producers.c.id == sources.c.producer_id)
        .where(producers.c.run_id == run.id)
    )
    return {row.id: row.name for row in rows}


def point(
    x: int,
    value: float | None,
    pooled: Partial,
    *,
    low: float | None = None,
    high: float | None = None,
) -> Point:
    """A point, with the counts of what is in no sum."""
    if not isinstance(pooled, Observation):
        return Point(x, value, low, high)
    return Point(x, value, low, high, pooled.num_nan, pooled.num_pos_inf, pooled.num_neg_inf)


def _seeded(
    series: SeriesRow, before: Mapping[int, Window], names: Mapping[int, str]
) -> dict[str, Observation]:
    """The lasts that a first window begins with."""
    lasts: dict[str, Observation] = {}
    if series.instrument == "observation":
        for window in before.values():
            _sum_last(lasts, window, names)
    return lasts


def _sum_last(
    lasts: dict[str, Observation], window: Window, names: Mapping[int, str]
) -> float | None:
    """Add up each live producer's last. `lasts` is carried from window to window: replicas flush
    out of step.
    """
    for source_id, rows in window.sources.items():
        partial, name = pool("observation", rows), names[source_id]
        assert isinstance(partial, Observation)
        if partial.last is not None:
            held = lasts.get(name)
            if held is None or partial.last_at_s >= held.last_at_s:
                lasts[name] = partial
    newest_s = max((held.last_at_s for held in lasts.values()), default=0.0)
    live = [held.last for held in lasts.values() if newest_s - held.last_at_s <= LIVE_S]
    return sum(last for last in live if last is not None) if live else None
