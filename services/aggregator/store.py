"""The store's writing side: one writer, one transaction per batch, nothing half-committed.

All calls come from one thread. What is remembered of a run mirrors its committed rows: a
transaction that fails forgets it, and the next one reads it again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import schema
from services.aggregator.transaction import Run, Transaction
from services.common.errors import UserError


class Store:
    """The database, for its one writer. `engine` is for readers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writer = engine.execution_options(**schema.WRITER)
        self._runs: dict[str, Run] = {}

    @classmethod
    def open(cls, database: str) -> "Store":
        """Open an SQLAlchemy URL, creating the tables where there are none.

        Raises UserError when it cannot be reached or written, or holds tables of another version.
        """
        store = cls(schema.make_engine(database))
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
            schema.metadata.create_all(connection)
            meta = schema.meta
            found = connection.scalar(select(meta.c.value).where(meta.c.key == "schema"))
            if found is None:
                connection.execute(insert(meta).values(key="schema", value=schema.SCHEMA_VERSION))
                connection.execute(insert(meta).values(key="probe", value="0"))
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
    def write(self) -> Iterator["Transaction"]:
        """A transaction, committed when the block ends and rolled back when it raises."""
        try:
            with self._writer.begin() as connection:
                yield Transaction(connection, self._runs)
        except BaseException:
            self._runs.clear()
            raise

    def delete_run(self, name: str) -> bool:
        """Delete all that is known of a run; False when there is none."""
        self._runs.pop(name, None)
        with self._writer.begin() as connection:
            run_id = connection.scalar(select(schema.runs.c.id).where(schema.runs.c.name == name))
            if run_id is None:
                return False
            series = select(schema.series.c.id).where(schema.series.c.run_id == run_id)
            producers = select(schema.producers.c.id).where(schema.producers.c.run_id == run_id)
            boots = select(schema.boots.c.id).where(schema.boots.c.producer_id.in_(producers))
            for table, column, ids in (
                (schema.partials, schema.partials.c.series_id, series),
                (schema.heads, schema.heads.c.series_id, series),
                (schema.batches, schema.batches.c.boot, boots),
                (schema.boots, schema.boots.c.producer_id, producers),
            ):
                connection.execute(delete(table).where(column.in_(ids)))
            for table in (schema.series, schema.producers, schema.attempts, schema.group_events):
                connection.execute(delete(table).where(table.c.run_id == run_id))
            connection.execute(delete(schema.runs).where(schema.runs.c.id == run_id))
            return True
