"""Waiting, in tests, for what another process or a server does."""

import asyncio
from collections.abc import Awaitable, Callable

PATIENCE_S = 60.0
"""Far above what anything here takes: a test that reaches it has failed."""


async def until(condition: Callable[[], object]) -> None:
    """Return once `condition()` is true; TimeoutError after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - no event to wait for: it is another process
            await asyncio.sleep(0.01)


def always(version: int) -> Callable[[], Awaitable[int]]:
    """What a generator tells that serves this version."""

    async def served() -> int:
        return version

    return served
