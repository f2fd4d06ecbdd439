"""`python -m tests.services.generator.slow_start RECIPE`: a generator whose engine never comes up,
as vLLM's does while it starts: a thread that blocks, and a process of its own."""

import asyncio
import multiprocessing
import time
from pathlib import Path
from typing import Any

import typer

from services.common.command import service_command
from services.common.config import Recipe
from services.generator import service

FOREVER_S = 3600.0


def _block() -> None:
    multiprocessing.get_context("spawn").Process(target=time.sleep, args=(FOREVER_S,)).start()
    time.sleep(FOREVER_S)


async def start(_folder: Path, _recipe: Recipe) -> Any:
    await asyncio.to_thread(_block)


if __name__ == "__main__":
    service._import_engine = lambda: start
    typer.run(service_command("generator", service.main, "A generator that never starts."))
