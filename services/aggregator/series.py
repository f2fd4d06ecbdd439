"""A run and its series, as readers find them."""

from dataclasses import dataclass

from sqlalchemy import Connection, select

from services.aggregator import schema
from services.aggregator.lines import Segment, surviving
from services.aggregator.reduce import Instrument


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run, as its readers need it."""

    id: int
    name: str
    first_s: float
    last_s: float
    line: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class SeriesRow:
    """One key of one run."""

    id: int
    key: str
    instrument: Instrument


def find_run(connection: Connection, name: str) -> RunRow | None:
    """A run by its name."""
    runs, attempts = schema.runs, schema.attempts
    row = connection.execute(select(runs).where(runs.c.name == name)).first()
    if row is None:
        return None
    begun = connection.execute(
        select(attempts.c.attempt, attempts.c.first_step).where(attempts.c.run_id == row.id)
    )
    line = surviving({each.attempt: each.first_step for each in begun})
    return RunRow(row.id, row.name, row.first_s, row.last_s, line)


def find_series(connection: Connection, run: RunRow, key: str) -> SeriesRow | None:
    """A series by its key."""
    table = schema.series
    row = connection.execute(
        select(table.c.id, table.c.key, table.c.instrument)
        .where(table.c.run_id == run.id)
        .where(table.c.key == key)
    ).first()
    return None if row is None else SeriesRow(*row)


def all_series(connection: Connection, run: RunRow) -> list[SeriesRow]:
    """All that a run has, by key."""
    table = schema.series
    rows = connection.execute(
        select(table.c.id, table.c.key, table.c.instrument)
        .where(table.c.run_id == run.id)
        .order_by(table.c.key)
    )
    return [SeriesRow(*row) for row in rows]
