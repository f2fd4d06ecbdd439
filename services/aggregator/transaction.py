"""What one batch may do to the store, inside one transaction.

Partials are read, merged and written here, so that sums stay exact. What a transaction needs of a
run (ids, boots, heads) is kept between transactions as a Run, which mirrors the committed rows.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, insert, select, tuple_, update

from services.aggregator import schema
from services.aggregator.batch import GroupEvent
from services.aggregator.reduce import Instrument, Partial, merge
from services.aggregator.rows import COLUMNS, from_row, to_row

KEYS_PER_SELECT = 500
"""Rows looked up by one statement; SQLite takes 32,766 variables, five a row."""


class Place(NamedTuple):
    """Where a partial belongs: the primary key of its row."""

    series_id: int
    attempt: int
    step: int
    producer_id: int
    bucket: int


@dataclass(slots=True)
class Span:
    """First and last of something seen."""

    id: int
    first_s: float
    last_s: float


@dataclass(slots=True)
class Attempt:
    """Steps and times that carry an attempt's number."""

    first_step: int
    last_step: int
    first_s: float
    last_s: float


@dataclass(slots=True)
class Boot:
    """Batches of one start of one producer."""

    id: int
    highest: int
    received: int


@dataclass(slots=True)
class Run:
    """What is known of a run between transactions."""

    seen: Span
    attempts: dict[int, Attempt] = field(default_factory=dict)
    producers: dict[str, Span] = field(default_factory=dict)
    boots: dict[tuple[int, str], Boot] = field(default_factory=dict)
    series: dict[str, tuple[int, Instrument]] = field(default_factory=dict)
    declared: Counter[str] = field(default_factory=Counter)
    """How many series each declaration of the catalogue has; bounds placeholders."""
    heads: dict[tuple[int, int], int] = field(default_factory=dict)
    """By (series, attempt), the highest step."""

    @property
    def missing_batches(self) -> int:
        """Batches that later ones of the same boot say were sent, and that have not come."""
        return sum(boot.highest - boot.received for boot in self.boots.values())

    @property
    def clock(self) -> tuple[int, int]:
        """The latest (attempt, step); (0, 0) before the first."""
        if not self.attempts:
            return 0, 0
        attempt = max(self.attempts)
        return attempt, self.attempts[attempt].last_step


