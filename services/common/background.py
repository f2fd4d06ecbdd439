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


async def unless(
    event: asyncio.Event, body: Coroutine[Any, Any, T], *, grace_s: float = 0.0
) -> T | None:
    """The result of `body`; or None, and `body` is cancelled, once `event` has been set for
    `grace_s`."""
    work, signal = asyncio.create_task(body), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({work, signal}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and grace_s:
            await asyncio.wait({work}, timeout=grace_s)
        return work.result() if work.done() else None
    finally:
        await cancel(work, signal)


async def within(timeout_s: float, body: Coroutine[Any, Any, T]) -> T | None:
    """The result of `body`; or None, and `body` is cancelled, once it has taken `timeout_s`.

    asyncio.timeout() cancels once, and redis-py swallows what comes within a command.
    """
    work = asyncio.create_task(body)
    try:
        await asyncio.wait({work}, timeout=timeout_s)
        return work.result() if work.done() else None
    finally:
        await cancel(work)


class Strays:
    """Coroutines of users, awaited for a limited time even where they do not let themselves be
    cancelled; those cut off and still running are kept from the garbage collector.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def outcome(
        self, body: Coroutine[Any, Any, T], *, timeout_s: float
    ) -> "asyncio.Task[T] | None":
        """The task that ran `body` to its end, whichever that is; None when it had none in time.

        Then, and when the caller is cancelled, it has been cancelled and nobody waits for it. A
        SystemExit in it is an exception like any other: raised by a task it would end the service.
        """
        task = asyncio.create_task(_without_exit(body))
        self._running.add(task)
        task.add_done_callback(self._ended)
        # One cancelled before its first step has not begun the body: Python would complain.
        task.add_done_callback(lambda _: body.close())
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
        finally:
            task.cancel()
        return task if done else None

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            # Asked for, so that asyncio does not report as never retrieved what came too late.
            task.exception()


async def _without_exit(body: Coroutine[Any, Any, T]) -> T:
    try:
        return await body
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error.code}") from error
