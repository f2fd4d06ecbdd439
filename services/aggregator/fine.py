"""Fine rows by step and by time, as tuples (position, source, *columns of a partial)."""

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

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
    return connection.execute(
        select(table.c.step, table.c.source_id, *(table.c[name] for name in names)).where(
            table.c.series_id == series_id,
            table.c.attempt == attempt,
            table.c.step >= begin,
            table.c.step < end,
        )
    ).all()


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
    clock, table = schema.clock, schema.partials
    steps = select(
        clock.c.attempt, func.min(clock.c.first_step), func.max(clock.c.last_step)
    ).where(clock.c.run_id == run_id, clock.c.bucket >= begin, clock.c.bucket < end)
    if attempt is not None:
        steps = steps.where(clock.c.attempt == attempt)
    rows: list[Row] = []
    for found, first, last in connection.execute(
        steps.group_by(clock.c.attempt).order_by(clock.c.attempt)
    ):
        rows.extend(
            connection.execute(
                select(table.c.bucket, table.c.source_id, *(table.c[name] for name in names)).where(
                    table.c.series_id == series_id,
                    table.c.attempt == found,
                    table.c.step >= first,
                    table.c.step <= last,
                    table.c.bucket >= begin,
                    table.c.bucket < end,
                )
            )
        )
    return rows


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
    clock = schema.clock
    statement = select(func.min(clock.c.bucket), func.max(clock.c.bucket)).where(
        clock.c.run_id == run_id
    )
    if begin is not None:
        statement = statement.where(clock.c.bucket >= begin)
    if end is not None:
        statement = statement.where(clock.c.bucket < end)
    low, high = connection.execute(statement).one()
    return None if low is None else (low, high)
