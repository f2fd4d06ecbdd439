"""What makes the demo slow in benchmarks/endtoend.py, written as a user's reward function and
environment would be.
"""

import asyncio
import math
import random
from typing import Any

from services.scorer.builtin_rewards import reasoning_gym

REWARD_S = 0.2
"""Of one call, which is of one group: a judge on another machine."""


async def slow_reward(
    *, texts: list[str], question: list[str], answer: list[str], metadata: list[Any]
) -> list[float]:
    """The task's own scorer, behind a wait."""
    await asyncio.sleep(REWARD_S)
    return reasoning_gym(texts=texts, question=question, answer=answer, metadata=metadata)


class LongTailed:
    """Waits a lognormal time before the prompt is answered, as if answers were of such lengths and
    written on other machines: the cores here stay free meanwhile."""

    def __init__(self, median_s: float = 0.15, sigma: float = 1.0, most_s: float = 8.0) -> None:
        self._median_s, self._sigma, self._most_s = median_s, sigma, most_s

    async def reset(self, **_: Any) -> None:
        """Take as long as an answer would."""
        drawn_s = random.lognormvariate(math.log(self._median_s), self._sigma)
        await asyncio.sleep(min(self._most_s, drawn_s))
