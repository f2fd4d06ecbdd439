"""The tables, and the engine that they live in: the only place that knows SQLite from PostgreSQL.

A partial is one row per (series, attempt, step, producer, 10 s of wall time); a series is one key
of one run. A batch is named by (boot, sequence), a boot by (producer, boot id). Numbers are
columns, so that a query which asks for no percentile never decodes a histogram. All times are
seconds since 1970 by the aggregator's clock.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Engine,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    make_url,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import QueuePool

from services.common.errors import UserError

SCHEMA_VERSION = "1"
"""Rises with every change of the tables; a database of another version is refused."""

BUCKET_S = 10
"""Wall time of one partial."""

SQLITE_BUSY_S = 5.0
"""How long a write waits for another process that holds the file."""

WRITER = {"headrace_writer": True}
"""Execution options of the one connection that writes."""

metadata = MetaData()

meta = Table(
    "meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False)
)

runs = Table(
    "runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("first_s", Double, nullable=False),
    Column("last_s", Double, nullable=False),
    # How long it is kept after it was last heard of; null: as long as the aggregator keeps runs.
    Column("keep_s", Double),
)

attempts = Table(
    "attempts",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("attempt", BigInteger, primary_key=True, autoincrement=False),
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("first_s", Double, nullable=False),
    Column("last_s", Double, nullable=False),
)

producers = Table(
    "producers",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("service", Text, nullable=False),
    Column("first_s", Double, nullable=False),
    Column("last_s", Double, nullable=False),
    UniqueConstraint("run_id", "name"),
)

boots = Table(
    "boots",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("producer_id", ForeignKey("producers.id"), nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("highest", BigInteger, nullable=False),
    Column("received", BigInteger, nullable=False),
    UniqueConstraint("producer_id", "boot_id"),
)

batches = Table(
    "batches",
    metadata,
    Column("boot", ForeignKey("boots.id"), primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    sqlite_with_rowid=False,
)

series = Table(
    "series",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("key", Text, nullable=False),
    Column("declared", Text, nullable=False),
    Column("instrument", Text, nullable=False),
    UniqueConstraint("run_id", "key"),
)

heads = Table(
    "heads",
    metadata,
    Column("series_id", ForeignKey("series.id"), primary_key=True),
    Column("attempt", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
"""The highest step of each series in each attempt: the latest values without a scan."""

partials = Table(
    "partials",
    metadata,
    Column("series_id", ForeignKey("series.id"), primary_key=True),
    Column("attempt", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("producer_id", ForeignKey("producers.id"), primary_key=True),
    Column("bucket", BigInteger, primary_key=True, autoincrement=False),
    # A sum, or a ratio's numerator, as two doubles; then a ratio's denominator.
    Column("sum_high", Double, nullable=False),
    Column("sum_low", Double, nullable=False),
    Column("denominator_high", Double),
    Column("denominator_low", Double),
    # Of an observation only.
    Column("n", BigInteger),
    Column("minimum", Double),
    Column("maximum", Double),
    Column("last", Double),
    Column("last_at_s", Double),
    Column("num_nan", BigInteger),
    Column("num_pos_inf", BigInteger),
    Column("num_neg_inf", BigInteger),
    Column("histogram", LargeBinary),
    sqlite_with_rowid=False,
)

group_events = Table(
    "group_events",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("group_id", Text, primary_key=True),
    Column("state", Integer, primary_key=True, autoincrement=False),
    Column("row_index", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("step", BigInteger),
    Column("worker", Text, nullable=False),
    Column("at_s", Double, nullable=False),
    sqlite_with_rowid=False,
)


def make_engine(database: str) -> Engine:
    """The engine of an SQLAlchemy URL. Raises UserError for one that cannot be used."""
    try:
        url = make_url(database)
        if url.get_backend_name() != "sqlite":
            return create_engine(url, pool_pre_ping=True)
        if url.database in (None, "", ":memory:"):
            raise UserError(
                "aggregator.database: SQLite in memory keeps nothing; name a file: sqlite:///PATH"
            )
        engine = create_engine(
            url,
            poolclass=QueuePool,
            connect_args={"timeout": SQLITE_BUSY_S, "check_same_thread": False},
        )
    except (ArgumentError, NoSuchModuleError) as error:
        raise UserError(f"aggregator.database: not a database URL: {error}") from None
    except ModuleNotFoundError as error:
        raise UserError(
            f"aggregator.database: the driver of {make_url(database).drivername} is not installed "
            f"({error.name})"
        ) from None
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver's own BEGIN comes only before the first write: what was read before it could change
    # in between.
    connection.isolation_level = None
    cursor = connection.cursor()
    # FULL: a batch that was acknowledged survives the power cut, not only the process.
    for pragma in ("journal_mode = WAL", "synchronous = FULL"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Any) -> None:
    writes = connection.get_execution_options().get("headrace_writer", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
