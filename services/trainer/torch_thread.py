"""The one thread that torch runs on, as the event loop sees it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class TorchThread:
    """Awaits functions that run on the thread, one after another."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor

    async def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result."""
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: function(*arguments)
        )
