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


def run(start: StartEngine, about: str) -> None:
    """The service's command line, with an engine that `start` makes; until SIGTERM."""

    async def imported() -> StartEngine:
        return start

    async def main(invocation: Invocation, lifecycle: Lifecycle) -> None:
        importing = asyncio.create_task(imported())
        await Replica(invocation, lifecycle, importing=importing).run()

    typer.run(service_command("generator", main, about))


if __name__ == "__main__":
    run(start_engine, "A generator on the tests' engine.")
