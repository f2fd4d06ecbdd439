"""The history of one series: its partials, merged into windows and reduced.

By step a window is a number of steps of the surviving line (or of one attempt); by time a number of
10 s buckets, of all attempts. Windows begin at multiples of their width. A window without a partial
has no point; one whose value is absent has a point of None, so that steps never shift.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sqlalchemy import ColumnElement, Connection, Select, select

from services.aggregator import schema
from services.aggregator.lengths import Lengths, StepLengths, WallTime, step_lengths
from services.aggregator.lines import on_line
from services.aggregator.reduce import (
    PERCENTILES,
    Count,
    Observation,
    Partial,
    Reduction,
    merge_all,
    reduce,
)
from services.aggregator.rows import COLUMNS, SCALARS, from_row
from services.aggregator.schema import BUCKET_S
from services.aggregator.series import RunRow, SeriesRow

LIVE_S = 15.0
"""A producer whose last observation is older than this, beside the newest one, is not alive:
sum_last leaves it out.
"""

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
    rows = connection.execute(_rows(run, series, query)).mappings().all()
    column, unit = ("step", 1) if query.axis == "step" else ("bucket", BUCKET_S)
    if not rows:
        return History(width=query.width or unit, points=(), by_producer={})
    low = min(row[column] for row in rows)
    high = max(row[column] for row in rows)
    width = -(-(high - low + 1) // query.max_points)
    while high // width - low // width >= query.max_points:
        width += 1
    if query.width is not None:
        width = query.width // unit
    lengths = _lengths(connection, run, query)
    windows: defaultdict[int, defaultdict[int, list[Partial]]]
    windows = defaultdict(lambda: defaultdict(list))
    fine: defaultdict[int, defaultdict[int, list[Partial]]]
    fine = defaultdict(lambda: defaultdict(list))
    for row in rows:
        partial = from_row(series.instrument, row)
        if isinstance(lengths, StepLengths) and row["step"] not in lengths:
            # What a step of unknown length counted must not be divided by the others' seconds.
            partial = Count()
        windows[row[column] // width][row["producer_id"]].append(partial)
        fine[row[column] // width][row[column]].append(partial)
    numbers = sorted(windows)
    chosen, rest = numbers, []
    if query.limit is not None:
        chosen, rest = numbers[: query.limit], numbers[query.limit :]
    begin = unit * low if query.since is None else max(unit * low, math.ceil(query.since))
    merged = [
        (
            max(window * width * unit, begin if window == low // width else 0),
            {producer: _merged(found) for producer, found in sorted(windows[window].items())},
        )
        for window in chosen
    ]
    pooled = _points(merged, query.reduction, width * unit, lengths)
    if width > 1:
        pooled = tuple(
            replace(each, low=envelope[0], high=envelope[1])
            for each, window in zip(pooled, chosen, strict=True)
            for envelope in [_envelope(fine[window].values(), query)]
        )
    by_producer = {}
    if query.by_producer:
        names = _producer_names(connection, run)
        for producer in sorted({p for _, partials in merged for p in partials}):
            alone = [(x, {producer: held[producer]}) for x, held in merged if producer in held]
            by_producer[names[producer]] = _points(alone, query.reduction, width * unit, lengths)
    return History(
        width=width * unit,
        points=pooled,
        by_producer=by_producer,
        next_x=rest[0] * width * unit if rest else None,
    )


def _envelope(units: Iterable[list[Partial]], query: Query) -> tuple[float | None, float | None]:
    reduction = query.reduction
    if reduction not in ("mean", "sum", "ratio") and not (
        reduction == "rate" and query.axis == "time"
    ):
        return None, None
    values = [reduce(_merged(unit), reduction, seconds=BUCKET_S) for unit in units]
    found = [value for value in values if value is not None]
    return min(found, default=None), max(found, default=None)


def _rows(run: RunRow, series: SeriesRow, query: Query) -> Select[tuple[object, ...]]:
    table = schema.partials
    # Histograms are the bulk of a row: only percentiles read them.
    columns = COLUMNS if query.reduction in PERCENTILES else SCALARS
    statement = select(table.c.step, table.c.producer_id, table.c.bucket, *columns).where(
        table.c.series_id == series.id
    )
    axis: ColumnElement[int] = table.c.step
    if query.axis == "step":
        if query.attempt is None:
            statement = statement.where(on_line(run.line))
    else:
        axis = table.c.bucket * BUCKET_S
    if query.attempt is not None:
        statement = statement.where(table.c.attempt == query.attempt)
    if query.since is not None:
        statement = statement.where(axis >= query.since)
    if query.until is not None:
        statement = statement.where(axis < query.until)
    return statement


def _producer_names(connection: Connection, run: RunRow) -> dict[int, str]:
    table = schema.producers
    rows = connection.execute(select(table.c.id, table.c.name).where(table.c.run_id == run.id))
    return {row.id: row.name for row in rows}


def _lengths(connection: Connection, run: RunRow, query: Query) -> Lengths | None:
    """How long windows last, for rates; None for other reductions."""
    if query.reduction != "rate":
        return None
    if query.axis == "time":
        return WallTime(run.first_s, run.last_s)
    return step_lengths(connection, run, since=query.since, until=query.until)


def _points(
    windows: Iterable[tuple[int, Mapping[int, Partial]]],
    reduction: Reduction,
    width: int,
    lengths: Lengths | None,
) -> tuple[Point, ...]:
    lasts: dict[int, Observation] = {}
    points = []
    for x, partials in windows:
        pooled = _merged(partials.values())
        if reduction == "sum_last":
            value = _sum_last(lasts, partials)
        else:
            length_s = None if lengths is None else lengths.between(x, x + width)
            value = reduce(pooled, reduction, seconds=length_s)
        points.append(point(x, value, pooled))
    return tuple(points)


def point(x: int, value: float | None, pooled: Partial) -> Point:
    """A point, with the counts of what is in no sum."""
    if isinstance(pooled, Observation):
        return Point(
            x,
            value,
            num_nan=pooled.num_nan,
            num_pos_inf=pooled.num_pos_inf,
            num_neg_inf=pooled.num_neg_inf,
        )
    return Point(x, value)


def _sum_last(lasts: dict[int, Observation], partials: Mapping[int, Partial]) -> float | None:
    """Add up each live producer's last. `lasts` is carried from window to window: replicas flush
    out of step.
    """
    for producer, partial in partials.items():
        if not isinstance(partial, Observation):
            raise ValueError("sum_last: only an observation has a last value")
        if partial.last is not None:
            held = lasts.get(producer)
            if held is None or partial.last_at_s >= held.last_at_s:
                lasts[producer] = partial
    newest_s = max((held.last_at_s for held in lasts.values()), default=0.0)
    live = [held.last for held in lasts.values() if newest_s - held.last_at_s <= LIVE_S]
    return sum(last for last in live if last is not None) if live else None


def _merged(partials: Iterable[Partial]) -> Partial:
    found = merge_all(partials)
    assert found is not None
    return found
