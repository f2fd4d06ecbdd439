import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.launcher import summary
from services.launcher.errors import RunFailed
from services.launcher.folder import RunFolder
from services.launcher.metrics_client import Point

SUMMARY: dict[str, Any] = {
    "run": "demo",
    "complete": True,
    "steps": 80,
    "reward_first": 0.3712,
    "reward_last": 0.6123,
    "eval_before": 0.5,
    "eval_after": 0.72,
    "generated_tokens": 123456,
    "groups": {
        "dispatched": 2626,
        "trained": 2560,
        "rolled_back": 0,
        "dropped": {"run_ended": 60, "stale": 4},
        "given_up": 2,
        "in_flight": 0,
        "trained_twice": 0,
    },
    "max_logprob_gap": 2.1e-6,
    "gap_tokens": 5120,
    "versions_published": 81,
    "staleness_max": 2,
    "trained_samples": 40960,
    "trained_tokens": 120000,
    "samples_per_s": 301.2,
    "step_s_median": 1.7,
    "time_budget": {"fwd_bwd_s": 0.51, "rollout_wait_s": 1.02, "other_s": 0.17, "eval_s": 0.0},
    "wall_s": 215.3,
    "restarts": {"trainer-0": 0, "generator-0": 1},
}


def test_rewards_are_means_over_the_first_and_last_tenth() -> None:
    points = [Point(step=i, value=i / 10) for i in range(1, 21)]
    first, last = summary.first_and_last(points)
    assert first == pytest.approx(0.15)
    assert last == pytest.approx(1.95)


def test_steps_without_a_reward_do_not_count_as_0() -> None:
    points = [Point(1, None), Point(2, 0.5), Point(3, 0.7), Point(4, None)]
    assert summary.first_and_last(points) == (0.5, 0.7)
    assert summary.first_and_last([Point(1, None)]) == (None, None)
    assert summary.first_and_last([]) == (None, None)


def test_the_trainers_account_reads_back_without_what_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    with pytest.raises(RunFailed, match=r"without writing .*trainer\.json"):
        summary.read_trainer_report(path)
    path.write_text('{"steps": 3, "max_logprob_gap": NaN}')
    assert summary.read_trainer_report(path) == {"steps": 3, "max_logprob_gap": None}


def test_a_summary_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary.write(SUMMARY, path)
    assert json.loads(path.read_text()) == SUMMARY
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def table(values: dict[str, Any]) -> str:
    console = Console(record=True, width=140, file=io.StringIO())
    console.print(summary.table(values, RunFolder(Path("runs/demo"))))
    return console.export_text()


def test_the_table_says_what_happened_and_where_things_are() -> None:
    text = table(SUMMARY)
    for part in (
        "0.37 → 0.61  (+0.24)",
        "0.50 → 0.72  (+0.22)",
        "1.7 s: rollout wait 60 %, fwd bwd 30 %, other 10 % ",
        "2,626 dispatched = 2,560 trained + 0 rolled back + 64 dropped (run_ended 60, stale 4) + 2",
        "3:35",
        "123,456",
        "at most 2.1e-06 between trainer and engine over 5,120 tokens",
        "generator-0 1x",
        "runs/demo/summary.json",
        "runs/demo/logs",
    ):
        assert part in text


def test_the_table_of_a_run_without_evaluation_has_dashes() -> None:
    text = table(SUMMARY | {"eval_before": None, "eval_after": None, "max_logprob_gap": None})
    assert "— → —" in text
