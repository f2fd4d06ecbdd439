"""The store's writing side: one writer a process, one transaction at a time, nothing by halves.

All calls come from one thread. What is remembered of runs mirrors their committed rows: a
transaction that fails forgets it all, goes on as another writer, and reads ids again.
"""

import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, delete, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import schema
from services.aggregator.registry import Block, Lane, Run, read_series, run_of
from services.aggregator.statements import insert_new
from services.aggregator.transaction import RunGone, Transaction, ids, rise
from services.common.errors import UserError

COUNTERS = ("revision", "pruned", "rolls")

CREATING, ROLLING, ROLLER = 7_204_301, 7_204_302, 7_204_303
"""Advisory locks on PostgreSQL: held while tables are made; shared by writers, and held alone while
rolling up; held by the one that may roll up.
"""

DELETED_AT_ONCE = 20_000
"""Rows of a run that one transaction deletes, so that batches need not wait for all of them."""

OF_A_RUN = (
    schema.alert_calls,
    schema.alerts,
    schema.mirrored,
    schema.series,
    schema.producers,
    schema.attempts,
    schema.clock,
    schema.changes,
    schema.ledger_groups,
    schema.ledger_archive,
    schema.ledger_counts,
    schema.traces,
)
"""Tables whose rows belong to a run."""


@dataclass(frozen=True, slots=True)
class Writing:
    """A transaction under way."""

    transaction: Transaction
    writer: str
    ahead_s: float
    """How much the store's clock is ahead of this process'."""
    connection: Connection
    runs: dict[str, Run]

    def run(self, name: str, *, now_s: float) -> Run:
        """A run by its name, made when it is new."""
        found = self.runs.get(name)
        if found is None:
            with ids(self.connection) as connection:
                found = self.runs[name] = run_of(connection, name, now_s=now_s)
        return found

    @contextmanager
    def ids(self, run: Run, *, refresh: bool = False) -> Iterator[Connection]:
        """Where ids of a run are made. With `refresh`, nobody else makes series meanwhile, and
        those of others are known.
        """
        with ids(self.connection) as connection:
            if refresh and connection.dialect.name != "sqlite":
                runs = schema.runs
                this = select(runs.c.id).where(runs.c.id == run.id).with_for_update()
                if connection.scalar(this) is None:
                    raise RunGone(f"run {run.name} was deleted")
                read_series(connection, run)
            yield connection


