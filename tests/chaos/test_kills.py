"""A short form of `python -m tests.chaos.kills --ranks 2`, whose streams are kept, lost, and kept;
one rank is killed, the other, and the one. tests/services/trainer/test_killed.py has one rank.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.kills import PLAN, killed
from tests.chaos.world import make_model

pytestmark = pytest.mark.slow

SEED = os.environ.get("KILL_SEED", "1")


@pytest.mark.timeout(600)
async def test_each_prompt_is_trained_once_whichever_rank_is_killed_when(tmp_path: Path) -> None:
    plan = replace(
        PLAN, ranks=2, num_rows=20, num_scorers=1, num_generators=1, seconds_a_completion=0.15
    )
    outcome = await killed(
        plan,
        tmp_path / "run",
        model=make_model(tmp_path / "model"),
        deaths=["kept", "lost", "kept"],
        seed=SEED,
        say=print,
    )
    assert outcome.problems == []
    assert outcome.killed_ranks == [1, 0, 1]
    assert (outcome.kills, outcome.again_status) == (3, 0)
    assert outcome.trained == plan.num_prompts
    assert outcome.steps == plan.num_prompts // plan.groups_per_step
    assert (outcome.trained_twice, outcome.not_once, outcome.metric_gaps) == (0, 0, 0)
