"""Environments that tests name in recipes: well-behaved and not."""

import asyncio
import itertools
import os
import random
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np


class Doubling:
    """Counts up to a goal, in a worker process."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def reset(self, goal: int) -> str:
        self.value, self.goal = self.start, goal
        return f"Reach {goal} from {self.value}."

    def add(self, amount: int, times: int = 1) -> dict[str, int]:
        """Add to the value.

        Args:
            amount: how much
            times: how often
        """
        self.value += amount * times
        return {"value": self.value, "pid": os.getpid()}

    def fail(self) -> str:
        """Raises."""
        self.value = 1000
        raise ValueError("not\ntoday")

    def hang(self) -> None:
        """Never returns."""
        while True:
            time.sleep(600)

    def die(self) -> None:
        """Ends its process."""
        os._exit(3)

    def lazily(self) -> Any:
        """Returns what nobody awaits."""

        class Awaitable:
            def __await__(self) -> Any:
                yield

        return Awaitable()

    @staticmethod
    def shout(text: str) -> str:
        """Says it louder.

        Args:
            text: what
        """
        return text.upper()

    def _secret(self) -> None: ...

    @property
    def done(self) -> bool:
        return self.value >= self.goal

    def get_reward(self) -> Any:
        return np.float32(self.value / self.goal)


NUMBERS = itertools.count(1)
"""What resets of Numbered return: each another."""


class Numbered:
    """Gives each conversation its own number; lives in the event loop. `fails` names the place at
    which it raises, once in the life of the class where `once`."""

    alive: ClassVar[set["Numbered"]] = set()
    most_alive: ClassVar[int] = 0
    made: ClassVar[int] = 0
    failures: ClassVar[list[str]] = []
    """Places at which the next call raises."""

    def __init__(self, chance: float = 0.0, seed: int = 0) -> None:
        self.chance, self.random = chance, random.Random(f"{seed}.{Numbered.made}")
        Numbered.made += 1
        Numbered.alive.add(self)
        Numbered.most_alive = max(Numbered.most_alive, len(Numbered.alive))

    @classmethod
    def _begin(cls) -> None:
        cls.alive, cls.most_alive, cls.made, cls.failures = set(), 0, 0, []

    async def reset(self, **row: Any) -> str:
        await self._stumble("reset")
        if "values" in row:
            row["values"].append("changed in place")
        self.number, self.calls, self.seen = next(NUMBERS), 0, row
        return str(self.number)

    async def count(self) -> int:
        """How often it was called in this conversation."""
        await self._stumble("count")
        self.calls += 1
        return self.calls

    async def wait(self, seconds: float) -> None:
        """Wait.

        Args:
            seconds: how long
        """
        await asyncio.sleep(seconds)

    async def insist(self, seconds: float) -> None:
        """Does not let itself be cancelled.

        Args:
            seconds: how long
        """
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                await asyncio.sleep(left_s)
            except asyncio.CancelledError:
                continue

    async def leave(self) -> None:
        """Raises what would end the process."""
        raise SystemExit(3)

    async def get_reward(self) -> float:
        await self._stumble("get_reward")
        return float(self.number)

    async def close(self) -> None:
        await asyncio.sleep(0)
        Numbered.alive.discard(self)

    async def _stumble(self, place: str) -> None:
        await asyncio.sleep(0)
        if place in Numbered.failures:
            Numbered.failures.remove(place)
            raise RuntimeError(f"{place} failed once")
        if self.random.random() < self.chance:
            raise RuntimeError(f"{place} failed by chance")


class Odd:
    """Its reward is what the row says, which may be no number."""

    def reset(self, reward: Any) -> None:
        self.reward = reward

    def get_reward(self) -> Any:
        return float(self.reward) if self.reward in ("nan", "inf") else self.reward


class Reluctant:
    """Does not want to be closed."""

    async def reset(self) -> None: ...

    async def close(self) -> None:
        await asyncio.sleep(600)


class Chancy:
    """Raises in a tenth of all calls, in a worker process."""

    def reset(self, number: int) -> None:
        self.random = random.Random(number)
        self._stumble()

    def move(self) -> int:
        """Move."""
        self._stumble()
        return os.getpid()

    def get_reward(self) -> float:
        self._stumble()
        return 1.0

    def _stumble(self) -> None:
        if self.random.random() < 0.1:
            raise RuntimeError("by chance")


class Closing:
    """Says in a file that it was closed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def reset(self) -> None: ...

    def fail(self) -> None:
        """Raises."""
        raise OSError("broken")

    def close(self) -> None:
        with open(self.path, "a") as out:
            out.write("closed\n")


class Explosive:
    def __init__(self) -> None:
        raise RuntimeError("no licence")

    def reset(self) -> None: ...


class Mixed:
    async def reset(self) -> None: ...

    def act(self) -> None:
        """Acts."""


class WithoutReset:
    def act(self) -> None:
        """Acts."""


class DoneMethod:
    def reset(self) -> None: ...

    def done(self) -> bool:
        """Is over."""
        return True


class Untold:
    def reset(self) -> None: ...

    def act(self, where) -> None:  # type: ignore[no-untyped-def]
        """Acts."""


class Abstract(ABC):
    @abstractmethod
    def reset(self) -> None: ...


def no_class() -> None: ...
