"""Coroutines side by side: one that has an end, those that run beside it, and what cuts it off."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from services.common.lifecycle import cancel

T = TypeVar("T")


async def guarded(body: Coroutine[Any, Any, T], *background: Coroutine[Any, Any, None]) -> T:
    """The result of `body`, while `background` coroutines run beside it, for ever.

    The first failure of any of them ends all and is raised: a body that waits for what a dead
    background task no longer brings would wait for ever.
    """
    tasks = [asyncio.create_task(each) for each in background]
    work = asyncio.create_task(body)
    try:
        await asyncio.wait({work, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        return await work
    finally:
        await cancel(work, *tasks)


async def unless(event: asyncio.Event, body: Coroutine[Any, Any, T]) -> T | None:
    """The result of `body`; or None, and `body` is cancelled, once `event` is set."""
    work, signal = asyncio.create_task(body), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({work, signal}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        await cancel(work, signal)
