"""How long runs are kept, and the sweep that deletes those whose time has passed.

A run is kept for `runs.keep_s` seconds after it was last heard of; where it says nothing, for as
long as the aggregator keeps runs. For ever is infinity, which both databases store as it is.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import structlog
from sqlalchemy import Connection, select, update
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import schema
from services.aggregator.store import Store

DAY_S = 86_400.0

FOREVER_S = math.inf

SWEEP_EVERY_S = 300.0
"""Also before the first sweep: after an absence of the aggregator, runs that go on are heard of
before anything is deleted.
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of how long a run is kept."""

    name: str
    last_s: float
    """When it was last heard of, in seconds since 1970."""
    keep_s: float | None
    """Its own time; None: the aggregator's."""

    def until_s(self, *, default_s: float) -> float:
        """Up to when it is kept at least; infinity for ever.

        Example: last heard of at 1,000 s and kept for 60 s, it may be deleted after 1,060 s.
        """
        return self.last_s + (default_s if self.keep_s is None else self.keep_s)


def days_to_s(days: float | None) -> float:
    """Seconds of a number of days; None is for ever."""
    return FOREVER_S if days is None else days * DAY_S


def kept_runs(connection: Connection) -> dict[str, Kept]:
    """Every run, by name."""
    runs = schema.runs
    rows = connection.execute(select(runs.c.name, runs.c.last_s, runs.c.keep_s))
    return {row.name: Kept(row.name, row.last_s, row.keep_s) for row in rows}


def expired(runs: Iterable[Kept], *, now_s: float, default_s: float) -> list[str]:
    """Names of the runs whose time has passed, the one heard of longest ago first."""
    due = [run for run in runs if run.until_s(default_s=default_s) < now_s]
    return [run.name for run in sorted(due, key=lambda run: (run.last_s, run.name))]


def set_keep(store: Store, name: str, *, keep_s: float | None) -> bool:
    """Keep a run for so long, or (None) for as long as the aggregator does; False when there is no
    such run. Blocking, for the writer's thread.
    """
    with store.write() as writing:
        changed = writing.connection.execute(
            update(schema.runs).where(schema.runs.c.name == name).values(keep_s=keep_s)
        )
        return changed.rowcount > 0


def delete_if_expired(store: Store, name: str, *, now_s: float, default_s: float) -> Kept | None:
    """Delete a run if its time has passed; what was known of it when it was deleted. Blocking, for
    the writer's thread: what it took in until now is seen.
    """
    with store.engine.begin() as connection:
        run = kept_runs(connection).get(name)
    if run is None or not expired([run], now_s=now_s, default_s=default_s):
        return None
    return run if store.delete_run(name) else None


Write = Callable[[Callable[[], Kept | None]], Awaitable[Kept | None]]
"""Runs work in the writer's thread."""


async def sweep(
    store: Store, *, write: Write, default_s: float, clock: Callable[[], float] = time.time
) -> list[str]:
    """Delete every run whose time has passed, and return their names.

    Each is a piece of work of its own for the writer, so that batches are taken in between; and
    each is looked at once more there, since a batch may have come meanwhile.
    """

    def due() -> list[str]:
        with store.engine.begin() as connection:
            found = kept_runs(connection).values()
        return expired(found, now_s=clock(), default_s=default_s)

    deleted = []
    for name in await asyncio.to_thread(due):
        gone = await write(
            partial(delete_if_expired, store, name, now_s=clock(), default_s=default_s)
        )
        if gone is not None:
            structlog.get_logger().info(
                "a run was deleted: its time has passed",
                run=name,
                last_seen=datetime.fromtimestamp(gone.last_s, UTC).isoformat(timespec="seconds"),
                kept_days=round((gone.until_s(default_s=default_s) - gone.last_s) / DAY_S, 3),
            )
            deleted.append(name)
    return deleted


async def keep_sweeping(store: Store, *, write: Write, default_s: float, every_s: float) -> None:
    """Sweep again and again, until cancelled. A store that fails is tried again the next time.

    waits_for: its interval. unblocked_by: nothing else; no one waits for it.
    """
    while True:
        await asyncio.sleep(every_s)
        try:
            await sweep(store, write=write, default_s=default_s)
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            structlog.get_logger().error("runs could not be swept", cause=str(cause))
