"""`python -m tests.verdict.generator RECIPE`: the generator service, on an engine with sleeps."""

from pathlib import Path

from services.common.config import Recipe
from services.generator.service import RunningEngine
from tests.chaos.generator import run
from tests.verdict.engine import SleepingEngine, calls_of


async def start_engine(folder: Path, recipe: Recipe) -> RunningEngine:
    return SleepingEngine(folder, says=calls_of(recipe))


if __name__ == "__main__":
    run(start_engine, "A generator with sleeps.")
