"""All services as processes: they may start in any order, say what they wait for, and tell probes
the truth when what they stand on goes away."""

import asyncio
import os
import random
import sqlite3
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.pipeline import Pipeline
from tests.chaos.world import Plan, make_model
from tests.probes import is_healthy, status_of

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
"""A start takes about 12 s of two cores, most of it imports."""

PLAN = Plan(
    num_rows=40, num_generators=1, num_scorers=1, num_failing=0, num_without_signal=0, epochs=99
)
"""A run that does not end by itself within a test."""

PARTS = ("queue", "aggregator", "trainer", "scorer", "generator")

SEED = int(os.environ.get("START_SEED", "1"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("made") / "model")


def announced(pipeline: Pipeline, part: str) -> Path:
    return pipeline.folder / f"{part}-0.json"


async def eventually(question: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Return once the answer is true; TimeoutError after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not await question():  # noqa: ASYNC110 - they are other processes
            await asyncio.sleep(0.1)


async def start(pipeline: Pipeline, part: str) -> None:
    if part == "queue":
        await pipeline.queue.start()
        return
    keepers = {
        "aggregator": pipeline.aggregator,
        "trainer": pipeline.trainer,
        "scorer": pipeline.scorers[0],
        "generator": pipeline.generators[0],
    }
    keepers[part].start()
    await eventually(lambda: asyncio.to_thread(announced(pipeline, part).exists))


def expected(part: str, started: Collection[str]) -> str:
    """The phase in which a service waits for what is not there yet; "" when all that it needs is
    there."""
    if part == "aggregator":
        return ""
    if part == "generator" and "trainer" not in started:
        return "waiting for the trainer at 127.0.0.1:"
    if "queue" in started:
        return ""
    # The trainer has given it the model's files, or has none before it has been at the queue.
    waits_for = "waiting for the " if part == "generator" else "waiting for the queue server at "
    return waits_for


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
async def test_they_start_in_any_order(seed: int, model: Path, tmp_path: Path) -> None:
    order = list(PARTS)
    random.Random(seed).shuffle(order)
    print(f"\n{' '.join(order)}")
    async with Pipeline(PLAN, tmp_path, model=model) as pipeline:
        started: list[str] = []

        async def as_expected() -> bool:
            for part in (each for each in started if each != "queue"):
                where = announced(pipeline, part)
                status, phase = await status_of(where), expected(part, started)
                # A peer that is away is no reason to kill anybody.
                assert await is_healthy(where, "liveness"), part
                assert await is_healthy(where) <= (not phase), (part, status.phase)
                if not (status.phase.startswith(phase) and status.ready == (not phase)):
                    return False
            return True

        for part in order:
            await start(pipeline, part)
            started.append(part)
            # The slowest case: all others have long been waiting when one comes.
            await eventually(as_expected)
        await pipeline.until_steps(1, patience_s=PATIENCE_S)
        assert pipeline.num_steps >= 1
        # Nobody fell on the way.
        assert [(keeper.starts, keeper.ends) for keeper in pipeline.keepers] == [(1, [])] * 4


async def test_readiness_tells_the_truth(model: Path, tmp_path: Path) -> None:
    async with Pipeline(PLAN, tmp_path, model=model) as pipeline:
        services = [part for part in PARTS if part != "queue"]

        async def ready() -> dict[str, bool]:
            alive = [await is_healthy(announced(pipeline, each), "liveness") for each in services]
            assert all(alive)
            return {each: await is_healthy(announced(pipeline, each)) for each in services}

        async def all_ready() -> bool:
            return all((await ready()).values())

        await pipeline.start()
        for part in services:
            await eventually(partial(asyncio.to_thread, announced(pipeline, part).exists))
        await eventually(all_ready)

        # Without the queue server: who works by it. The generators are asked about their engine.
        await pipeline.queue.kill()

        async def without_queue() -> bool:
            found = await ready()
            assert found["aggregator"]
            return not found["trainer"] and not found["scorer"]

        await eventually(without_queue)
        await pipeline.queue.start()
        await eventually(all_ready)

        # Without a store that can be written: the aggregator alone.
        database = sqlite3.connect(pipeline.recipe.run_folder / "metrics.sqlite")
        database.execute("BEGIN IMMEDIATE")

        async def without_store() -> bool:
            found = await ready()
            assert found["trainer"]
            assert found["scorer"]
            assert found["generator"]
            return not found["aggregator"]

        await eventually(without_store)
        database.rollback()
        database.close()
        await eventually(all_ready)

        # Without the aggregator: nobody else notices.
        await pipeline.aggregator.kill()
        services.remove("aggregator")
        steps = pipeline.num_steps
        await pipeline.until_steps(steps + 2, patience_s=PATIENCE_S)
        assert await all_ready()
        assert [keeper.starts for keeper in pipeline.keepers] == [1] * 4
