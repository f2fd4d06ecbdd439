"""Memory against the queue server's own list of outstanding groups, which rolls back together with
its streams.

    in memory only      lost by the server: its prompt is due again
    on the server only  declared lost and there after all: it counts again, unless its prompt has
                        been dispatched anew; everything else has been settled: out with it

waits_for: a minute, or the server's coming back. unblocked_by: the clock.
"""

import asyncio
import time
from collections.abc import Callable, Set

import structlog

from services.trainer.book import Book
from services.trainer.run_queue import RunQueue

COMPARE_EVERY_S = 60.0
"""How often memory is compared with the server's list."""

LOOK_EVERY_S = 1.0
"""How soon the server's coming back is noticed."""


async def compare_for_ever(
    queue: RunQueue, book: Book, *, on_the_way: Callable[[], Set[str]], step: Callable[[], int]
) -> None:
    """Compare every minute, and each time the server comes back or has lost its data.

    `on_the_way` are groups that are neither lost nor strange: on their way into the server's list,
    or taken from it and not yet settled in memory.
    """
    reconnects, next_s = queue.reconnects, time.monotonic() + COMPARE_EVERY_S
    while True:
        await asyncio.sleep(min(LOOK_EVERY_S, COMPARE_EVERY_S))
        if time.monotonic() < next_s and queue.reconnects == reconnects:
            continue
        reconnects, next_s = queue.reconnects, time.monotonic() + COMPARE_EVERY_S
        before = set(book.outstanding) - on_the_way()
        there = await queue.outstanding()
        lost = before - set(there)
        if lost:
            # One that was replaced, and does not know it yet, misses what the new one settled.
            await queue.check()
        for group_id in lost:
            if group_id in book.outstanding and group_id not in on_the_way():
                structlog.get_logger().warning("group lost by the queue server", group=group_id)
                book.dropped(group_id, "lost")
        strangers = set(there) - set(book.outstanding) - on_the_way()
        unneeded = [group_id for group_id in strangers if not book.found_again(group_id)]
        if unneeded:
            await queue.settle([("", group_id) for group_id in unneeded], step=step())
