"""The tables, and the engine that they live in: the only place that knows SQLite from PostgreSQL.

A fine row is one partial of one (series, attempt, step, source, 10 s of wall time); a series is one
key of one run, a source one producer as one writer took it, so that no row ever has two writers.
Roll-ups are pure functions of the fine rows that they cover; what they do not cover (yet) is listed
as stale. Numbers are columns, so that a query which asks for no percentile never decodes a
histogram. All times are seconds since 1970 by the aggregator's clock.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Engine,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import QueuePool

from services.common.errors import UserError

SCHEMA_VERSION = "5"
"""Rises with every change of the tables; a database of another version is refused."""

BUCKET_S = 10
"""Wall time of one fine row."""

STEP_LEVELS = (8, 64, 512, 4096)
"""Steps of a roll-up."""

TIME_LEVELS = (6, 30, 360)
"""Buckets of a roll-up by time: 1 min, 5 min, 1 h."""

STEP_BLOCK, TIME_BLOCK = 64, 30
"""What is rolled up at once, and listed as stale until it is."""

TIME_LANE = -1
"""Roll-ups and stale blocks of all attempts by time; those by step have the attempt's number."""

POOLED = 0
"""The source of a roll-up over all sources."""

SQLITE_BUSY_S = 5.0
"""How long a write waits for another process that holds the file."""

SQLITE_PAGE_BYTES = 2048
"""A commit writes a page for each series that it touches: small ones write less."""

SQLITE_CACHE_KIB = 65_536
"""Pages kept in memory by each connection."""

SQLITE_LOG_PAGES = 262_144
"""Pages in the write-ahead log (512 MiB) from which a commit copies them itself; long before, the
maintenance does, beside the writer.
"""

WRITER = {"headrace_writer": True}
"""Execution options of the one connection that writes."""

metadata = MetaData()

meta = Table(
    "meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False)
)

