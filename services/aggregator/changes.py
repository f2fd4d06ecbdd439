"""What has changed since a revision: what live updates are made of.

Every commit of data has a revision, and lists the blocks of 64 steps that it has touched for some
minutes. Who asks for what is older is told that everything has changed.
"""

import json
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, select, update

from services.aggregator import fine, schema
from services.aggregator.schema import STEP_BLOCK
from services.aggregator.series import RunRow, SeriesRow, all_series

KEPT_S = 600.0
"""How long commits are listed."""


@dataclass(frozen=True, slots=True)
class Change:
    """Steps first_step <= step < end_step of one attempt in which something may have changed."""

    series: SeriesRow
    attempt: int
    first_step: int
    end_step: int


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes up to a revision."""

    revision: int
    """The newest that is committed."""
    series: tuple[Change, ...]


def newest_revision(connection: Connection) -> int:
    """Of the last commit of data, of whatever run."""
    names = schema.counters.c
    found: int = connection.scalars(select(names.value).where(names.name == "revision")).one()
    return found


def changed_since(connection: Connection, run: RunRow, revision: int) -> Changes:
    """What commits after a revision have touched of a run; with 0, everything that it has."""
    names = schema.counters.c
    counters = {row.name: row.value for row in connection.execute(select(names.name, names.value))}
    known = {series.id: series for series in all_series(connection, run)}
    if revision <= 0 or revision < counters["pruned"] or revision > counters["revision"]:
        return Changes(counters["revision"], _everything(connection, run, known))
    table = schema.changes
    blocks: set[tuple[int, int, int]] = set()
    for text in connection.scalars(
        select(table.c.blocks).where(table.c.run_id == run.id, table.c.revision > revision)
    ):
        for attempt, block, series in json.loads(text):
            blocks.update((series_id, attempt, block) for series_id in series)
    changes = tuple(
        Change(known[series_id], attempt, block * STEP_BLOCK, (block + 1) * STEP_BLOCK)
        for series_id, attempt, block in sorted(blocks)
        if series_id in known
    )
    return Changes(counters["revision"], changes)


def prune(connection: Connection, *, now_s: float) -> None:
    """Forget commits that are older than KEPT_S."""
    table, counters = schema.changes, schema.counters
    old = table.c.at_s < now_s - KEPT_S
    newest = connection.scalar(select(func.max(table.c.revision)).where(old))
    if newest is None:
        return
    connection.execute(delete(table).where(old))
    connection.execute(
        update(counters)
        .where(counters.c.name == "pruned", counters.c.value < newest)
        .values(value=newest)
    )


def _everything(
    connection: Connection, run: RunRow, known: dict[int, SeriesRow]
) -> tuple[Change, ...]:
    """All steps of the surviving line that a series has."""
    found = []
    for series in known.values():
        for segment in run.line:
            extent = fine.extent_by_step(
                connection, series.id, segment.attempt, segment.first, segment.end
            )
            if extent is not None:
                found.append(Change(series, segment.attempt, extent[0], extent[1] + 1))
    return tuple(found)
