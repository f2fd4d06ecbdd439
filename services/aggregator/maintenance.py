"""What the aggregator does between batches: roll-ups, rows of deleted runs, old change lists, old
groups; and, beside them, checkpoints.

waits_for: nothing. unblocked_by: time. Each piece of work is short: batches wait for it.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import ledger
from services.aggregator.changes import prune
from services.aggregator.rollup import Roller
from services.aggregator.store import Store

EVERY_S = 0.5
"""Pause after all is done."""

BUSY_SHARE = 0.02
"""Of the writer's time, while batches wait for it: they come first."""

QUIET_S = 0.1
"""Without a batch that waits for so long, there is none for now."""

AFTER_FAILURE_S = 5.0

ROLLING_S = 0.03
"""Of rolling up at once."""

PRUNE_EVERY_S = 60.0

ARCHIVE_EVERY_S = 10.0
"""Between two looks for groups whose details are too many."""

CHECKPOINT_EVERY_S = 2.0


class Maintenance:
    """The work itself. Calls come from the writer's thread."""

    def __init__(self, store: Store, *, keep_groups: int) -> None:
        self._store = store
        self._keep_groups = keep_groups
        self._roller = Roller(store)
        self._pruned_s = self._archived_s = time.monotonic()

    def work(self) -> bool:
        """Do a little; True when there is more."""
        if time.monotonic() - self._pruned_s >= PRUNE_EVERY_S:
            self._pruned_s = time.monotonic()
            with self._store.rolling() as connection:
                if connection is not None:
                    prune(connection, now_s=time.time())
        more = self._archive()
        more = self._roller.roll(budget_s=ROLLING_S) or more
        return self._store.clean_up() or more

    def _archive(self) -> bool:
        """Archive some groups of a run that has too many in detail; True when there may be more."""
        if time.monotonic() - self._archived_s < ARCHIVE_EVERY_S:
            return False
        with self._store.engine.begin() as reading:
            run_id = ledger.to_prune(reading, keep_groups=self._keep_groups)
        if run_id is None:
            self._archived_s = time.monotonic()
            return False
        with self._store.rolling() as connection:
            if connection is not None:
                ledger.prune(connection, run_id, keep_groups=self._keep_groups)
        return True


async def keep_checkpointing(
    store: Store, *, write: Callable[[Callable[[], Any]], Awaitable[Any]]
) -> None:
    """Copy SQLite's log into the database for ever: most of it in a thread that batches do not wait
    for, then the rest between two batches, since only an empty log starts over. A long log makes
    every look-up slow.
    """
    while True:
        await asyncio.sleep(CHECKPOINT_EVERY_S)
        try:
            await asyncio.to_thread(store.checkpoint)
            await write(store.checkpoint)
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            structlog.get_logger().error("a checkpoint waits for the store", cause=str(cause))


async def keep_working(
    store: Store,
    *,
    write: Callable[[Callable[[], Any]], Awaitable[Any]],
    batches_wait: Callable[[], bool],
    keep_groups: int,
) -> None:
    """Work for ever; a store that fails is tried again. `write` runs in the writer's thread."""
    maintenance = Maintenance(store, keep_groups=keep_groups)
    while True:
        try:
            more, spent_s = await write(partial(_timed, maintenance.work))
            if more and batches_wait():
                await _quiet(batches_wait, at_most_s=spent_s * (1 / BUSY_SHARE - 1))
            pause_s = 0.0 if more else EVERY_S
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            structlog.get_logger().error("roll-ups wait for the store", cause=str(cause))
            pause_s = AFTER_FAILURE_S * random.uniform(0.5, 1.5)
        await asyncio.sleep(pause_s)


async def _quiet(batches_wait: Callable[[], bool], *, at_most_s: float) -> None:
    """Wait until no batch has waited for a while."""
    give_up_s = time.monotonic() + at_most_s
    quiet_since_s = None
    while (now_s := time.monotonic()) < give_up_s:
        if batches_wait():
            quiet_since_s = None
        elif quiet_since_s is None:
            quiet_since_s = now_s
        if quiet_since_s is not None and now_s - quiet_since_s >= QUIET_S:
            return
        await asyncio.sleep(QUIET_S / 5)


def _timed(work: Callable[[], bool]) -> tuple[bool, float]:
    begun_s = time.monotonic()
    return work(), time.monotonic() - begun_s