counters = Table(
    "counters",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""`revision` rises with every commit of data; up to `pruned`, changes are no longer listed; `rolls`
tells writers that somebody has rolled up.
"""

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

sources = Table(
    "sources",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("producer_id", ForeignKey("producers.id"), nullable=False),
    Column("writer", Text, nullable=False),
    UniqueConstraint("producer_id", "writer"),
)
"""A writer is one start of one aggregator: what it has not written itself, it never reads."""

boots = Table(
    "boots",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("producer_id", ForeignKey("producers.id"), nullable=False),
    Column("boot_id", Text, nullable=False),
    # All sequences up to this one have come; those above it that have come are in `batches`.
    Column("floor", BigInteger, nullable=False),
    Column("highest", BigInteger, nullable=False),
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
    # A deleted series' rows may still be there: its id must not come again.
    sqlite_autoincrement=True,
)


def _partial_columns() -> list[Column[Any]]:
    """What holds a partial."""
    return [
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
    ]


partials = Table(
    "partials",
    metadata,
    Column("series_id", Integer, primary_key=True, autoincrement=False),
    Column("attempt", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("source_id", Integer, primary_key=True, autoincrement=False),
    Column("bucket", BigInteger, primary_key=True, autoincrement=False),
    *_partial_columns(),
    sqlite_with_rowid=False,
)

rollups = Table(
    "rollups",
    metadata,
    Column("series_id", Integer, primary_key=True, autoincrement=False),
    Column("lane", BigInteger, primary_key=True, autoincrement=False),
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("source_id", Integer, primary_key=True, autoincrement=False),
    # The first step, or bucket, that it covers.
    Column("begin", BigInteger, primary_key=True, autoincrement=False),
    *_partial_columns(),
    # The envelope: extremes of the sum, mean or ratio of its steps, or buckets.
    Column("low", Double),
    Column("high", Double),
    sqlite_with_rowid=False,
)

stale = Table(
    "stale",
    metadata,
    Column("series_id", Integer, primary_key=True, autoincrement=False),
    Column("lane", BigInteger, primary_key=True, autoincrement=False),
    Column("block", BigInteger, primary_key=True, autoincrement=False),
    sqlite_with_rowid=False,
)
"""Blocks whose roll-ups do not hold all of their fine rows. The newest of a lane always is one."""

doomed = Table(
    "doomed",
    metadata,
    Column("series_id", Integer, primary_key=True, autoincrement=False),
)
"""Series of deleted runs whose rows are still there."""

clock = Table(
    "clock",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("attempt", BigInteger, primary_key=True, autoincrement=False),
    Column("bucket", BigInteger, primary_key=True, autoincrement=False),
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
"""The steps of the fine rows of a bucket: how rows are found by time."""

changes = Table(
    "changes",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("revision", BigInteger, primary_key=True, autoincrement=False),
    Column("at_s", Double, nullable=False),
    # JSON: [[attempt, block, [series_id, ...]], ...].
    Column("blocks", Text, nullable=False),
    sqlite_with_rowid=False,
)
"""What the commits of the last minutes have touched: live updates go on from any of them."""

GIVEN_UP_ONLY = text("state = 9")
"""An index of few rows serves only queries that say so themselves."""

ledger_groups = Table(
    "ledger_groups",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("group_id", Text, nullable=False),
    Column("row_index", BigInteger, nullable=False),
    # The highest that was said, with its reason; the step that trained it.
    Column("state", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("step", BigInteger),
    # When it was first heard of, and when it was said to have ended; null: in flight.
    Column("first_s", Double, nullable=False),
    Column("finished_s", Double),
    # JSON, as said.py writes it.
    Column("history", Text, nullable=False),
    UniqueConstraint("run_id", "group_id"),
    Index("ledger_groups_by_age", "run_id", "finished_s", "first_s"),
    Index("ledger_groups_by_row", "run_id", "row_index"),
    Index("ledger_groups_by_step", "run_id", "step"),
    Index(
        "ledger_groups_given_up",
        "run_id",
        sqlite_where=GIVEN_UP_ONLY,
        postgresql_where=GIVEN_UP_ONLY,
    ),
)
"""Groups in flight, and those that finished last: with all that was said of them."""

ledger_archive = Table(
    "ledger_archive",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("attempt", BigInteger, primary_key=True, autoincrement=False),
    Column("block", BigInteger, primary_key=True, autoincrement=False),
    Column("num_groups", Integer, nullable=False),
    Column("num_given_up", Integer, nullable=False),
    # Of the optimizer steps that trained them.
    Column("first_step", BigInteger),
    Column("last_step", BigInteger),
    # As archive.py packs them.
    Column("groups", LargeBinary, nullable=False),
)
"""The groups before those, in a few bytes each: the done set."""

ledger_counts = Table(
    "ledger_counts",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("evaluation", Boolean, primary_key=True, autoincrement=False),
    Column("state", Integer, primary_key=True, autoincrement=False),
    Column("reason", Text, primary_key=True),
    Column("num_groups", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
"""Groups by state, archived or not; by reason those dropped and given up. Written with what they
count, in one transaction.
"""


FIRING_ONLY = text("ended_s IS NULL")

alerts = Table(
    "alerts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("severity", Text, nullable=False),
    Column("sentence", Text, nullable=False),
    # What was compared, and the step that was open.
    Column("value", Double),
    Column("step", BigInteger, nullable=False),
    Column("fired_s", Double, nullable=False),
    # Null: it is firing.
    Column("ended_s", Double),
    Column("ended_because", Text),
    # One alert of a name fires at a time, whoever else watches the run.
    Index(
        "alerts_firing",
        "run_id",
        "name",
        unique=True,
        sqlite_where=FIRING_ONLY,
        postgresql_where=FIRING_ONLY,
    ),
    sqlite_autoincrement=True,
)

alert_calls = Table(
    "alert_calls",
    metadata,
    Column("alert_id", ForeignKey("alerts.id"), primary_key=True),
    # fired or ended.
    Column("event", Text, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    # pending, sent or failed.
    Column("state", Text, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("next_s", Double, nullable=False),
    Column("error", Text),
    Index("alert_calls_by_state", "run_id", "state"),
)
"""What a webhook is to be told, or was."""

mirrored = Table(
    "mirrored",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("mirror", Text, primary_key=True),
    # The latest that is taken account of, and that with which steps went back last.
    Column("attempt", BigInteger, nullable=False),
    Column("began", BigInteger, nullable=False),
    # The next step that it gets.
    Column("step", BigInteger, nullable=False),
)
"""How far each mirror has come."""


traces = Table(
    "traces",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("rollout_id", Text, nullable=False),
    Column("group_id", Text, nullable=False),
    Column("row_index", BigInteger, nullable=False),
    # The oldest policy version of its group.
    Column("version", BigInteger, nullable=False),
    Column("end_reason", Integer, nullable=False),
    Column("at_s", Double, nullable=False),
    # Of what follows.
    Column("num_bytes", BigInteger, nullable=False),
    # JSON, as traces.py writes it.
    Column("summary", Text, nullable=False),
    # The message, deflated.
    Column("body", LargeBinary, nullable=False),
    UniqueConstraint("run_id", "rollout_id"),
    Index("traces_by_age", "run_id", "id", "num_bytes"),
    Index("traces_by_version", "run_id", "version"),
    sqlite_autoincrement=True,
)
"""Conversations that are shown: the newest of each run."""


recipes = Table(
    "recipes",
    metadata,
    Column("id", Integer, primary_key=True),
    # Not an id: an aggregator says its recipe before anything is heard of the run.
    Column("run_name", Text, nullable=False),
    Column("since_s", Double, nullable=False),
    # JSON, as recipes.py writes it.
    Column("content", Text, nullable=False),
    Index("recipes_by_run", "run_name", "since_s"),
)
"""What runs were started with, without secrets."""


def make_engine(database: str, *, password: str | None = None) -> Engine:
    """The engine of an SQLAlchemy URL, with its user's password where the URL has none. Raises
    UserError for one that cannot be used. Its errors hide what was to be written: traces are users'
    data, and errors are logged."""
    try:
        url = make_url(database)
        if password is not None:
            url = url.set(password=password)
        if url.get_backend_name() != "sqlite":
            return create_engine(
                url,
                pool_pre_ping=True,
                isolation_level="REPEATABLE READ",
                hide_parameters=True,
            )
        if url.database in (None, "", ":memory:"):
            raise UserError(
                "aggregator.database: SQLite in memory keeps nothing; name a file: sqlite:///PATH"
            )
        engine = create_engine(
            url,
            poolclass=QueuePool,
            connect_args={"timeout": SQLITE_BUSY_S, "check_same_thread": False},
            hide_parameters=True,
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
    for pragma in (
        f"page_size = {SQLITE_PAGE_BYTES}",
        "journal_mode = WAL",
        "synchronous = FULL",
        f"cache_size = -{SQLITE_CACHE_KIB}",
        f"wal_autocheckpoint = {SQLITE_LOG_PAGES}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Any) -> None:
    writes = connection.get_execution_options().get("headrace_writer", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
