"""A short form of `python -m tests.chaos.rolling`."""

from pathlib import Path

import pytest

from tests.chaos.rolling import RETURNED, plan_of, rolled
from tests.chaos.world import make_model

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
async def test_a_rolling_restart_loses_no_group_and_leaves_no_consumer(tmp_path: Path) -> None:
    scorers, generators = 2, 2
    plan = plan_of(1, scorers=scorers, generators=generators)
    model = make_model(tmp_path / "model")
    outcome = await rolled(plan, tmp_path / "run", model=model, rounds=1, say=print)
    assert outcome.problems == []
    assert (outcome.rounds, outcome.restarts) == (1, scorers + generators)
    assert outcome.trained == plan.num_prompts
    assert (outcome.lost, outcome.delivered_again, outcome.trained_twice) == (0, 0, 0)
    for stream, listed in outcome.consumers.items():
        live = [name for name in listed if name != RETURNED]
        assert len(live) == (scorers if stream.endswith("groups") else generators)