class Store:
    """The database, for one writer. `engine` is for readers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        options: dict[str, Any] = dict(schema.WRITER)
        if engine.dialect.name != "sqlite":
            options["isolation_level"] = "READ COMMITTED"
        self._writer = engine.execution_options(**options)
        self._runs: dict[str, Run] = {}
        self._name = uuid.uuid4().hex
        self._rolls = -1
        self._all_marks_known = False

    @classmethod
    def open(cls, database: str, *, password: str | None = None) -> "Store":
        """Open an SQLAlchemy URL, creating the tables where there are none.

        Raises UserError when it cannot be reached or written, or holds tables of another version.
        """
        store = cls(schema.make_engine(database, password=password))
        try:
            store._create()
        except SQLAlchemyError as error:
            store.close()
            cause = getattr(error, "orig", None) or error
            raise UserError(f"aggregator.database: cannot be opened: {cause}") from error
        except UserError:
            store.close()
            raise
        return store

    def _create(self) -> None:
        with self._writer.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(CREATING)))
            schema.metadata.create_all(connection)
            meta = schema.meta
            found = connection.scalar(select(meta.c.value).where(meta.c.key == "schema"))
            if found is None:
                connection.execute(insert(meta).values(key="schema", value=schema.SCHEMA_VERSION))
                connection.execute(insert(meta).values(key="probe", value="0"))
                counters = [{"name": name, "value": 0} for name in COUNTERS]
                insert_new(connection, schema.counters, counters)
            elif found != schema.SCHEMA_VERSION:
                raise UserError(
                    f"aggregator.database: holds tables of version {found}, this release writes "
                    f"version {schema.SCHEMA_VERSION}; name another database"
                )

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()

    def probe(self) -> None:
        """Write and commit one row. Raises SQLAlchemyError when the store cannot be written."""
        meta = schema.meta
        with self._writer.begin() as connection:
            current = connection.scalar(select(meta.c.value).where(meta.c.key == "probe"))
            following = str((int(current or 0) + 1) % 1_000_000)
            connection.execute(update(meta).where(meta.c.key == "probe").values(value=following))

    @contextmanager
    def write(self) -> Iterator[Writing]:
        """A transaction, committed when the block ends and rolled back when it raises."""
        try:
            with self._writer.begin() as connection:
                ahead_s = 0.0
                if connection.dialect.name == "postgresql":
                    connection.execute(select(func.pg_advisory_xact_lock_shared(ROLLING)))
                    ahead_s = _ahead_s(connection)
                    self._notice_rolls(connection)
                yield Writing(Transaction(connection), self._name, ahead_s, connection, self._runs)
        except BaseException:
            self._forget()
            raise

    @contextmanager
    def rolling(self) -> Iterator[Connection | None]:
        """A transaction in which nobody else writes or rolls up; None when somebody else rolls up
        at this moment.
        """
        with self._writer.begin() as connection:
            if connection.dialect.name == "postgresql":
                if not connection.scalar(select(func.pg_try_advisory_xact_lock(ROLLER))):
                    yield None
                    return
                connection.execute(select(func.pg_advisory_xact_lock(ROLLING)))
                rise(connection, "rolls")
            yield connection

    def take_marked(self) -> set[Lane]:
        """Lanes in which blocks have become stale since the last call; at first, and after a
        failure, all that have more than the newest one.
        """
        marked: set[Lane] = set()
        if not self._all_marks_known:
            table = schema.stale
            lane = (table.c.series_id, table.c.lane)
            with self._writer.begin() as connection:
                rows = connection.execute(select(*lane).group_by(*lane).having(func.count() > 1))
                marked = {(series_id, number) for series_id, number in rows}
            self._all_marks_known = True
        for run in self._runs.values():
            marked |= run.marked
            run.marked.clear()
        return marked

    def rolled(self, blocks: Iterable[Block]) -> None:
        """Forget that blocks are listed as stale: they are not any more."""
        for block in blocks:
            for run in self._runs.values():
                run.stale.discard(block)

    def _notice_rolls(self, connection: Connection) -> None:
        """Forget which blocks are listed as stale when somebody has rolled up meanwhile."""
        table = schema.counters
        rolls = connection.scalar(select(table.c.value).where(table.c.name == "rolls")) or 0
        if rolls != self._rolls:
            self._rolls = rolls
            for run in self._runs.values():
                run.stale.clear()

    def _forget(self) -> None:
        # Whether a commit that failed half-way has written rows is not known: as another writer,
        # none of them is ever written again.
        self._runs.clear()
        self._all_marks_known = False
        self._name = uuid.uuid4().hex

    def delete_run(self, name: str) -> bool:
        """Delete a run; False when there is none. Its history is gone at once, the rows of it go
        with clean_up().
        """
        self._runs.pop(name, None)
        with self._writer.begin() as connection:
            runs = schema.runs
            run_id = connection.scalar(
                select(runs.c.id).where(runs.c.name == name).with_for_update()
            )
            if run_id is None:
                return False
            producers = select(schema.producers.c.id).where(schema.producers.c.run_id == run_id)
            boots = select(schema.boots.c.id).where(schema.boots.c.producer_id.in_(producers))
            connection.execute(
                insert(schema.doomed).from_select(
                    ["series_id"],
                    select(schema.series.c.id).where(schema.series.c.run_id == run_id),
                )
            )
            for table, column, found in (
                (schema.batches, schema.batches.c.boot, boots),
                (schema.boots, schema.boots.c.producer_id, producers),
                (schema.sources, schema.sources.c.producer_id, producers),
            ):
                connection.execute(delete(table).where(column.in_(found)))
            for table in OF_A_RUN:
                connection.execute(delete(table).where(table.c.run_id == run_id))
            connection.execute(delete(schema.recipes).where(schema.recipes.c.run_name == name))
            connection.execute(delete(runs).where(runs.c.id == run_id))
            return True

    def checkpoint(self) -> None:
        """Copy SQLite's write-ahead log into the database, beside the writer: it need not wait.
        PostgreSQL does so by itself.
        """
        if self.engine.dialect.name == "sqlite":
            with self.engine.connect() as connection:
                driver: Any = connection.connection.driver_connection
                driver.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def clean_up(self) -> bool:
        """Delete some rows of a run that was deleted; True when there may be more."""
        doomed, partials = schema.doomed, schema.partials
        with self._writer.begin() as connection:
            series_id = connection.scalar(select(func.min(doomed.c.series_id)))
            if series_id is None:
                return False
            of_series = partials.c.series_id == series_id
            cut = connection.execute(
                select(partials.c.attempt, partials.c.step)
                .where(of_series)
                .order_by(partials.c.attempt, partials.c.step)
                .offset(DELETED_AT_ONCE)
                .limit(1)
            ).first()
            if cut is not None:
                before = (partials.c.attempt < cut.attempt) | (
                    (partials.c.attempt == cut.attempt) & (partials.c.step <= cut.step)
                )
                connection.execute(delete(partials).where(of_series, before))
                return True
            for table in (partials, schema.rollups, schema.stale, doomed):
                connection.execute(delete(table).where(table.c.series_id == series_id))
            return True


def _ahead_s(connection: Connection) -> float:
    """How much the database's clock is ahead of this process'; 0 where it cannot be told."""
    asked_s = time.time()
    answer = connection.scalar(select(func.extract("epoch", func.clock_timestamp())))
    answered_s = time.time()
    ahead_s = float(answer or 0.0) - (asked_s + answered_s) / 2
    return ahead_s if abs(ahead_s) > (answered_s - asked_s) / 2 else 0.0
