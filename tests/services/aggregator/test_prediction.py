"""What a step would take, from windows whose arithmetic is done by hand."""

from typing import Any

import pytest

from services.aggregator.prediction import stage_times
from services.aggregator.rules import Name
from services.aggregator.verdict import judge
from tests.services.aggregator.test_verdict import PACING, SCORING, window


def test_stage_times_are_for_the_groups_of_a_step() -> None:
    """In 200 s slots were 80 % busy and 320 groups were made: 0.5 s a group, 16 s for 32."""
    stages = stage_times(window(slots_busy_frac=0.8, groups_generated=320.0))
    assert stages.generation_s == pytest.approx(16.0)
    assert stages.scoring_s == pytest.approx(1.0)
    assert stages.training_s == pytest.approx(9.3)
    assert stage_times(window(groups_generated=None)).generation_s is None


def test_the_trainers_time_is_all_in_which_it_waits_for_no_group() -> None:
    """Checkpoints, evaluations and what nobody measured are in no part, and no stage hides them."""
    parts = {"rollout_wait_s": 4.0, "straggler_wait_s": 1.0, "fwd_bwd_s": 0.5, "data_s": 0.1}
    assert stage_times(window(parts)).training_s == pytest.approx(5.0)
    assert stage_times(window({**parts, "straggler_wait_s": None})).training_s == pytest.approx(6.0)
    assert stage_times(window({"rollout_wait_s": None})).training_s is None


def test_a_scorer_with_room_for_more_groups_could_do_more() -> None:
    """One group of eight was in work at any time: all of the time, and an eighth of what it can."""
    busy: dict[str, Any] = {"scorer_busy_frac": 1.0, "groups_scored": 640.0}
    assert stage_times(window(**busy)).scoring_s == pytest.approx(10.0)
    assert stage_times(window(**busy, scorer_load_frac=0.125)).scoring_s == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("name", "parts", "pooled", "speed_up", "predicted", "if_free"),
    [
        # Generation needs 32 groups x 200 s x 0.9 busy / 640 groups = 9 s of the 10; for free the
        # trainer's 6 s are left.
        (
            "generation-bound",
            {"rollout_wait_s": 4.0, "fwd_bwd_s": 3.5},
            {"slots_busy_frac": 0.9},
            1.2,
            10.0 - 9.0 * (1 - 1 / 1.2),
            6.0,
        ),
        # Of these 9 s 60 % are tools' and the environment's; training takes 4 s.
        (
            "environment-bound",
            {"rollout_wait_s": 6.0, "fwd_bwd_s": 0.8},
            {"slots_busy_frac": 0.9, "tool_s": 4.0, "env_s": 2.0},
            2.0,
            10.0 - 9.0 * 0.6 / 2,
            10.0 - 9.0 * 0.6,
        ),
        # Scoring needs 32 x 200 x 0.8 / 640 = 8 s, generation at 0.5 busy 5 s.
        ("scoring-bound", {"rollout_wait_s": 6.0, "fwd_bwd_s": 2.0}, SCORING, 1.25, 8.4, 5.0),
        # Only the wait of 4 s gets shorter.
        ("straggler-bound", {"straggler_wait_s": 4.0, "fwd_bwd_s": 3.0}, {}, 2.0, 8.0, 6.0),
        (
            "pacing-bound",
            {"rollout_wait_s": 4.0, "fwd_bwd_s": 3.0},
            {**PACING, "slots_busy_frac": 0.2},
            4.0,
            7.0,
            6.0,
        ),
        # The trainer is held for 3 s, of which half stays.
        ("sync-bound", {"weight_sync_s": 3.0, "fwd_bwd_s": 5.0}, {}, 2.0, 8.5, 7.0),
        # Generators are paused for 4 s of the 7 that the trainer waits.
        (
            "sync-bound",
            {"rollout_wait_s": 7.0, "fwd_bwd_s": 0.8},
            {"generator_paused_frac": 0.4},
            2.0,
            8.0,
            6.0,
        ),
        # Held for 2 s, and paused for all the 7 that the trainer waits.
        (
            "sync-bound",
            {"rollout_wait_s": 7.0, "fwd_bwd_s": 0.5, "weight_sync_s": 2.0},
            {"generator_paused_frac": 0.9, "slots_busy_frac": 0.9},
            2.0,
            6.5,
            3.0,
        ),
        # Of 1 + 7 + 0.7 s; sync and what else the trainer does stay. Generation needs 0.5 x 10 s.
        (
            "training-bound",
            {"rollout_wait_s": 0.1},
            {"samples_waiting": 40.0},
            1.15,
            10.0 - 8.7 * (1 - 1 / 1.15),
            5.0,
        ),
    ],
)
def test_predictions_are_the_stage_times_of_the_window(
    name: Name,
    parts: dict[str, float],
    pooled: dict[str, Any],
    speed_up: float,
    predicted: float,
    if_free: float,
) -> None:
    """Steps of 10 s, 20 of them, 32 groups each: 640 in 200 s."""
    found = judge(window(parts, **pooled), speed_up=speed_up)
    assert found.name == name
    assert found.step_s_at_speed_up == pytest.approx(predicted)
    assert found.step_s_if_free == pytest.approx(if_free)
