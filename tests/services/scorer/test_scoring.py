import time

import pytest
import structlog

from services.scorer import scoring
from services.scorer.advantages import group_advantages
from services.scorer.rewards import Failure, Verdict
from services.scorer.scoring import BusyClock, Complaints, Judgement
from tests.services.scorer.measured import recorder, values


def judged(*verdicts: Verdict, totals: list[float | None]) -> Judgement:
    advantages = group_advantages(totals)
    return Judgement(
        verdicts=list(verdicts),
        totals=totals,
        advantages=advantages,
        enough=advantages.num_scored >= 2,
    )


def test_rewards_are_recorded_without_the_abstentions() -> None:
    measured = recorder()
    first = Verdict(name="first", rewards=[1, None, 0, None])
    second = Verdict(name="second", rewards=[0.5, 0.5, None, None])
    group = judged(first, second, totals=[1.5, 0.5, 0, None])
    scoring.record(group, measured)
    seen = values(measured)
    assert seen["reward"] == (3, 2.0)
    assert seen["reward_std"] == pytest.approx((1, 0.62361), abs=1e-5)
    assert seen["rewards/first"] == (2, 1.0)
    assert seen["rewards/second"] == (2, 1.0)
    assert seen["reward/unscored_total"] == 1
    assert seen["reward/zero_std_frac"] == (0, 1)


def test_groups_without_signal_are_a_ratio_over_groups() -> None:
    measured = recorder()
    for totals in ([1.0, 1.0], [1.0, 0.0], [0.0, 0.0]):
        scoring.record(judged(totals=list(totals)), measured)
    assert values(measured)["reward/zero_std_frac"] == (2, 3)


def test_nothing_scored_is_no_value() -> None:
    measured = recorder()
    nobody = judged(Verdict(name="f", rewards=[None, None]), totals=[None, None])
    scoring.record(nobody, measured)
    assert values(measured) == {"reward/unscored_total": 2}


def test_what_functions_say_beside_rewards_is_custom() -> None:
    said = (("chars", 3.0), ("chars", 5.0), ("deep/x", 1.0))
    verdict = Verdict(name="f", rewards=[1, 0], logged=said)
    measured = recorder()
    scoring.record(judged(verdict, totals=[1, 0]), measured)
    custom = {key: value for key, value in values(measured).items() if "custom/" in key}
    assert custom == {"custom/chars": (2, 8.0), "custom/deep/x": (1, 1.0)}


def test_each_function_s_time_is_its_own() -> None:
    measured = recorder()
    verdicts = [
        Verdict(name="fast", rewards=[1, 0], seconds=0.25),
        Verdict(name="slow", rewards=[1, 0], seconds=2.0),
        Verdict(name="failed", rewards=[None, None], failure=Failure("timeout"), seconds=60.0),
        Verdict(name="uncalled", rewards=[None, None], failure=Failure("no such column")),
    ]
    for _ in range(2):
        scoring.record_seconds(judged(*verdicts, totals=[2, 0]), measured)
    assert values(measured) == {
        "reward/function_s/fast": (2, 0.5),
        "reward/function_s/slow": (2, 4.0),
        "reward/function_s/failed": (2, 120.0),
    }


def test_failures_are_counted_each_and_logged_once() -> None:
    measured = recorder()
    complaints = Complaints(measured)
    failed = Verdict(name="f", rewards=[None, None], failure=Failure("ValueError: x", "Traceback"))
    with structlog.testing.capture_logs() as logs:
        for number in range(5):
            complaints.of(judged(failed, totals=[None, None]), group_id=str(number))
    assert [(entry["function"], entry["why"], entry["group"]) for entry in logs] == [
        ("f", "ValueError: x", "0")
    ]
    assert values(measured)["reward/failed_calls_total"] == 5


def test_unusable_numbers_are_counted_and_logged_once_per_function() -> None:
    measured = recorder()
    complaints = Complaints(measured)
    verdicts = [Verdict(name=name, rewards=[1, None], num_nonfinite=1) for name in ("f", "g")]
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            complaints.of(judged(*verdicts, totals=[2, None]), group_id="g")
    assert sorted(entry["function"] for entry in logs) == ["f", "g"]
    assert values(measured)["nonfinite_total/reward"] == 6


def test_busy_time_is_the_union_of_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = BusyClock(places=2, workers=1)
    now = 101.0
    with clock.busy():
        now = 103.0
        with clock.busy():
            now = 104.0
            assert clock.take() == (3.0, 4.0)
        now = 106.0
    now = 110.0
    assert clock.take() == (2.0, 6.0)
    assert clock.take() == (0.0, 0.0)


def test_what_is_in_work_is_of_what_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 places: two groups for 4 s and one of them for 2 s more are 10 of 80 place-seconds."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = BusyClock(places=8, workers=2)
    with clock.busy():
        with clock.busy():
            now = 104.0
        now = 106.0
    now = 110.0
    assert clock.take_load() == (10 / 8, 10.0)
    assert clock.take() == (6.0, 10.0)


def test_scorers_whose_worker_processes_never_rest_are_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two groups in 8 places, but a sync function that had both workers for 9 of 10 s."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = BusyClock(places=8, workers=2)
    with clock.busy(), clock.busy():
        now = 110.0
    clock.worked(9.0)
    clock.worked(9.0)
    assert clock.take_load() == (9.0, 10.0)
    now = 112.0
    assert clock.take_load() == (0.0, 2.0)
