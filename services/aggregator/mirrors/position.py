"""How far a mirror has come, and where it has to go back to."""

from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select

from services.aggregator import schema
from services.aggregator.lines import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """What a mirror gets next."""

    attempt: int
    """The latest one that is taken account of."""
    began: int
    """The attempt with which steps went back last, or the first one."""
    step: int
    """All before it were written."""


def following(position: Position | None, line: tuple[Segment, ...]) -> Position | None:
    """Where to go on with a line: back to the first step of attempts that are new, where that was
    written already. None without an attempt.

    Example: all up to 49 was written of attempt 1. Attempt 2 begins at 40: go on with 40, as
    another run. Had it begun at 50, there would be nothing to go back for.
    """
    attempts = [segment for segment in line if segment.attempt > 0]
    if not attempts:
        return None
    latest = max(segment.attempt for segment in attempts)
    if position is None:
        return Position(attempt=latest, began=latest, step=min(each.first for each in attempts))
    begin = min(
        (each.first for each in attempts if each.attempt > position.attempt), default=position.step
    )
    if begin >= position.step:
        return Position(attempt=latest, began=position.began, step=position.step)
    return Position(attempt=latest, began=latest, step=begin)


def read(connection: Connection, run_id: int, mirror: str) -> Position | None:
    """Where a mirror is; None before it got anything."""
    table = schema.mirrored
    row = connection.execute(
        select(table).where(table.c.run_id == run_id, table.c.mirror == mirror)
    ).first()
    if row is None:
        return None
    return Position(attempt=row.attempt, began=row.began, step=row.step)


def keep(connection: Connection, run_id: int, mirror: str, position: Position) -> None:
    """Note where a mirror is."""
    table = schema.mirrored
    connection.execute(delete(table).where(table.c.run_id == run_id, table.c.mirror == mirror))
    connection.execute(
        insert(table).values(
            run_id=run_id,
            mirror=mirror,
            attempt=position.attempt,
            began=position.began,
            step=position.step,
        )
    )
