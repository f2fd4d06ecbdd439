"""Roll-ups: what fine rows add up to over 8 to 4,096 steps, and over 1 min, 5 min and 1 h.

They are pure functions of the fine rows, made a block at a time once a later block has begun, and
again when a late partial has amended one; until then the block is listed as stale, in the same
transaction as its rows. A roll-up exists for each source and for all of them together; that one
has the envelope: the smallest and largest sum, mean or ratio of a step (by time: of 10 s).
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, delete, select, tuple_

from services.aggregator import fine, schema
from services.aggregator.reduce import Instrument, Reduction, reduce
from services.aggregator.registry import Block, Lane
from services.aggregator.rows import COLUMN_NAMES, SUM_HIGH, N, Row, pool, to_row
from services.aggregator.schema import POOLED, STEP_LEVELS, TIME_LANE, TIME_LEVELS
from services.aggregator.statements import replace
from services.aggregator.store import Store

BLOCKS_AT_ONCE = 32
"""Of one transaction: batches wait for it."""

ROLLED = (*COLUMN_NAMES, "low", "high")
"""The columns of a roll-up beside its primary key."""

ENVELOPE: dict[Instrument, Reduction] = {"count": "sum", "observation": "mean", "ratio": "ratio"}
"""The reduction whose extremes are kept."""


class Roller:
    """Rolls up what a store's writer has written. Calls come from the writer's thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lanes: set[Lane] = set()

    def roll(self, *, budget_s: float) -> bool:
        """Roll up for about `budget_s` seconds; True when there is more to do."""
        give_up_s = time.monotonic() + budget_s
        self._lanes |= self._store.take_marked()
        while self._lanes:
            if time.monotonic() >= give_up_s:
                return True
            with self._store.rolling() as connection:
                if connection is None:
                    return True
                blocks = self._blocks(connection)
                roll_up(connection, blocks)
            self._store.rolled(blocks)
        return False

    def _blocks(self, connection: Connection) -> list[Block]:
        """Some stale blocks, the newest of each lane excepted; lanes without one are done with."""
        table = schema.stale
        found: list[Block] = []
        for lane in sorted(self._lanes):
            series_id, number = lane
            blocks = connection.scalars(
                select(table.c.block)
                .where(table.c.series_id == series_id, table.c.lane == number)
                .order_by(table.c.block)
                .limit(BLOCKS_AT_ONCE + 1)
            ).all()
            room = BLOCKS_AT_ONCE - len(found)
            chosen = blocks[:-1][:room]
            found.extend((series_id, number, block) for block in chosen)
            if len(chosen) == max(0, len(blocks) - 1) and len(blocks) <= BLOCKS_AT_ONCE:
                self._lanes.discard(lane)
            if len(found) >= BLOCKS_AT_ONCE:
                break
        return found


