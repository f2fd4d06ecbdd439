"""Looking at processes in tests: what runs, what is gone."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PATIENCE_S = 30.0
"""How long a test waits for what must happen."""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids_in(path: Path) -> list[int]:
    """Process ids written to a file, one a line."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; fail when it does not come to hold."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


async def until(condition: Callable[[], bool]) -> None:
    """The same in an event loop."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - about other processes
            await asyncio.sleep(0.02)
