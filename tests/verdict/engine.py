"""The tests' engine with sleeps: how long a completion and a load of weights last, which
completions last very long, and what is said: calls of tools first, where there are some."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from services.common.config import Recipe
from services.generator.types import LoadTimes
from tests.chaos.engine import TinyEngine
from tests.chaos.words import NUM_PLAIN, token_of
from tests.verdict import sleeps, stages
from tests.verdict.world import CALLS


class SleepingEngine(TinyEngine):
    """Says the calls of `says` in the first turn of a conversation, plain words in the next."""

    def __init__(self, folder: Path, *, says: Sequence[str] = ()) -> None:
        super().__init__(folder, pace=folder)
        self._calls = [token_of(CALLS[name]) for name in says]

    async def load(self, path: Path, version: int) -> LoadTimes:
        """Replace the weights by those of a file; nothing runs for as long as `load` says."""
        load_s = sleeps.of_this_process("load") if version > 1 else 0.0
        await self.pause()
        await asyncio.sleep(load_s)
        times = await super().load(path, version)
        return LoadTimes(
            pause_s=times.pause_s + load_s, load_s=times.load_s + load_s, inflight=times.inflight
        )

    def _sample(self, draw: random.Random, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        if self._calls and token_of(stages.HEARD) not in prompt_ids:
            return [draw.randrange(NUM_PLAIN), *self._calls]
        return super()._sample(draw, prompt_ids, max_tokens)

    def _duration_s(self, draw: random.Random) -> float:
        if draw.random() < sleeps.seconds("tail_frac"):
            return sleeps.seconds("tail")
        mean_s, spread = sleeps.of_this_process("completion"), sleeps.seconds("spread")
        return mean_s * draw.lognormvariate(-(spread**2) / 2, spread) if spread else mean_s


def calls_of(recipe: Recipe) -> list[str]:
    """What conversations of a recipe call: all of its tools, or their environment's method."""
    tools = [function.rpartition(":")[2] for function in recipe.tools.functions]
    return tools + (["act"] if recipe.environments.classes else [])
