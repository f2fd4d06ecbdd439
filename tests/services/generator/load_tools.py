"""Tools and an environment, some of which never return and some of which fail."""

import asyncio
import time


def work(number: int) -> int:
    """Work for a moment.

    Args:
        number: Any.
    """
    time.sleep(0.01)
    return number


async def ask(number: int) -> int:
    """Ask somebody else.

    Args:
        number: Any.
    """
    await asyncio.sleep(0.01)
    return number


def fail(number: int) -> int:
    """Raise.

    Args:
        number: Any.
    """
    raise ValueError(f"no {number}")


def spin(number: int) -> int:
    """Never return.

    Args:
        number: Any.
    """
    while True:
        time.sleep(0.01)


async def wait(number: int) -> int:
    """Never return either.

    Args:
        number: Any.
    """
    await asyncio.Event().wait()
    return number


class Room:
    """An environment, whose reset fails where `broken` is 1, and whose reward where it is 2."""

    def reset(self, *, broken: int) -> None:
        self.broken, self.moves = broken, 0
        if broken == 1:
            raise RuntimeError("the room is locked")

    def move(self, number: int) -> int:
        """Move.

        Args:
            number: How far.
        """
        self.moves += number
        return self.moves

    def get_reward(self) -> float:
        if self.broken == 2:
            raise RuntimeError("nobody has counted")
        return float(self.moves)


class Hall:
    """The same, for the event loop."""

    async def reset(self, *, broken: int) -> None:
        self.broken, self.moves = broken, 0
        if broken == 1:
            raise RuntimeError("the hall is locked")

    async def move(self, number: int) -> int:
        """Move.

        Args:
            number: How far.
        """
        self.moves += number
        return self.moves

    async def get_reward(self) -> float:
        if self.broken == 2:
            raise RuntimeError("nobody has counted")
        return float(self.moves)
