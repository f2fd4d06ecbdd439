"""What users bring along, with sleeps: reward functions, tools and environments."""

import asyncio
import os
import time

from tests.verdict import sleeps

HEARD = "w45"
"""What every call answers: one word of the tests' tokenizer."""


async def grader(texts: list[str]) -> list[float]:
    """Rewards that differ within a group; in a scorer that is slow, slowly."""
    await asyncio.sleep(sleeps.seconds("grader") + sleeps.seconds(os.environ[sleeps.PROCESS]))
    return [float(position) for position in range(len(texts))]


async def judge(texts: list[str]) -> list[float]:
    """A reward function of its own, which asks somebody."""
    await asyncio.sleep(sleeps.seconds("judge"))
    return [0.0] * len(texts)


def checker(texts: list[str]) -> list[float]:
    """One that is not async: it has a worker process of the scorer for as long as it takes."""
    time.sleep(sleeps.seconds("checker"))
    return [0.0] * len(texts)


async def search() -> str:
    """Search the web."""
    await asyncio.sleep(sleeps.seconds("tool/search"))
    return HEARD


async def clock() -> str:
    """Tell the time."""
    await asyncio.sleep(sleeps.seconds("tool/clock"))
    return HEARD


class Sandbox:
    """An environment whose one method lasts as long as `environment/NAME` says."""

    name = "sandbox"

    async def reset(self) -> None:
        """Nothing to put in order."""

    async def act(self) -> str:
        """Act."""
        await asyncio.sleep(sleeps.seconds(f"environment/{self.name}"))
        return HEARD


class Board(Sandbox):
    """Another."""

    name = "board"
