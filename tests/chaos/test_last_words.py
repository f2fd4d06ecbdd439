"""What became of the last groups reaches the ledger, though the aggregator is away when the run
ends."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.judge import gather, judge
from tests.chaos.pipeline import Pipeline
from tests.chaos.world import Plan, make_model
from tests.waiting import until

AWAY_S = 7.0
"""Longer than a service that is stopped waits for it."""

PATIENCE_S = 180.0

pytestmark = pytest.mark.slow


async def test_a_trainer_waits_for_the_aggregator_at_the_end_of_its_run(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    plan = Plan(num_rows=8, epochs=1.0, seconds_a_completion=0.1)
    async with Pipeline(plan, tmp_path / "p", model=model) as pipeline:
        await pipeline.start()
        await pipeline.until_steps(1, patience_s=PATIENCE_S)
        assert await pipeline.aggregator.stop() == 0
        await until((pipeline.recipe.run_folder / "trainer.json").exists)
        await asyncio.sleep(AWAY_S)
        pipeline.aggregator.start()
        assert await pipeline.over(patience_s=PATIENCE_S) == 0
        assert set((await pipeline.wind_down()).values()) == {0}
        verdict = judge(await gather(pipeline))
    assert verdict.problems == []
    assert verdict.trained + verdict.given_up == plan.num_prompts
