"""Reads a series in windows: the rows that make up each, from the coarsest roll-ups that answer.

A window is `width` positions from a multiple of it: steps of the surviving line (or of one
attempt), or 10 s buckets.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from sqlalchemy import Connection, select

from services.aggregator import fine, schema
from services.aggregator.cover import FINE, cover
from services.aggregator.groups import Floats, Groups, Ints, Rows, joined
from services.aggregator.lines import Segment
from services.aggregator.rollup import ENVELOPE, EXTREMES
from services.aggregator.rows import Row
from services.aggregator.schema import BUCKET_S, POOLED, STEP_LEVELS, TIME_LANE, TIME_LEVELS
from services.aggregator.series import RunRow, SeriesRow


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows that hold anything, ascending; arrays have one entry a window."""

    width: int
    """Positions of a window."""
    numbers: Ints
    rows: Rows
    """Over all sources, by position."""
    sources: Rows
    """Of each source, by position; empty unless that was asked for."""
    low: Floats
    high: Floats
    """The envelope; NaN where there is none, or none was asked for."""

    @property
    def pooled(self) -> Groups:
        """The rows of each window."""
        return self.grouped(self.rows)

    def grouped(self, rows: Rows) -> Groups:
        """Rows, ascending, by the window that they are in."""
        at = np.searchsorted(self.numbers, rows.position // self.width)
        return Groups(rows, at, len(self.numbers))


class Axis(Protocol):
    """Where positions come from. `since` <= position < `until`."""

    unit: int
    """Steps or seconds of a position."""
    levels: tuple[int, ...]
    """Positions of a roll-up."""
    block: int
    """Positions of what is rolled up at once."""

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The lanes that hold begin <= position < end: (lane, begin, end) of each."""

    def extent(self, begin: int | None, end: int | None) -> tuple[int, int] | None:
        """The first and last position of a row, within begin <= position < end."""

    def rows(self, lane: int, begin: int, end: int, names: Sequence[str]) -> Sequence[Row]:
        """Fine rows, each with its position and source before it."""


class StepAxis(Axis):
    """By step, along a line of attempts."""

    unit, levels, block = 1, STEP_LEVELS, schema.STEP_BLOCK

    def __init__(
        self, connection: Connection, series: SeriesRow, line: tuple[Segment, ...]
    ) -> None:
        self._connection = connection
        self._series = series
        self._line = line

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Of each attempt, the steps that are its."""
        for segment in self._line:
            first = max(begin, segment.first)
            last = end if segment.end is None else min(end, segment.end)
            if first < last:
                yield segment.attempt, first, last

    def extent(self, begin: int | None, end: int | None) -> tuple[int, int] | None:
        """Over all attempts of the line."""
        found = []
        for segment in self._line:
            first = segment.first if begin is None else max(begin, segment.first)
            ends = [each for each in (end, segment.end) if each is not None]
            last = min(ends, default=None)
            if last is None or first < last:
                found.append(
                    fine.extent_by_step(
                        self._connection, self._series.id, segment.attempt, first, last
                    )
                )
        known = [each for each in found if each is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if known else None

    def rows(self, lane: int, begin: int, end: int, names: Sequence[str]) -> Sequence[Row]:
        """Of one attempt."""
        return fine.by_step(self._connection, self._series.id, lane, begin, end, names=names)


class TimeAxis(Axis):
    """By time, over all attempts or one."""

    unit, block = BUCKET_S, schema.TIME_BLOCK

    def __init__(
        self, connection: Connection, run: RunRow, series: SeriesRow, attempt: int | None
    ) -> None:
        self._connection = connection
        self._run = run
        self._series = series
        self._attempt = attempt
        # Roll-ups by time are of all attempts.
        self.levels = TIME_LEVELS if attempt is None else ()

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """All of it is in one lane."""
        yield TIME_LANE, begin, end

    def extent(self, begin: int | None, end: int | None) -> tuple[int, int] | None:
        """When the run was heard of: the same for all of its series."""
        return fine.extent_by_bucket(self._connection, self._run.id, begin, end)

    def rows(self, lane: int, begin: int, end: int, names: Sequence[str]) -> Sequence[Row]:
        """Of all steps in that time."""
        return fine.by_bucket(
            self._connection,
            self._run.id,
            self._series.id,
            begin,
            end,
            names=names,
            attempt=self._attempt,
        )


def width_for(low: int, high: int, *, max_points: int, levels: Sequence[int]) -> int:
    """How wide windows are, so that at most `max_points` hold low to high: a multiple of the
    coarsest level that is not wider.

    Example: 0 to 999,999 in 1,000 windows by levels 8, 64, 512 and 4,096 are windows of 1,024.
    """
    width = max(1, -(-(high - low + 1) // max_points))
    while True:
        level = max((each for each in levels if each <= width), default=1)
        width = -(-width // level) * level
        if high // width - low // width < max_points:
            return width
        width += max(level, width // 8)


def read(
    connection: Connection,
    series: SeriesRow,
    axis: Axis,
    *,
    begin: int,
    end: int,
    width: int,
    names: Sequence[str],
    enveloped: bool = False,
    by_source: bool = False,
) -> Windows:
    """The windows of begin <= position < end, with the columns of `names`; for an envelope these
    are those of the reduction that rollup.ENVELOPE has for the instrument.
    """
    levels = [level for level in axis.levels if width % level == 0]
    rolled_names = (*names, *EXTREMES) if enveloped else names
    fine_rows: list[Rows] = []
    rolled: list[Rows] = []
    for lane, first, last in axis.spans(begin, end):
        stale = _stale(connection, series.id, lane, first // axis.block, last // axis.block)
        for piece in cover(first, last, levels=levels, block=axis.block, stale=stale):
            if piece.level == FINE:
                fine_rows.append(Rows.of(axis.rows(lane, piece.begin, piece.end, names), names))
                continue
            found = _rolled(
                connection,
                series.id,
                lane,
                piece.level,
                piece.begin,
                piece.end,
                names=rolled_names,
                by_source=by_source,
            )
            rolled.append(Rows.of(found, rolled_names))
    pooled = [each.take(each.source == POOLED) if by_source else each for each in rolled]
    sources = [each.take(each.source != POOLED) for each in rolled] if by_source else []
    rows = joined([*fine_rows, *pooled], names)
    numbers = _distinct(rows.position // width)
    low = high = np.full(len(numbers), np.nan)
    if enveloped:
        extremes = joined([_extremes(series, joined(fine_rows, names)), *pooled], EXTREMES)
        groups = Groups(
            extremes, np.searchsorted(numbers, extremes.position // width), len(numbers)
        )
        low, high = groups.least("low"), groups.greatest("high")
    of_sources = joined([*fine_rows, *sources] if by_source else [], names)
    return Windows(width, numbers, rows, of_sources, low, high)


def together(parts: Sequence[Windows]) -> Windows:
    """Windows of ranges that follow one another, none of them in two ranges."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return Windows(
        first.width,
        np.concatenate([part.numbers for part in parts]),
        joined([part.rows for part in parts], tuple(first.rows.columns)),
        joined([part.sources for part in parts], tuple(first.sources.columns)),
        np.concatenate([part.low for part in parts]),
        np.concatenate([part.high for part in parts]),
    )


def _extremes(series: SeriesRow, rows: Rows) -> Rows:
    """Of fine rows, each position and its value as the smallest and the largest there."""
    positions = _distinct(rows.position)
    groups = Groups(rows, np.searchsorted(positions, rows.position), len(positions))
    value = groups.values(ENVELOPE[series.instrument])
    return Rows(positions, np.zeros_like(positions), {"low": value, "high": value})


def _distinct(ascending: Ints) -> Ints:
    return ascending[np.flatnonzero(np.diff(ascending, prepend=ascending[:1] - 1))]


def position(value: float | None, unit: int) -> int | None:
    """The first position that is not before a step or a time."""
    return None if value is None else math.ceil(value / unit)


def _stale(
    connection: Connection, series_id: int, lane: int, first: int, last: int
) -> Sequence[int]:
    table = schema.stale
    return connection.scalars(
        select(table.c.block)
        .where(
            table.c.series_id == series_id,
            table.c.lane == lane,
            table.c.block >= first,
            table.c.block <= last,
        )
        .order_by(table.c.block)
    ).all()


def _rolled(
    connection: Connection,
    series_id: int,
    lane: int,
    level: int,
    begin: int,
    end: int,
    *,
    names: Sequence[str],
    by_source: bool,
) -> Sequence[Row]:
    """Roll-ups of a level, each as (begin, source, *columns)."""
    table = schema.rollups
    statement = select(table.c.begin, table.c.source_id, *(table.c[name] for name in names)).where(
        table.c.series_id == series_id,
        table.c.lane == lane,
        table.c.level == level,
        table.c.begin >= begin,
        table.c.begin < end,
    )
    if not by_source:
        statement = statement.where(table.c.source_id == POOLED)
    return fine.fetch(connection, statement)
