"""Generators come and go in mid-run, all services as processes: who joins makes nothing before it
serves what is current, who leaves takes nothing away, and without any the trainer waits."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import witness
from tests.chaos.keeper import Keeper
from tests.chaos.pipeline import Pipeline
from tests.chaos.world import Plan, make_model
from tests.probes import is_healthy, status_of
from tests.test_start_order import PATIENCE_S, eventually

pytestmark = pytest.mark.slow

PLAN = Plan(
    num_rows=40,
    epochs=99,
    num_generators=1,
    num_scorers=1,
    num_failing=0,
    num_without_signal=0,
    # Only what is given back changes hands.
    claim_after_s=600.0,
    max_work_s=600.0,
    max_stale_tries=1000,
    seconds_a_completion=0.2,
)

WITHOUT_S = 3.0
"""For so long there is no generator: many times what a step takes."""


async def ready(pipeline: Pipeline, keeper: Keeper) -> bool:
    announced = pipeline.folder / f"{keeper.name}.json"
    return await asyncio.to_thread(announced.exists) and await is_healthy(announced)


async def served_by(pipeline: Pipeline, keeper: Keeper) -> list[float]:
    """The versions that a generator has loaded, as it told the aggregator, each the smallest of
    its window."""
    answer = await pipeline.rest(
        "metrics/policy/served_version", axis="time", reduce="min", group_by="producer"
    )
    points = answer["by_producer"].get(keeper.name, [])
    return [each["value"] for each in points if each["value"] is not None]


async def test_generators_join_and_leave_and_come_back(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    async with Pipeline(PLAN, tmp_path / "run", model=model) as pipeline:
        await pipeline.start()
        (first,) = pipeline.generators
        await pipeline.until_steps(3, patience_s=PATIENCE_S)

        # One joins, while the other works.
        steps = pipeline.num_steps
        second = pipeline.add("generator")
        await eventually(lambda: ready(pipeline, second))
        told = await status_of(pipeline.folder / f"{second.name}.json")
        assert int(told.details["served_version"]) >= steps
        await pipeline.until_steps(pipeline.num_steps + 2, patience_s=PATIENCE_S)

        async def both_are_known() -> bool:
            answer = await pipeline.rest("scale/generator")
            return bool(answer["live"] == 2)

        await eventually(both_are_known)
        assert min(await served_by(pipeline, second)) >= steps

        # One is frozen where it is, as in the middle of a sync, and leaves: a publish waits for no
        # number of replicas. What it holds is its own for as long as its claims last.
        steps = pipeline.num_steps
        second.signal(signal.SIGSTOP)
        await pipeline.until_steps(steps + 1, patience_s=PATIENCE_S)
        assert await pipeline.remove(second) == 0
        await pipeline.until_steps(steps + 4, patience_s=PATIENCE_S)
        assert pipeline.num_steps >= steps + 4

        # The last one leaves.
        assert await pipeline.remove(first) == 0
        await _has_come_to_rest(pipeline)
        steps = pipeline.num_steps
        await asyncio.sleep(WITHOUT_S)
        assert pipeline.num_steps == steps
        for keeper in (pipeline.trainer, *pipeline.scorers, pipeline.aggregator):
            assert await ready(pipeline, keeper), keeper.name
        assert (await pipeline.rest("scale/generator"))["replicas"] >= 1

        # One comes back: it goes on by itself.
        third = pipeline.add("generator")
        await pipeline.until_steps(steps + 3, patience_s=PATIENCE_S)
        assert pipeline.num_steps >= steps + 3
        assert min(await served_by(pipeline, third), default=steps) >= steps

        made = list(witness.steps(pipeline.witnessed()))
        assert [step.step for step in made] == list(range(1, len(made) + 1))
        trained = [group for step in made for group in step.groups]
        assert len(trained) == len(set(trained))
        assert await _sums(pipeline, "queue/redelivered_total", "queue/takeover_total") == [0, 0]
        assert (pipeline.trainer.starts, pipeline.trainer.ends) == (1, [])


async def _has_come_to_rest(pipeline: Pipeline) -> None:
    """Once the trainer has trained what was left, and waits."""
    before = -1

    async def still() -> bool:
        nonlocal before
        now, before = before, pipeline.num_steps
        await asyncio.sleep(1.0)
        return now == before

    await eventually(still)


async def _sums(pipeline: Pipeline, *keys: str) -> list[float]:
    """What was counted in the whole run; 0 for a key that nobody has recorded."""
    found: dict[str, Any] = {
        each["key"]: each for each in (await pipeline.rest("metrics"))["metrics"]
    }
    sums = []
    for key in keys:
        points = []
        if key in found:
            points = (await pipeline.rest(f"metrics/{key}", reduce="sum"))["points"]
        sums.append(sum(each["value"] for each in points))
    return sums