class Transaction:
    """What one batch may do to the store."""

    def __init__(self, connection: Connection, runs: dict[str, Run]) -> None:
        self._connection = connection
        self._runs = runs

    def run(self, name: str, *, first_s: float, last_s: float) -> Run:
        """The run of this name, created when it is new, and seen from `first_s` to `last_s`."""
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = self._load(name) or self._new_run(name, first_s, last_s)
        self._extend(schema.runs, run.seen, first_s, last_s)
        return run

    def producer(self, run: Run, name: str, *, service: str, first_s: float, last_s: float) -> int:
        """The id of a producer, seen from `first_s` to `last_s`."""
        span = run.producers.get(name)
        if span is None:
            key = self._insert(
                schema.producers,
                run_id=run.seen.id,
                name=name,
                service=service,
                first_s=first_s,
                last_s=last_s,
            )
            span = run.producers[name] = Span(key, first_s, last_s)
        self._extend(schema.producers, span, first_s, last_s)
        return span.id

    def claim(self, run: Run, producer_id: int, boot_id: str, sequence: int) -> bool:
        """Name a batch; False when it has been taken before."""
        boot = run.boots.get((producer_id, boot_id))
        if boot is None:
            key = self._insert(
                schema.boots, producer_id=producer_id, boot_id=boot_id, highest=0, received=0
            )
            boot = run.boots[producer_id, boot_id] = Boot(key, 0, 0)
        batches = schema.batches
        named = (batches.c.boot == boot.id) & (batches.c.sequence == sequence)
        # A sequence above all others is new without asking.
        if sequence <= boot.highest and self._connection.scalar(
            select(batches.c.sequence).where(named)
        ):
            return False
        self._connection.execute(insert(batches).values(boot=boot.id, sequence=sequence))
        boot.highest, boot.received = max(boot.highest, sequence), boot.received + 1
        self._connection.execute(
            update(schema.boots)
            .where(schema.boots.c.id == boot.id)
            .values(highest=boot.highest, received=boot.received)
        )
        return True

    def series(self, run: Run, key: str, *, declared: str, instrument: Instrument) -> int | None:
        """The id of a key's series; None when this run holds the key by another instrument."""
        found = run.series.get(key)
        if found is None:
            series_id = self._insert(
                schema.series,
                run_id=run.seen.id,
                key=key,
                declared=declared,
                instrument=instrument,
            )
            found = run.series[key] = (series_id, instrument)
            run.declared[declared] += 1
        return found[0] if found[1] == instrument else None

    def note_attempt(self, run: Run, attempt: int, seen: Attempt) -> None:
        """Widen what is known of an attempt."""
        known = run.attempts.get(attempt)
        merged = seen
        if known is not None:
            merged = Attempt(
                min(known.first_step, seen.first_step),
                max(known.last_step, seen.last_step),
                min(known.first_s, seen.first_s),
                max(known.last_s, seen.last_s),
            )
        if merged == known:
            return
        table = schema.attempts
        values = {
            "first_step": merged.first_step,
            "last_step": merged.last_step,
            "first_s": merged.first_s,
            "last_s": merged.last_s,
        }
        if known is None:
            self._connection.execute(
                insert(table).values(run_id=run.seen.id, attempt=attempt, **values)
            )
        else:
            this = (table.c.run_id == run.seen.id) & (table.c.attempt == attempt)
            self._connection.execute(update(table).where(this).values(**values))
        run.attempts[attempt] = merged

    def add(self, run: Run, partials: Mapping[Place, Partial]) -> None:
        """Merge partials into their rows. All of a series must have its instrument."""
        instruments = dict(run.series.values())
        table = schema.partials
        key_columns = [table.c[name] for name in Place._fields]
        places = list(partials)
        held: dict[Place, Partial] = {}
        for start in range(0, len(places), KEYS_PER_SELECT):
            chunk = places[start : start + KEYS_PER_SELECT]
            rows = self._connection.execute(
                select(*key_columns, *COLUMNS).where(tuple_(*key_columns).in_(chunk))
            )
            for row in rows.mappings():
                place = Place(*(row[name] for name in Place._fields))
                held[place] = from_row(instruments[place.series_id], row)
        self._upsert(
            schema.partials,
            {
                place: to_row(merge(held[place], partial) if place in held else partial)
                for place, partial in partials.items()
            },
            existing=held,
            names=Place._fields,
        )
        self._move_heads(run, places)

    def _move_heads(self, run: Run, places: Iterable[Place]) -> None:
        moved: dict[tuple[int, int], int] = {}
        for place in places:
            head = (place.series_id, place.attempt)
            if place.step > max(run.heads.get(head, -1), moved.get(head, -1)):
                moved[head] = place.step
        self._upsert(
            schema.heads,
            {head: {"step": step} for head, step in moved.items()},
            existing=run.heads,
            names=("series_id", "attempt"),
        )
        run.heads.update(moved)

    def add_events(self, run: Run, events: Iterable[tuple[GroupEvent, float]]) -> None:
        """Keep group events with their time on this clock; the first of a (group, state) stays."""
        table = schema.group_events
        new = {
            (event.group_id, event.state): (event, at_s) for event, at_s in reversed(list(events))
        }
        names = list(new)
        for start in range(0, len(names), KEYS_PER_SELECT):
            known = self._connection.execute(
                select(table.c.group_id, table.c.state)
                .where(table.c.run_id == run.seen.id)
                .where(
                    tuple_(table.c.group_id, table.c.state).in_(
                        names[start : start + KEYS_PER_SELECT]
                    )
                )
            )
            for group_id, state in known:
                del new[group_id, state]
        if new:
            rows = [
                {
                    "run_id": run.seen.id,
                    "group_id": event.group_id,
                    "state": event.state,
                    "row_index": event.row_index,
                    "reason": event.reason,
                    "step": event.step,
                    "worker": event.worker,
                    "at_s": at_s,
                }
                for event, at_s in new.values()
            ]
            self._connection.execute(insert(table), rows)

    def _upsert(
        self,
        table: Any,
        rows: Mapping[Any, dict[str, Any]],
        *,
        existing: Mapping[Any, Any],
        names: tuple[str, ...],
    ) -> None:
        """Insert rows that are new and update the others, by primary key."""
        new = [
            dict(zip(names, key, strict=True)) | row
            for key, row in rows.items()
            if key not in existing
        ]
        old = [
            {f"key_{name}": value for name, value in zip(names, key, strict=True)} | row
            for key, row in rows.items()
            if key in existing
        ]
        if new:
            self._connection.execute(insert(table), new)
        if old:
            statement = update(table)
            for name in names:
                statement = statement.where(table.c[name] == bindparam(f"key_{name}"))
            self._connection.execute(statement, old)

    def _insert(self, table: Any, **values: Any) -> int:
        result = self._connection.execute(insert(table).values(**values))
        assert result.inserted_primary_key is not None
        key: int = result.inserted_primary_key[0]
        return key

    def _extend(self, table: Any, span: Span, first_s: float, last_s: float) -> None:
        if first_s >= span.first_s and last_s <= span.last_s:
            return
        span.first_s, span.last_s = min(first_s, span.first_s), max(last_s, span.last_s)
        self._connection.execute(
            update(table)
            .where(table.c.id == span.id)
            .values(first_s=span.first_s, last_s=span.last_s)
        )

    def _new_run(self, name: str, first_s: float, last_s: float) -> Run:
        key = self._insert(schema.runs, name=name, first_s=first_s, last_s=last_s)
        return Run(Span(key, first_s, last_s))

    def _load(self, name: str) -> Run | None:
        """A run as committed."""
        connection, runs = self._connection, schema.runs
        row = connection.execute(
            select(runs.c.id, runs.c.first_s, runs.c.last_s).where(runs.c.name == name)
        ).first()
        if row is None:
            return None
        run = Run(Span(*row))
        for found in connection.execute(
            select(schema.attempts).where(schema.attempts.c.run_id == row.id)
        ):
            run.attempts[found.attempt] = Attempt(
                found.first_step, found.last_step, found.first_s, found.last_s
            )
        for found in connection.execute(
            select(schema.producers).where(schema.producers.c.run_id == row.id)
        ):
            run.producers[found.name] = Span(found.id, found.first_s, found.last_s)
        ids = [span.id for span in run.producers.values()]
        for found in connection.execute(
            select(schema.boots).where(schema.boots.c.producer_id.in_(ids))
        ):
            boot = Boot(found.id, found.highest, found.received)
            run.boots[found.producer_id, found.boot_id] = boot
        for found in connection.execute(
            select(schema.series).where(schema.series.c.run_id == row.id)
        ):
            run.series[found.key] = (found.id, found.instrument)
            run.declared[found.declared] += 1
        for found in connection.execute(
            select(schema.heads)
            .join(schema.series, schema.series.c.id == schema.heads.c.series_id)
            .where(schema.series.c.run_id == row.id)
        ):
            run.heads[found.series_id, found.attempt] = found.step
        return run
