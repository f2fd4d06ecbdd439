"""Roll-ups: what fine rows add up to over 8 to 4,096 steps, and over 1 min, 5 min and 1 h.

They are pure functions of the fine rows, made a block at a time once a later block has begun, and
again when a late partial has amended one; until then the block is listed as stale, in the same
transaction as its rows. A roll-up exists for each source and for all of them together; that one
has the envelope: the smallest and largest sum, mean or ratio of a step (by time: of 10 s).
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, delete, select, tuple_

from services.aggregator import fine, schema
from services.aggregator.groups import INTEGER_NAMES, Groups, Ints, Rows, joined
from services.aggregator.reduce import Instrument, Reduction
from services.aggregator.registry import Block, Lane
from services.aggregator.rows import COLUMNS_OF
from services.aggregator.schema import POOLED, STEP_LEVELS, TIME_LANE, TIME_LEVELS
from services.aggregator.statements import replace
from services.aggregator.store import Store

BLOCKS_AT_ONCE = 32
"""Of one transaction: batches wait for it."""

EXTREMES = ("low", "high")
"""The envelope's columns."""

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
    alike: defaultdict[tuple[bool, Instrument], list[Block]] = defaultdict(list)
    for block in blocks:
        if block[0] in series:  # else of a run that was deleted
            alike[block[1] == TIME_LANE, series[block[0]][1]].append(block)
    for (by_time, instrument), held in sorted(alike.items()):
        levels = TIME_LEVELS if by_time else STEP_LEVELS
        size = schema.TIME_BLOCK if by_time else schema.STEP_BLOCK
        names = (*COLUMNS_OF[instrument], *EXTREMES)
        parts = [_fine(connection, block, series[block[0]][0], size, instrument) for block in held]
        parts = [_with_extremes(part, instrument) for part in parts]
        owners = [(series_id, lane) for series_id, lane, _ in held]
        for level in levels:
            if level > size:
                wider = sorted({(s, lane, block * size // level) for s, lane, block in held})
                parts = [_rolled(connection, *each, levels, level, names) for each in wider]
                owners = [(series_id, lane) for series_id, lane, _ in wider]
            parts = _merged(parts, level, instrument)
            _write(connection, owners, parts, level, names)
    table = schema.stale
    stale = tuple_(table.c.series_id, table.c.lane, table.c.block)
    connection.execute(delete(table).where(stale.in_(blocks)))


def _series(connection: Connection, ids: Iterable[int]) -> dict[int, tuple[int, Instrument]]:
    """The run and the instrument of series."""
    table = schema.series
    rows = connection.execute(
        select(table.c.id, table.c.run_id, table.c.instrument).where(table.c.id.in_(sorted(ids)))
    )
    return {series_id: (run_id, instrument) for series_id, run_id, instrument in rows}


def _fine(
    connection: Connection, block: Block, run_id: int, size: int, instrument: Instrument
) -> Rows:
    """The fine rows of a block."""
    series_id, lane, number = block
    names, begin, end = COLUMNS_OF[instrument], number * size, (number + 1) * size
    if lane == TIME_LANE:
        return Rows.of(
            fine.by_bucket(connection, run_id, series_id, begin, end, names=names), names
        )
    return Rows.of(fine.by_step(connection, series_id, lane, begin, end, names=names), names)


def _rolled(
    connection: Connection,
    series_id: int,
    lane: int,
    number: int,
    levels: tuple[int, ...],
    level: int,
    names: tuple[str, ...],
) -> Rows:
    """The roll-ups of the level below that a roll-up of `level` is made of."""
    table = schema.rollups
    statement = select(table.c.begin, table.c.source_id, *(table.c[name] for name in names)).where(
        table.c.series_id == series_id,
        table.c.lane == lane,
        table.c.level == levels[levels.index(level) - 1],
        table.c.begin >= number * level,
        table.c.begin < (number + 1) * level,
    )
    return Rows.of(fine.fetch(connection, statement), names)


def _with_extremes(rows: Rows, instrument: Instrument) -> Rows:
    """The value of each source and of all of them at each position, as an envelope of one."""
    pooled = Rows(rows.position, np.full_like(rows.source, POOLED), rows.columns)
    both = joined([rows, pooled], COLUMNS_OF[instrument])
    groups, order = _grouped(both, both.position, np.zeros_like(both.position))
    values = groups.values(ENVELOPE[instrument])[groups.at]
    back = np.empty_like(values)
    back[order] = values
    return Rows(both.position, both.source, {**both.columns, "low": back, "high": back})


def _grouped(rows: Rows, window: Ints, owner: Ints) -> tuple[Groups, Ints]:
    """Rows by owner, source and window; and the order that they were put in."""
    order = np.lexsort((window, rows.source, owner))
    keys = (owner[order], rows.source[order], window[order])
    new = np.logical_or.reduce([np.diff(key, prepend=key[:1] - 1) != 0 for key in keys])
    return Groups(rows.take(order), np.cumsum(new) - 1, int(np.count_nonzero(new))), order


def _merged(parts: Sequence[Rows], level: int, instrument: Instrument) -> list[Rows]:
    """Of each part, its rows added up over windows of `level` positions, for each source."""
    names = (*COLUMNS_OF[instrument], *EXTREMES)
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    rows = Rows(
        np.concatenate([part.position for part in parts]),
        np.concatenate([part.source for part in parts]),
        {name: np.concatenate([part.columns[name] for part in parts]) for name in names},
    )
    groups, order = _grouped(rows, rows.position // level, owner)
    first = np.flatnonzero(np.diff(groups.at, prepend=-1))
    columns: dict[str, NDArray[Any]] = {}
    columns["sum_high"], columns["sum_low"] = groups.sums()
    if instrument == "ratio":
        columns["denominator_high"], columns["denominator_low"] = groups.sums("denominator")
    if instrument == "observation":
        for name in INTEGER_NAMES:
            columns[name] = groups.counts(name)
        columns["minimum"], columns["maximum"] = groups.least("minimum"), groups.greatest("maximum")
        lasts = groups.lasts()
        for name in ("last", "last_at_s"):
            columns[name] = np.full(groups.num, np.nan)
            columns[name][lasts.at] = lasts.rows.columns[name]
        columns["histogram"] = np.empty(groups.num, object)
        columns["histogram"][:] = groups.histograms()
    columns["low"], columns["high"] = groups.least("low"), groups.greatest("high")
    made = Rows(groups.rows.position[first] // level * level, groups.rows.source[first], columns)
    ends = np.searchsorted(owner[order][first], np.arange(len(parts) + 1))
    return [made.take(np.arange(begin, end)) for begin, end in itertools.pairwise(ends.tolist())]


def _write(
    connection: Connection,
    owners: Sequence[tuple[int, int]],
    parts: Sequence[Rows],
    level: int,
    names: tuple[str, ...],
) -> None:
    rows = [
        (series_id, lane, level, source, begin, *values)
        for (series_id, lane), part in zip(owners, parts, strict=True)
        for source, begin, *values in zip(
            part.source.tolist(),
            part.position.tolist(),
            *(_stored(part.columns[name]) for name in names),
            strict=True,
        )
    ]
    replace(connection, schema.rollups, sorted(rows, key=itemgetter(slice(5))), names=names)


def _stored(column: NDArray[Any]) -> list[Any]:
    """As the database keeps it: what is absent is NULL."""
    if column.dtype == np.float64 and np.isnan(column).any():
        absent = np.isnan(column)
        column = column.astype(object)
        column[absent] = None
    found: list[Any] = column.tolist()
    return found
