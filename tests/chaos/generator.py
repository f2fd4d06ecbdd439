"""`python -m tests.chaos.generator RECIPE`: the generator service, on the tests' engine."""

import asyncio
from pathlib import Path

import typer

from services.common.command import Invocation, service_command
from services.common.config import Recipe
from services.common.lifecycle import Lifecycle
from services.generator.service import Replica, RunningEngine, StartEngine
from tests.chaos.engine import TinyEngine
from tests.chaos.world import pace_of


async def start_engine(folder: Path, recipe: Recipe) -> RunningEngine:
    return TinyEngine(folder, pace=pace_of(recipe))


async def _import() -> StartEngine:
    return start_engine


async def main(invocation: Invocation, lifecycle: Lifecycle) -> None:
    """Run a generator until SIGTERM."""
    importing = asyncio.create_task(_import())
    await Replica(invocation, lifecycle, importing=importing).run()


if __name__ == "__main__":
    typer.run(service_command("generator", main, "A generator on the tests' engine."))
