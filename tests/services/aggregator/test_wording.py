"""The verdict in one sentence."""

from typing import Any

import pytest

from services.aggregator import wording
from services.aggregator.verdict import Verdict, judge
from services.aggregator.window import Step, Window
from tests.services.aggregator.test_verdict import PACING, QUIET


def river(parts: dict[str, float], **pooled: Any) -> Window:
    """Steps of 3.1 s whose training takes 1.2 s, generation 3.0 s and scoring 0.31 s."""
    work = {"data_s": 0.1, "fwd_bwd_s": 0.9, "optimizer_s": 0.1, "weight_sync_s": 0.1}
    steps = tuple(
        Step(step=n, step_s=3.1, **{**work, "straggler_wait_s": 0.0, **parts}) for n in range(20)
    )
    usual = {"slots_busy_frac": 3.0 / 3.1, "scorer_busy_frac": 0.1}
    return Window(steps=steps, **{**QUIET, **usual, **pooled})


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            judge(river({"rollout_wait_s": 1.9})),
            "generation-bound: the trainer waits 61 % of each step (1.9 of 3.1 s); with generation "
            "for free a step would take 1.2 s",
        ),
        (
            judge(river({"rollout_wait_s": 1.9}), speed_up=2),
            "generation-bound: the trainer waits 61 % of each step (1.9 of 3.1 s); with generation "
            "for free a step would take 1.2 s; 2 times as fast, 1.6 s",
        ),
        (
            judge(river({"rollout_wait_s": 1.9}, tool_s=5.0)),
            "environment-bound: the trainer waits 61 % of each step (1.9 of 3.1 s) for "
            "conversations that spend 50 % of their time in tools and the environment; with tools "
            "and environment for free a step would take 1.6 s",
        ),
        (
            judge(
                river(
                    {"rollout_wait_s": 1.9},
                    groups_waiting=40.0,
                    scorer_busy_frac=1.0,
                    slots_busy_frac=0.5,
                )
            ),
            "scoring-bound: the trainer waits 61 % of each step (1.9 of 3.1 s); with scoring for "
            "free a step would take 1.6 s",
        ),
        (
            judge(
                river({"rollout_wait_s": 0.1, "straggler_wait_s": 1.24}, slots_busy_frac=0.5),
                speed_up=2,
            ),
            "straggler-bound: the trainer waits 40 % of each step (1.2 of 3.1 s) for groups that "
            "are about to become too old; without that wait a step would take 1.9 s; 2 times as "
            "fast, 2.5 s",
        ),
        (
            judge(river({"rollout_wait_s": 1.9}, **{**PACING, "slots_busy_frac": 0.5})),
            "pacing-bound: the trainer waits 61 % of each step (1.9 of 3.1 s) while generators "
            "starve: no more groups may be under way; without that wait a step would take 1.6 s",
        ),
        (
            judge(river({"rollout_wait_s": 0.2, "weight_sync_s": 1.0}, slots_busy_frac=0.1)),
            "sync-bound: publishing weights holds the trainer 32 % of each step (1 of 3.1 s); with "
            "weight sync for free a step would take 2.1 s",
        ),
        (
            judge(river({"rollout_wait_s": 1.9}, generator_paused_frac=0.4)),
            "sync-bound: generators are paused 40 % of the time for new weights; with weight sync "
            "for free a step would take 1.9 s",
        ),
        (
            judge(
                river(
                    {"rollout_wait_s": 0.0, "fwd_bwd_s": 2.8},
                    slots_busy_frac=0.5,
                    samples_waiting=40.0,
                )
            ),
            "training-bound: the trainer works 97 % of each step (3 of 3.1 s) and waits 0 %; with "
            "training for free a step would take 1.6 s",
        ),
    ],
)
def test_the_sentence(found: Verdict, says: str) -> None:
    assert wording.sentence(found) == says
