"""What a writer knows of a run: the ids of its producers, boots and series, and the rows that it
has written lately.

Ids are made in the database, also where several writers ask at once, and remembered; what has been
forgotten is read again. Rows are remembered so that a partial is added to its row without reading:
a writer's rows are its own (see schema.sources).
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, func, select

from services.aggregator import schema
from services.aggregator.reduce import Instrument
from services.aggregator.rows import Row
from services.aggregator.statements import insert_new

Place = tuple[int, int, int, int, int]
"""The primary key of a fine row: (series, attempt, step, source, bucket)."""

Block = tuple[int, int, int]
"""What is stale until it is rolled up: (series, lane, block)."""

Lane = tuple[int, int]
"""(series, lane): the blocks of one attempt's steps, or those by time."""


@dataclass(slots=True)
class Attempt:
    """Steps and times that carry an attempt's number."""

    first_step: int
    last_step: int
    first_s: float
    last_s: float

    def widened(self, other: "Attempt") -> "Attempt":
        """The steps and times of both."""
        return Attempt(
            min(self.first_step, other.first_step),
            max(self.last_step, other.last_step),
            min(self.first_s, other.first_s),
            max(self.last_s, other.last_s),
        )


@dataclass(slots=True)
class Run:
    """One run, as one writer knows it."""

    id: int
    name: str
    attempts: dict[int, Attempt] = field(default_factory=dict)
    producers: dict[str, int] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    """By producer, this writer's source."""
    boots: dict[tuple[int, str], int] = field(default_factory=dict)
    """By (producer, boot id)."""
    missing: dict[int, int] = field(default_factory=dict)
    """By boot, batches that later ones say were sent, and that have not come."""
    series: dict[str, tuple[int, Instrument]] = field(default_factory=dict)
    declared: Counter[str] = field(default_factory=Counter)
    """How many series each declaration of the catalogue has; bounds placeholders."""
    newest: dict[int, dict[int, tuple[Place, Row]]] = field(default_factory=dict)
    """By source and series, the highest place that was written, with its row: what is above it has
    no row yet, and what is added there needs no reading.
    """
    stale: set[Block] = field(default_factory=set)
    """Blocks that are known to be listed as stale."""
    marked: set[Lane] = field(default_factory=set)
    """Where blocks have become stale since they were last rolled up."""
    clock: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """By (attempt, bucket), the first and last step that are known to be listed."""

    @property
    def now(self) -> tuple[int, int]:
        """The latest (attempt, step); (0, 0) before the first."""
        if not self.attempts:
            return 0, 0
        attempt = max(self.attempts)
        return attempt, self.attempts[attempt].last_step


def run_of(connection: Connection, name: str, *, now_s: float) -> Run:
    """The run of this name, made when it is new, with all that is stored about its ids."""
    runs = schema.runs
    run_id = _id_of(connection, runs, {"name": name}, {"first_s": now_s, "last_s": now_s})
    run = Run(run_id, name)
    for found in connection.execute(
        select(schema.attempts).where(schema.attempts.c.run_id == run_id)
    ):
        run.attempts[found.attempt] = Attempt(
            found.first_step, found.last_step, found.first_s, found.last_s
        )
    read_series(connection, run)
    boots, batches, producers = schema.boots, schema.batches, schema.producers
    above = select(func.count()).where(batches.c.boot == boots.c.id).scalar_subquery()
    for boot_id, missing in connection.execute(
        select(boots.c.id, boots.c.highest - boots.c.floor - above)
        .join(producers, producers.c.id == boots.c.producer_id)
        .where(producers.c.run_id == run_id)
        .where(boots.c.highest > boots.c.floor)
    ):
        run.missing[boot_id] = missing
    return run


def read_series(connection: Connection, run: Run) -> None:
    """Learn the series that other writers have made meanwhile."""
    table = schema.series
    run.series.clear()
    run.declared.clear()
    for found in connection.execute(
        select(table.c.id, table.c.key, table.c.declared, table.c.instrument).where(
            table.c.run_id == run.id
        )
    ):
        run.series[found.key] = (found.id, found.instrument)
        run.declared[found.declared] += 1


def producer_of(connection: Connection, run: Run, name: str, *, service: str, now_s: float) -> int:
    """The id of a producer."""
    found = run.producers.get(name)
    if found is None:
        found = run.producers[name] = _id_of(
            connection,
            schema.producers,
            {"run_id": run.id, "name": name},
            {"service": service, "first_s": now_s, "last_s": now_s},
        )
    return found


def source_of(connection: Connection, run: Run, producer_id: int, *, writer: str) -> int:
    """The source of a producer's rows, as this writer takes them."""
    found = run.sources.get(producer_id)
    if found is None:
        named = {"producer_id": producer_id, "writer": writer}
        found = run.sources[producer_id] = _id_of(connection, schema.sources, named, {})
    return found


def boot_of(connection: Connection, run: Run, producer_id: int, boot_id: str) -> int:
    """The id of one start of a producer."""
    found = run.boots.get((producer_id, boot_id))
    if found is None:
        named = {"producer_id": producer_id, "boot_id": boot_id}
        new = {"floor": 0, "highest": 0}
        found = run.boots[producer_id, boot_id] = _id_of(connection, schema.boots, named, new)
    return found


def make_series(
    connection: Connection, run: Run, key: str, *, declared: str, instrument: Instrument
) -> None:
    """Make a series, and learn it. Of two writers that make it at once, the first decides."""
    table = schema.series
    insert_new(
        connection,
        table,
        [{"run_id": run.id, "key": key, "declared": declared, "instrument": instrument}],
    )
    found = connection.execute(
        select(table.c.id, table.c.declared, table.c.instrument).where(
            table.c.run_id == run.id, table.c.key == key
        )
    ).one()
    run.series[key] = (found.id, found.instrument)
    run.declared[found.declared] += 1


def _id_of(connection: Connection, table: Any, named: dict[str, Any], new: dict[str, Any]) -> int:
    """The id of the row with these names, made when there is none."""
    statement = select(table.c.id).filter_by(**named)
    found: int | None = connection.scalar(statement)
    if found is None:
        insert_new(connection, table, [named | new])
        found = connection.scalar(statement)
        assert found is not None
    return found
