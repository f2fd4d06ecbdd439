"""Reward functions of the pipelines: one that counts its calls, and one that a scorer dies of."""

import asyncio
import os
import signal

KILLS_SCORER, NO_SIGNAL = "kills the scorer", "no signal"
"""What a row's column `trap` may say."""

SECONDS = 0.05
"""Of a call, so that groups wait for a scorer now and then."""


def counted(texts: list[str], number: list[int], trap: list[str], path: str) -> list[float]:
    """Rewards that differ within a group (all the same where the row says so); each call adds the
    row's number to the file `path`."""
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, f"{number[0]}\n".encode())
    finally:
        os.close(descriptor)
    if trap[0] == NO_SIGNAL:
        return [1.0] * len(texts)
    return [float(position) for position in range(len(texts))]


async def survived(texts: list[str], trap: list[str]) -> list[float]:
    """Runs in the scorer itself, and ends it where the row says so."""
    await asyncio.sleep(SECONDS)
    if trap[0] == KILLS_SCORER:
        os.kill(os.getpid(), signal.SIGKILL)
    return [0.0] * len(texts)
