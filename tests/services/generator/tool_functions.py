"""Functions that tests give to the model as tools: well-behaved and not."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

STORED: dict[str, str] = {}


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        The sum.
    """
    return a + b


def nothing() -> None:
    """Return nothing."""


def table() -> dict[str, Any]:
    """Return an object."""
    return {"é": [1, 2.5, None]}


def raw() -> bytes:
    """Return bytes."""
    return b"a\xff"


def raises(why: str) -> str:
    """Raise.

    Args:
        why: The message.
    """
    raise KeyError(why)


def raises_at_length() -> str:
    """Raise with two lines."""
    raise ValueError("first\nsecond")


def keep(text: str) -> int:
    """Keep a text, and say where.

    Args:
        text: The text.
    """
    STORED["text"] = text
    return os.getpid()


def kept() -> str:
    """Say what is kept."""
    return STORED.get("text", "nothing")


def pid() -> int:
    """Say where this is."""
    return os.getpid()


def sleep(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


def wait_for(path: str) -> str:
    """Wait for a file.

    Args:
        path: The file.
    """
    while not Path(path).exists():
        time.sleep(0.005)
    return "there"


def endless() -> None:
    """Never return."""
    while True:
        pass


def dies() -> None:
    """End the process."""
    os._exit(3)


async def async_add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0)
    return a + b


async def async_sleep(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "awake"


async def async_stubborn(path: str) -> None:
    """Do not let oneself be cancelled.

    Args:
        path: A file that ends it.
    """
    while not os.path.exists(path):  # noqa: ASYNC240 - a look at one file
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue


async def async_leaves() -> None:
    """Raise SystemExit."""
    raise SystemExit(4)


async def async_cancels_itself() -> None:
    """Raise CancelledError."""
    raise asyncio.CancelledError


def undocumented(a: int) -> int:
    return a


def half_documented(a: int, b: int) -> int:
    """Add.

    Args:
        a: The first.
    """
    return a + b


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """Add.

    Args:
        a: The first.
    """
    return a  # type: ignore[no-any-return]


def many(*numbers: int) -> int:
    """Add.

    Args:
        numbers: Any.
    """
    return sum(numbers)


class Elsewhere:
    @staticmethod
    def add(a: int) -> int:
        """Another of the same name.

        Args:
            a: The first.
        """
        return a


odd = type("Odd", (), {"__call__": lambda self: None})()
