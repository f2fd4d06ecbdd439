"""Fine rows by step and by time, as tuples (position, source, *columns of a partial)."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, func, select

from services.aggregator import schema
from services.aggregator.rows import Row

KEY_COLUMNS = 2
"""Of such a tuple, what is before the partial: its position and its source."""


def by_step(
    connection: Connection,
    series_id: int,
    attempt: int,
    begin: int,
    end: int,
    *,
    names: Sequence[str],
) -> Sequence[Row]:
    """Rows of one attempt's steps begin <= step < end; the position is the step."""
    table = schema.partials
    return fetch(
        connection,
        select(table.c.step, table.c.source_id, *(table.c[name] for name in names)).where(
            table.c.series_id == series_id,
            table.c.attempt == attempt,
            table.c.step >= begin,
            table.c.step < end,
        ),
    )


def by_bucket(
    connection: Connection,
    run_id: int,
    series_id: int,
    begin: int,
    end: int,
    *,
    names: Sequence[str],
    attempt: int | None = None,
) -> Sequence[Row]:
    """Rows of begin <= bucket < end, of one or of all attempts; the position is the bucket."""
    clock, attempts, table = schema.clock, schema.attempts, schema.partials
    # From the run's attempts on: without an attempt, all of the run's clock would be read.
    steps = (
        select(attempts.c.attempt, func.min(clock.c.first_step), func.max(clock.c.last_step))
        .join(clock, _of_attempt(clock, attempts))
        .where(attempts.c.run_id == run_id, clock.c.bucket >= begin, clock.c.bucket < end)
    )
    if attempt is not None:
        steps = steps.where(attempts.c.attempt == attempt)
    rows: list[Row] = []
    for found, first, last in connection.execute(
        steps.group_by(attempts.c.attempt).order_by(attempts.c.attempt)
    ):
        rows.extend(
            fetch(
                connection,
                select(table.c.bucket, table.c.source_id, *(table.c[name] for name in names)).where(
                    table.c.series_id == series_id,
                    table.c.attempt == found,
                    table.c.step >= first,
                    table.c.step <= last,
                    table.c.bucket >= begin,
                    table.c.bucket < end,
                ),
            )
        )
    return rows


def fetch(connection: Connection, statement: Select[Any]) -> Sequence[Row]:
    """The rows of a statement as the driver gives them: SQLAlchemy's own rows cost more than the
    database's work, and our columns of numbers and bytes need no conversion.
    """
    with connection.execute(statement) as result:
        found: Sequence[Row] = result.cursor.fetchall()
    return found


def extent_by_step(
    connection: Connection, series_id: int, attempt: int, begin: int, end: int | None
) -> tuple[int, int] | None:
    """The first and last step of begin <= step < end that have a row."""
    table = schema.partials
    where = [
        table.c.series_id == series_id,
        table.c.attempt == attempt,
        table.c.step >= begin,
        *(() if end is None else (table.c.step < end,)),
    ]
    first = select(func.min(table.c.step)).where(*where).scalar_subquery()
    last = select(func.max(table.c.step)).where(*where).scalar_subquery()
    low, high = connection.execute(select(first, last)).one()
    return None if low is None else (low, high)


def extent_by_bucket(
    connection: Connection, run_id: int, begin: int | None, end: int | None
) -> tuple[int, int] | None:
    """The first and last bucket of begin <= bucket < end in which the run has anything."""
    clock, attempts = schema.clock, schema.attempts
    where = [
        _of_attempt(clock, attempts),
        *(() if begin is None else (clock.c.bucket >= begin,)),
        *(() if end is None else (clock.c.bucket < end,)),
    ]
    # The ends of each attempt are two look-ups; those of the run would be a scan of its clock.
    first, last = (
        select(edge(clock.c.bucket)).where(*where).correlate(attempts).scalar_subquery()
        for edge in (func.min, func.max)
    )
    found = connection.execute(select(first, last).where(attempts.c.run_id == run_id)).all()
    known = [(low, high) for low, high in found if low is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def _of_attempt(clock: Table, attempts: Table) -> ColumnElement[bool]:
    return and_(clock.c.run_id == attempts.c.run_id, clock.c.attempt == attempts.c.attempt)
