"""What batches may do to the store, inside one transaction.

Everything that two writers could touch at once is locked in the same order by all of them: boots,
stale blocks, clock, attempts, producers, runs, and the revision last; each of them in the order of
its key. Ids are made before (registry.py), on PostgreSQL in transactions of their own.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, case, delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import schema
from services.aggregator.batch import GroupEvent
from services.aggregator.registry import Attempt, Block, Place, Run
from services.aggregator.rows import COLUMN_NAMES, StoredRow
from services.aggregator.statements import insert_new, replace, widen

CLOCK_KEPT = 10_000
"""Entries of a run's clock that are remembered."""


Moment = tuple[int, int, int]
"""(attempt, step, bucket)."""


class RunGone(SQLAlchemyError):
    """The run was deleted by another aggregator meanwhile; the batch can be sent again."""


@dataclass(slots=True)
class Changed:
    """What a transaction has written of one run."""

    rows: dict[Place, StoredRow] = field(default_factory=dict)
    touched: defaultdict[Moment, set[int]] = field(default_factory=lambda: defaultdict(set))
    """The series of the rows, by (attempt, step, bucket)."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    producers: dict[int, tuple[float, float]] = field(default_factory=dict)
    """First and last time that each was seen."""


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

    def row(self, run: Run, place: Place) -> StoredRow | None:
        """The row of a place, to add to; None when there is none yet."""
        held = run.rows.get(place)
        if held is not None:
            return held
        series_id, attempt, step, source_id, bucket = place
        head = run.heads.get((series_id, source_id))
        if head is None or (attempt, step, bucket) > head:
            return None
        table = schema.partials
        found = self._connection.execute(
            select(*(table.c[name] for name in COLUMN_NAMES)).where(
                table.c.series_id == series_id,
                table.c.attempt == attempt,
                table.c.step == step,
                table.c.source_id == source_id,
                table.c.bucket == bucket,
            )
        ).first()
        return None if found is None else list(found)

    def add_events(self, run: Run, events: Iterable[tuple[GroupEvent, float]]) -> None:
        """Keep group events with their time on this clock; the first of a (group, state) stays."""
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for event, at_s in events:
            rows.setdefault(
                (event.group_id, event.state),
                {
                    "run_id": run.id,
                    "group_id": event.group_id,
                    "state": event.state,
                    "row_index": event.row_index,
                    "reason": event.reason,
                    "step": event.step,
                    "worker": event.worker,
                    "at_s": at_s,
                },
            )
        insert_new(self._connection, schema.group_events, [rows[key] for key in sorted(rows)])

    def finish(self, *, now_s: float) -> None:
        """Write what was changed. Raises RunGone."""
        changed = [self._changed[name] for name in sorted(self._changed)]
        blocks = {}
        for run, each in changed:
            self._write_rows(run, each.rows)
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

    def _write_rows(self, run: Run, rows: dict[Place, StoredRow]) -> None:
        replace(
            self._connection,
            schema.partials,
            [(*place, *rows[place]) for place in sorted(rows)],
        )
        run.rows.update(rows)
        heads = run.heads
        for series_id, attempt, step, source_id, bucket in rows:
            key, position = (series_id, source_id), (attempt, step, bucket)
            head = heads.get(key)
            if head is None or position > head:
                heads[key] = position

    def _mark_stale(self, changed: Sequence[tuple[Run, Changed]]) -> None:
        new: list[Block] = []
        for run, each in changed:
            series: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
            for (attempt, step, bucket), touched in each.touched.items():
                series[attempt, step // schema.STEP_BLOCK] |= touched
                series[schema.TIME_LANE, bucket // schema.TIME_BLOCK] |= touched
            marks = {
                (series_id, lane, block)
                for (lane, block), touched in series.items()
                for series_id in touched
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
            for attempt, step, bucket in each.touched:
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


def _blocks(touched: Mapping[Moment, set[int]]) -> str:
    """The blocks of steps that were touched, as schema.changes keeps them."""
    found: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for (attempt, step, _bucket), series in touched.items():
        found[attempt, step // schema.STEP_BLOCK] |= series
    return json.dumps([[*block, sorted(series)] for block, series in sorted(found.items())])


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
