"""The reward of benchmarks/soak.py, written as a user's would be."""

import asyncio
from typing import Any

from services.scorer.builtin_rewards import reasoning_gym

REWARD_S = 1.3
"""Of one call, which is of one group; a scorer calls for eight groups at a time, so about six
groups a second are trained and the cores are free half of the time."""


async def paced_reward(
    *, texts: list[str], question: list[str], answer: list[str], metadata: list[Any]
) -> list[float]:
    """The task's own scorer, behind a wait."""
    await asyncio.sleep(REWARD_S)
    return reasoning_gym(texts=texts, question=question, answer=answer, metadata=metadata)
