"""Reads a series in windows: the rows that make up each, from the coarsest roll-ups that answer.

A window is `width` positions from a multiple of it: steps of the surviving line (or of one
attempt), or 10 s buckets.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, select

from services.aggregator import fine, schema
from services.aggregator.cover import FINE, cover
from services.aggregator.lines import Segment
from services.aggregator.rollup import ENVELOPE, envelope
from services.aggregator.rows import COLUMN_NAMES, SCALAR_NAMES, Row
from services.aggregator.schema import BUCKET_S, POOLED, STEP_LEVELS, TIME_LANE, TIME_LEVELS
from services.aggregator.series import RunRow, SeriesRow


@dataclass(slots=True)
class Window:
    """What one window is made of: rows in the order of rows.COLUMN_NAMES."""

    rows: list[Row] = field(default_factory=list)
    sources: defaultdict[int, list[Row]] = field(default_factory=lambda: defaultdict(list))
    """The same rows by source; filled only where that was asked for."""
    low: float | None = None
    high: float | None = None

    def widen(self, low: float | None, high: float | None) -> None:
        """Take extremes into the envelope."""
        if low is not None and (self.low is None or low < self.low):
            self.low = low
        if high is not None and (self.high is None or high > self.high):
            self.high = high


class Axis:
    """Where positions come from. `since` <= position < `until`."""

    unit: int
    """Steps or seconds of a position."""
    levels: tuple[int, ...]
    block: int

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The lanes that hold begin <= position < end: (lane, begin, end) of each."""
        raise NotImplementedError

    def extent(self, begin: int | None, end: int | None) -> tuple[int, int] | None:
        """The first and last position of a row, within begin <= position < end."""
        raise NotImplementedError

    def rows(self, lane: int, begin: int, end: int, names: Sequence[str]) -> Sequence[Row]:
        """Fine rows, each with its position and source before it."""
        raise NotImplementedError


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
    histograms: bool = False,
    by_source: bool = False,
) -> dict[int, Window]:
    """The windows of begin <= position < end that hold anything, by number, ascending."""
    names = COLUMN_NAMES if histograms else SCALAR_NAMES
    levels = [level for level in axis.levels if width % level == 0]
    windows: defaultdict[int, Window] = defaultdict(Window)
    enveloped: defaultdict[int, list[Row]] = defaultdict(list)
    for lane, first, last in axis.spans(begin, end):
        stale = _stale(connection, series.id, lane, first // axis.block, last // axis.block)
        for piece in cover(first, last, levels=levels, block=axis.block, stale=stale):
            if piece.level == FINE:
                for row in axis.rows(lane, piece.begin, piece.end, names):
                    number = row[0] // width
                    windows[number].rows.append(row[fine.KEY_COLUMNS :])
                    if by_source:
                        windows[number].sources[row[1]].append(row[fine.KEY_COLUMNS :])
                    if width > 1:
                        enveloped[number].append(row)
                continue
            for row in _rolled(
                connection,
                series.id,
                lane,
                piece.level,
                piece.begin,
                piece.end,
                names=names,
                by_source=by_source,
            ):
                window = windows[row[0] // width]
                if row[1] != POOLED:
                    window.sources[row[1]].append(row[4:])
                    continue
                window.rows.append(row[4:])
                window.widen(row[2], row[3])
    for number, rows in enveloped.items():
        windows[number].widen(*envelope(series.instrument, rows, ENVELOPE[series.instrument]))
    return {number: windows[number] for number in sorted(windows)}


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
    """Roll-ups of a level, each as (begin, source, low, high, *partial)."""
    table = schema.rollups
    statement = select(
        table.c.begin,
        table.c.source_id,
        table.c.low,
        table.c.high,
        *(table.c[name] for name in names),
    ).where(
        table.c.series_id == series_id,
        table.c.lane == lane,
        table.c.level == level,
        table.c.begin >= begin,
        table.c.begin < end,
    )
    if not by_source:
        statement = statement.where(table.c.source_id == POOLED)
    return connection.execute(statement).all()
