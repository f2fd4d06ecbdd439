"""INSERT … ON CONFLICT: SQLite and PostgreSQL spell it alike, SQLAlchemy does not."""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from sqlalchemy import Connection, Table, case
from sqlalchemy.dialects import postgresql, sqlite

ROWS_AT_ONCE = (512, 64, 8, 1)
"""Of one statement; SQLite takes 32,766 variables, and a row has up to 20."""

Widen = Literal["min", "max"]


def insert_new(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows; those that are there already stay as they are."""
    if rows:
        statement = _insert(connection.dialect.name)(table).on_conflict_do_nothing()
        connection.execute(statement, list(rows))


def widen(
    connection: Connection,
    table: Table,
    rows: Sequence[dict[str, Any]],
    *,
    ranges: dict[str, Widen],
) -> None:
    """Insert rows; of those that are there, widen the columns of `ranges`."""
    if not rows:
        return
    statement = _insert(connection.dialect.name)(table)
    new, now = statement.excluded, table.c
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=list(table.primary_key.columns),
            set_={
                name: case(
                    (new[name] < now[name] if end == "min" else new[name] > now[name], new[name]),
                    else_=now[name],
                )
                for name, end in ranges.items()
            },
        ),
        list(rows),
    )


def add_up(
    connection: Connection, table: Table, rows: Sequence[dict[str, Any]], *, column: str
) -> None:
    """Insert rows; to those that are there, add the column."""
    if rows:
        statement = _insert(connection.dialect.name)(table)
        total = table.c[column] + statement.excluded[column]
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=list(table.primary_key.columns), set_={column: total}
            ),
            list(rows),
        )


def replace(
    connection: Connection, table: Table, rows: Sequence[Sequence[Any]], *, names: Sequence[str]
) -> None:
    """Insert rows of the primary key and the columns `names`, or put these in the place of those
    that are there.

    Many rows a statement, and the driver's own execute: SQLAlchemy's handling of each value costs
    more than the insert, and the driver gives the interpreter to other threads once a statement.
    """
    start = 0
    for size in ROWS_AT_ONCE:
        sql = _replace(table, tuple(names), size, connection.dialect.paramstyle)
        while len(rows) - start >= size:
            chunk = rows[start : start + size]
            connection.exec_driver_sql(sql, tuple(itertools.chain.from_iterable(chunk)))
            start += size


@cache
def _replace(table: Table, names: tuple[str, ...], num_rows: int, paramstyle: str) -> str:
    placeholder = "?" if paramstyle == "qmark" else "%s"
    keys = [f'"{column.name}"' for column in table.primary_key.columns]
    others = [f'"{name}"' for name in names]
    columns = [*keys, *others]
    row = f"({', '.join([placeholder] * len(columns))})"
    return (
        f"INSERT INTO {table.name} ({', '.join(columns)}) "
        f"VALUES {', '.join([row] * num_rows)} "
        f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET "
        + ", ".join(f"{name} = excluded.{name}" for name in others)
    )


def _insert(dialect: str) -> Any:
    return sqlite.insert if dialect == "sqlite" else postgresql.insert
