"""What batches may do to the store, inside one transaction.

Everything that two writers could touch at once is locked in the same order by all of them: boots,
ledgers, traces, stale blocks, clock, attempts, producers, runs, and the revision last; each of them
in the order of its key. Ids are made before (registry.py), on PostgreSQL in transactions of their
own.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, case, delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import ledger, schema, trace_store
from services.aggregator.batch import GroupEvent
from services.aggregator.reduce import Instrument
from services.aggregator.registry import Attempt, Block, Place, Run
from services.aggregator.rows import COLUMN_NAMES, COLUMNS_OF, DENOMINATOR_HIGH, N, Row, added
from services.aggregator.statements import insert_new, replace, widen
from services.aggregator.traces import Trace
from services.common.traces_config import Traces

CLOCK_KEPT = 10_000
"""Entries of a run's clock that are remembered."""


class RunGone(SQLAlchemyError):
    """The run was deleted by another aggregator meanwhile; the batch can be sent again."""


@dataclass(slots=True)
class Changed:
    """What a transaction writes of one run."""

    rows: dict[Place, Row] = field(default_factory=dict)
    touched: defaultdict[tuple[int, int], set[int]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """By (lane, block), the series of these rows."""
    moments: set[tuple[int, int, int]] = field(default_factory=set)
    """(attempt, bucket, step)."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    producers: dict[int, tuple[float, float]] = field(default_factory=dict)
    """First and last time that each was seen."""
    events: list[tuple[GroupEvent, float]] = field(default_factory=list)
    """What happened to groups, with the time on this clock."""
    traces: list[tuple[Trace, float]] = field(default_factory=list)
    """Conversations to show, with the time on this clock."""


class Transaction:
    """One transaction, over batches of any number of runs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._changed: dict[str, tuple[Run, Changed]] = {}

    def claim(self, claims: Mapping[int, tuple[Run, Sequence[int]]]) -> set[tuple[int, int]]:
        """Name batches, by boot; the (boot, sequence) that were not taken before, each once."""
        if not claims:
            return set()
        boots, batches = schema.boots, schema.batches
        ids = sorted(claims)
        # The lock: of two aggregators that got the same batch, one waits for the other's commit.
        held = self._connection.execute(
            select(boots.c.id, boots.c.floor, boots.c.highest)
            .where(boots.c.id.in_(ids))
            .order_by(boots.c.id)
            .with_for_update()
        ).all()
        if len(held) < len(ids):
            gone = {boot: run.name for boot, (run, _) in claims.items()}
            for boot, *_ in held:
                del gone[boot]
            raise RunGone(f"deleted meanwhile: {', '.join(sorted(set(gone.values())))}")
        above: defaultdict[int, set[int]] = defaultdict(set)
        for boot, sequence in self._connection.execute(
            select(batches.c.boot, batches.c.sequence).where(batches.c.boot.in_(ids))
        ):
            above[boot].add(sequence)
        taken: set[tuple[int, int]] = set()
        for boot, floor, highest in held:
            run, sequences = claims[boot]
            new = {each for each in sequences if each > floor and each not in above[boot]}
            if not new:
                continue
            taken.update((boot, sequence) for sequence in new)
            self._name(boot, floor, max(highest, *new), above=above[boot], new=new, run=run)
        return taken

    def _name(
        self, boot: int, floor: int, highest: int, *, above: set[int], new: set[int], run: Run
    ) -> None:
        """Store the names of a boot's batches: one number up to the first gap, then rows."""
        batches, boots = schema.batches, schema.boots
        come, reached = above | new, floor
        while reached + 1 in come:
            reached += 1
        rows = [{"boot": boot, "sequence": each} for each in sorted(new) if each > reached]
        if rows:
            self._connection.execute(insert(batches), rows)
        if above and reached > floor:
            self._connection.execute(
                delete(batches).where(batches.c.boot == boot, batches.c.sequence <= reached)
            )
        self._connection.execute(
            update(boots).where(boots.c.id == boot).values(floor=reached, highest=highest)
        )
        run.missing[boot] = highest - reached - sum(each > reached for each in come)

    def of(self, run: Run) -> Changed:
        """What has been written of a run so far, to add to."""
        return self._changed.setdefault(run.name, (run, Changed()))[1]

    def add(self, run: Run, source_id: int, places: Iterable[Place], rows: Iterable[Row]) -> None:
        """Add rows, each to that of its place; all of a series are of its instrument."""
        written = self.of(run).rows
        newest = run.newest.setdefault(source_id, {})
        for place, row in zip(places, rows, strict=True):
            known = newest.get(place[0])
            if known is not None:
                if known[0] == place:
                    row = added(known[1], row)
                elif place < known[0]:
                    held = written.get(place) or self._stored(place)
                    written[place] = row if held is None else added(held, row)
                    continue
            newest[place[0]] = (place, row)
            written[place] = row

    def _stored(self, place: Place) -> Row | None:
        """The row of a place that is not the newest of its source."""
        table = schema.partials
        found = self._connection.execute(
            select(*(table.c[name] for name in COLUMN_NAMES)).where(
                *(
                    column == value
                    for column, value in zip(table.primary_key.columns, place, strict=True)
                )
            )
        ).first()
        return None if found is None else tuple(found)

    def finish(self, *, now_s: float, traces: Traces) -> None:
        """Write what was changed; `traces` says how many are kept. Raises RunGone."""
        changed = [self._changed[name] for name in sorted(self._changed)]
        by_id = sorted(changed, key=lambda pair: pair[0].id)
        for run, each in by_id:
            ledger.write(self._connection, run.id, each.events)
        for run, each in by_id:
            trace_store.write(self._connection, run.id, each.traces, settings=traces)
        blocks = {}
        for run, each in changed:
            self._write_rows(each.rows)
            blocks[run.id] = _blocks(each.touched)
        self._mark_stale(changed)
        self._write_clock(changed)
        for run, each in changed:
            self._note_attempts(run, each.attempts)
        self._see_producers(changed)
        self._see_runs(changed, now_s=now_s)
        revision = rise(self._connection, "revision")
        rows = [
            {"run_id": run_id, "revision": revision, "at_s": now_s, "blocks": text}
            for run_id, text in sorted(blocks.items())
        ]
        if rows:
            self._connection.execute(insert(schema.changes), rows)

    def _write_rows(self, rows: dict[Place, Row]) -> None:
        counts: list[tuple[Any, ...]] = []
        ratios: list[tuple[Any, ...]] = []
        observations: list[tuple[Any, ...]] = []
        for place, row in sorted(rows.items()):
            if row[N] is not None:
                observations.append(place + row[:DENOMINATOR_HIGH] + row[N:])
            elif row[DENOMINATOR_HIGH] is not None:
                ratios.append(place + row[:N])
            else:
                counts.append(place + row[:DENOMINATOR_HIGH])
        found: tuple[tuple[Instrument, list[tuple[Any, ...]]], ...] = (
            ("count", counts),
            ("ratio", ratios),
            ("observation", observations),
        )
        # Without the columns that an instrument leaves empty: there are many rows.
        for instrument, written in found:
            names = COLUMNS_OF[instrument]
            replace(self._connection, schema.partials, written, names=names)

    def _mark_stale(self, changed: Sequence[tuple[Run, Changed]]) -> None:
        new: list[Block] = []
        for run, each in changed:
            marks = {
                (series_id, lane, block)
                for (lane, block), series in each.touched.items()
                for series_id in series
            }
            unmarked = marks - run.stale
            run.stale |= unmarked
            run.marked.update((series_id, lane) for series_id, lane, _ in unmarked)
            new.extend(unmarked)
        insert_new(
            self._connection,
            schema.stale,
            [
                {"series_id": series_id, "lane": lane, "block": block}
                for series_id, lane, block in sorted(new)
            ],
        )

    def _write_clock(self, changed: Sequence[tuple[Run, Changed]]) -> None:
        rows = []
        for run, each in changed:
            seen: dict[tuple[int, int], tuple[int, int]] = {}
            for attempt, bucket, step in each.moments:
                key = (attempt, bucket)
                first, last = seen.get(key, (step, step))
                seen[key] = (step if step < first else first, step if step > last else last)
            for key, (first, last) in seen.items():
                known = run.clock.get(key)
                if known is not None:
                    first, last = min(first, known[0]), max(last, known[1])
                if known == (first, last):
                    continue
                if len(run.clock) >= CLOCK_KEPT:
                    run.clock.clear()
                run.clock[key] = (first, last)
                rows.append((run.id, *key, first, last))
        names = [column.name for column in schema.clock.columns]
        widen(
            self._connection,
            schema.clock,
            [dict(zip(names, row, strict=True)) for row in sorted(rows)],
            ranges={"first_step": "min", "last_step": "max"},
        )

    def _note_attempts(self, run: Run, seen: Mapping[int, Attempt]) -> None:
        rows = []
        for attempt in sorted(seen):
            known = run.attempts.get(attempt)
            now = seen[attempt] if known is None else known.widened(seen[attempt])
            if now == known:
                continue
            run.attempts[attempt] = now
            rows.append(
                {
                    "run_id": run.id,
                    "attempt": attempt,
                    "first_step": now.first_step,
                    "last_step": now.last_step,
                    "first_s": now.first_s,
                    "last_s": now.last_s,
                }
            )
        widen(
            self._connection,
            schema.attempts,
            rows,
            ranges={"first_step": "min", "last_step": "max", "first_s": "min", "last_s": "max"},
        )

    def _see_producers(self, changed: Sequence[tuple[Run, Changed]]) -> None:
        seen = {
            producer: times for _, each in changed for producer, times in each.producers.items()
        }
        for producer_id in sorted(seen):
            first_s, last_s = seen[producer_id]
            self._see(schema.producers, producer_id, first_s=first_s, last_s=last_s)

    def _see_runs(self, changed: Sequence[tuple[Run, Changed]], *, now_s: float) -> None:
        for run, each in sorted(changed, key=lambda pair: pair[0].id):
            times = [time_s for seen in each.producers.values() for time_s in seen]
            if not self._see(
                schema.runs,
                run.id,
                first_s=min(times, default=now_s),
                last_s=max(times, default=now_s),
            ):
                raise RunGone(f"run {run.name} was deleted")

    def _see(self, table: Any, row_id: int, *, first_s: float, last_s: float) -> bool:
        """Widen the time that a row was seen; False when it is gone."""
        found = self._connection.execute(
            update(table)
            .where(table.c.id == row_id)
            .values(
                first_s=case((table.c.first_s > first_s, first_s), else_=table.c.first_s),
                last_s=case((table.c.last_s < last_s, last_s), else_=table.c.last_s),
            )
        )
        return found.rowcount == 1


def rise(connection: Connection, name: str) -> int:
    """Add one to a counter, and lock it until the end of the transaction; its new value."""
    table = schema.counters
    value: int | None = connection.scalar(
        update(table)
        .where(table.c.name == name)
        .values(value=table.c.value + 1)
        .returning(table.c.value)
    )
    assert value is not None
    return value


def _blocks(touched: Mapping[tuple[int, int], set[int]]) -> str:
    """Blocks of steps as schema.changes keeps them."""
    return json.dumps(
        [
            [*place, sorted(series)]
            for place, series in sorted(touched.items())
            if place[0] != schema.TIME_LANE
        ]
    )


@contextmanager
def ids(connection: Connection) -> Iterator[Connection]:
    """Where ids are made: on SQLite, which has one writer, in the same transaction; else in one of
    their own, so that nobody waits for them as long as data is written.
    """
    if connection.dialect.name == "sqlite":
        yield connection
    else:
        with connection.engine.begin() as own:
            yield own
