"""Short forms of `python -m tests.chaos.kills`: a run whose streams are kept, lost, and kept; and
one of two ranks, one of which is killed."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.kills import PLAN, killed
from tests.chaos.world import make_model

pytestmark = pytest.mark.slow

SEED = os.environ.get("KILL_SEED", "1")


@pytest.mark.timeout(600)
async def test_a_trainer_killed_at_random_moments_trains_each_prompt_once(tmp_path: Path) -> None:
    plan = replace(PLAN, num_rows=24, num_scorers=1, num_generators=1, seconds_a_completion=0.15)
    outcome = await killed(
        plan,
        tmp_path / "run",
        model=make_model(tmp_path / "model"),
        deaths=["kept", "lost", "kept"],
        seed=SEED,
        say=print,
    )
    assert outcome.problems == []
    assert (outcome.kills, outcome.again_status) == (3, 0)
    assert outcome.trained == plan.num_prompts
    assert outcome.steps == plan.num_prompts // plan.groups_per_step
    assert (outcome.trained_twice, outcome.not_once, outcome.metric_gaps) == (0, 0, 0)


@pytest.mark.timeout(600)
async def test_a_trainer_of_two_ranks_is_killed_by_the_end_of_either(tmp_path: Path) -> None:
    plan = replace(
        PLAN, ranks=2, num_rows=16, num_scorers=1, num_generators=1, seconds_a_completion=0.15
    )
    outcome = await killed(
        plan,
        tmp_path / "run",
        model=make_model(tmp_path / "model"),
        deaths=["kept"] * 3,
        seed=SEED,
        say=print,
    )
    assert outcome.problems == []
    assert outcome.killed_ranks == [1, 0, 1]
    assert outcome.trained == plan.num_prompts
    assert (outcome.trained_twice, outcome.not_once, outcome.metric_gaps) == (0, 0, 0)