def roll_up(connection: Connection, blocks: Sequence[Block]) -> None:
    """Make the roll-ups of some blocks, and list them as stale no more."""
    if not blocks:
        return
    series = _series(connection, {series_id for series_id, _, _ in blocks})
    rows: list[tuple[Any, ...]] = []
    parents: defaultdict[int, set[tuple[int, int, int]]] = defaultdict(set)
    for series_id, lane, block in blocks:
        if series_id not in series:  # of a run that was deleted
            continue
        run_id, instrument = series[series_id]
        by_time = lane == TIME_LANE
        levels = TIME_LEVELS if by_time else STEP_LEVELS
        size = schema.TIME_BLOCK if by_time else schema.STEP_BLOCK
        begin, end = block * size, (block + 1) * size
        if by_time:
            found = fine.by_bucket(connection, run_id, series_id, begin, end, names=COLUMN_NAMES)
        else:
            found = fine.by_step(connection, series_id, lane, begin, end, names=COLUMN_NAMES)
        for level in (each for each in levels if each <= size):
            rows.extend(
                (series_id, lane, level, *rest) for rest in _of_fine(instrument, found, level)
            )
        for level in (each for each in levels if each > size):
            parents[level].add((series_id, lane, begin // level))
    replace(connection, schema.rollups, sorted(rows), names=ROLLED)
    for level in sorted(parents):
        made = [
            (series_id, lane, level, *rest)
            for series_id, lane, number in sorted(parents[level])
            for rest in _of_level(connection, series_id, lane, level, number, series[series_id][1])
        ]
        replace(connection, schema.rollups, made, names=ROLLED)
    table = schema.stale
    names = tuple_(table.c.series_id, table.c.lane, table.c.block)
    connection.execute(delete(table).where(names.in_(blocks)))


def _series(connection: Connection, ids: Iterable[int]) -> dict[int, tuple[int, Instrument]]:
    """The run and the instrument of series."""
    table = schema.series
    rows = connection.execute(
        select(table.c.id, table.c.run_id, table.c.instrument).where(table.c.id.in_(sorted(ids)))
    )
    return {series_id: (run_id, instrument) for series_id, run_id, instrument in rows}


def _of_fine(
    instrument: Instrument, rows: Sequence[Sequence[Any]], level: int
) -> Iterator[tuple[Any, ...]]:
    """The roll-ups of a level from fine rows: (source, begin, *partial, low, high)."""
    windows: defaultdict[int, list[Sequence[Any]]] = defaultdict(list)
    for row in rows:
        windows[row[0] // level].append(row)
    for number, held in windows.items():
        begin = number * level
        sources: defaultdict[int, list[Sequence[Any]]] = defaultdict(list)
        for row in held:
            sources[row[1]].append(row)
        pooled = _made(instrument, begin, held)
        yield (POOLED, *pooled)
        if len(sources) == 1:
            yield (held[0][1], *pooled)
            continue
        for source_id, own in sources.items():
            yield (source_id, *_made(instrument, begin, own))


def _made(instrument: Instrument, begin: int, rows: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    partial = pool(instrument, [row[fine.KEY_COLUMNS :] for row in rows])
    return (begin, *to_row(partial), *envelope(instrument, rows, ENVELOPE[instrument]))


def envelope(
    instrument: Instrument,
    rows: Iterable[Sequence[Any]],
    reduction: Reduction,
    *,
    seconds: float | None = None,
) -> tuple[float | None, float | None]:
    """The smallest and largest value of the positions of fine rows; None without one."""
    positions: defaultdict[int, list[Sequence[Any]]] = defaultdict(list)
    for row in rows:
        positions[row[0]].append(row[fine.KEY_COLUMNS :])
    values = [
        value
        for held in positions.values()
        if (value := _value(instrument, held, reduction, seconds)) is not None
    ]
    return min(values, default=None), max(values, default=None)


def _value(
    instrument: Instrument,
    rows: Sequence[Sequence[Any]],
    reduction: Reduction,
    seconds: float | None,
) -> float | None:
    if len(rows) == 1 and reduction == "mean":
        # By far the most frequent case: one value a step.
        n: int = rows[0][N]
        return rows[0][SUM_HIGH] / n if n else None
    return reduce(pool(instrument, rows), reduction, seconds=seconds)


def _of_level(
    connection: Connection,
    series_id: int,
    lane: int,
    level: int,
    number: int,
    instrument: Instrument,
) -> Iterator[tuple[Any, ...]]:
    """A roll-up of a level from those of the one below, for each source."""
    levels = TIME_LEVELS if lane == TIME_LANE else STEP_LEVELS
    below = levels[levels.index(level) - 1]
    table = schema.rollups
    columns = [table.c[name] for name in COLUMN_NAMES]
    found = connection.execute(
        select(table.c.source_id, table.c.low, table.c.high, *columns).where(
            table.c.series_id == series_id,
            table.c.lane == lane,
            table.c.level == below,
            table.c.begin >= number * level,
            table.c.begin < (number + 1) * level,
        )
    )
    sources: defaultdict[int, list[Row]] = defaultdict(list)
    for row in found:
        sources[row[0]].append(row)
    for source_id, rows in sources.items():
        partial = pool(instrument, [row[3:] for row in rows])
        low = min((row[1] for row in rows if row[1] is not None), default=None)
        high = max((row[2] for row in rows if row[2] is not None), default=None)
        yield (source_id, number * level, *to_row(partial), low, high)
