"""The rules of alerts, on plain numbers."""

import itertools
from typing import Any

import pytest

from services.aggregator.alert_rules import (
    Facts,
    Judgement,
    KeyRule,
    Rule,
    change,
    compile_rules,
    drops,
    lost,
    not_finite,
    stalled,
    stuck,
    unbalanced,
)
from services.aggregator.catalogue import CATALOGUE, with_custom
from services.common.alerts_config import AlertRule, Alerts
from services.common.custom_metrics import CustomMetric
from services.common.errors import UserError


def by_key(**given: Any) -> KeyRule:
    rule = AlertRule.model_validate({"name": "mine", "key": "reward", "threshold": 0.1, **given})
    (found,) = compile_rules(Alerts(rules=(rule,)), CATALOGUE)[-1:]
    assert isinstance(found.by, KeyRule)
    return found.by


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ((0.0, 0.2, 0.2, 0.3), True),
        ((0.2, 0.2, 0.1), None),  # equal to the threshold is not wrong
        ((0.2, 0.1, 0.0, 0.0), False),
        ((0.2, 0.2), None),  # fewer steps than asked for say nothing
        ((), None),
    ],
)
def test_steps_that_are_all_wrong_or_all_right(
    values: tuple[float, ...], wrong: bool | None
) -> None:
    assert by_key(for_steps=3).judge_steps(values).wrong is wrong
    mirrored = by_key(for_steps=3, compare="below", threshold=-0.1)
    assert mirrored.judge_steps([-value for value in values]).wrong is wrong


def test_a_value_stands_until_the_next_one_for_a_while() -> None:
    rule = by_key(for_s=60.0)
    wrong = [(930.0, 0.5), (950.0, 0.5), (990.0, 0.5)]
    assert rule.judge_time(wrong, now_s=1000.0).wrong is True
    assert rule.judge_time(wrong[1:], now_s=1000.0).wrong is None  # what was at 940 s?
    assert rule.judge_time([(930.0, 0.0), *wrong[1:]], now_s=1000.0).wrong is None
    assert rule.judge_time([(930.0, 0.0), (990.0, 0.1)], now_s=1000.0).wrong is False
    assert rule.judge_time(wrong, now_s=1290.0).wrong is True  # 300 s after the newest
    assert rule.judge_time(wrong, now_s=1290.1).wrong is None
    assert rule.judge_time([], now_s=1000.0).wrong is None


def test_what_people_read_has_the_numbers_or_is_the_recipes_own() -> None:
    found = by_key(key="perf/step_s", threshold=2.5, for_steps=2).judge_steps([3.0, 4.0])
    assert found.sentence == ("perf/step_s (mean) was above 2.5 s in the last 2 steps; now 4.")
    assert found.value == 4.0
    own = by_key(for_steps=1, sentence="Rewards are too good to be true.")
    assert own.judge_steps([1.0]).sentence == "Rewards are too good to be true."


def test_an_alert_fires_once_and_ends_once() -> None:
    judged = [None, True, True, None, True, False, False, None, False, True]
    firing, changes = False, []
    for wrong in judged:
        found = change(Judgement(wrong), firing=firing)
        changes.append(found)
        firing = firing if found is None else found == "fire"
    assert changes == [None, "fire", None, None, None, "end", None, None, None, "fire"]


def test_a_value_that_hovers_at_a_threshold_does_not_ring_again_and_again() -> None:
    rule = by_key(for_steps=3)
    values = [0.0, 0.0, 0.0, *(0.09 if n % 2 else 0.11 for n in range(200))]
    firing, changes = False, 0
    for end in range(len(values)):
        found = change(rule.judge_steps(values[: end + 1]), firing=firing)
        changes += found is not None
        firing = firing if found is None else found == "fire"
    assert changes == 0


def test_a_stall_is_told_by_what_is_usual() -> None:
    alerts = Alerts()  # 10 times, 300 s
    slow = Facts(usual_step_s=60.0, quiet_s=600.0)
    assert stalled(slow, alerts).wrong is False
    assert stalled(Facts(usual_step_s=60.0, quiet_s=600.1), alerts).wrong is True
    fast = Facts(usual_step_s=1.0, quiet_s=299.0)
    assert stalled(fast, alerts).wrong is False
    found = stalled(Facts(usual_step_s=1.0, quiet_s=301.0), alerts)
    assert (found.wrong, found.sentence) == (
        True,
        "No step has ended for 301 s; usual are 1 s.",
    )
    # Nothing is usual yet: a model that loads takes its time.
    assert stalled(Facts(quiet_s=3600.0), alerts).wrong is False
    assert stalled(Facts(quiet_s=3601.0), alerts).wrong is True


def test_dropped_groups_ring_above_the_share_and_end_below_half_of_it() -> None:
    alerts = Alerts()

    def judged(dropped: float) -> bool | None:
        return drops(Facts(dropped_groups=dropped, taken_groups=100.0 - dropped), alerts).wrong

    assert [judged(each) for each in (30, 21, 20, 11, 10, 0)] == [
        *(True, True, None, None, False, False)
    ]
    assert drops(Facts(), alerts).wrong is None


def test_what_must_never_be_rings_at_once_and_ends_when_it_is_gone() -> None:
    for judge, bad in (
        (stuck, Facts(num_stuck=2, oldest_stuck="0.1.1.1 (scoring)", stuck_after_s=600.0)),
        (unbalanced, Facts(dispatched=10, counted=9)),
        (unbalanced, Facts(dispatched=9, counted=10)),
        (lost, Facts(lost_partials=1.0)),
        (not_finite, Facts(not_finite=3.0)),
    ):
        assert judge(bad).wrong is True
        assert judge(bad).sentence
        assert judge(Facts()).wrong is False
    assert (
        "0.1.1.1 (scoring)" in stuck(Facts(num_stuck=1, oldest_stuck="0.1.1.1 (scoring)")).sentence
    )


def test_built_in_alerts_can_be_turned_off_one_by_one() -> None:
    everything = compile_rules(Alerts(), CATALOGUE)
    names = [rule.name for rule in everything]
    assert len(set(names)) == len(names) == 7
    for off in itertools.chain(([name] for name in names), [names]):
        left = compile_rules(Alerts.model_validate({"off": off}), CATALOGUE)
        assert [rule.name for rule in left] == [name for name in names if name not in off]


def test_the_gap_of_the_recipe_is_what_disagreement_compares_with() -> None:
    rules: dict[str, Rule] = {
        rule.name: rule for rule in compile_rules(Alerts(max_gap=0.5), CATALOGUE)
    }
    by = rules["disagreement"].by
    assert isinstance(by, KeyRule)
    assert by.judge_steps([0.6] * 5).wrong is True
    assert by.judge_steps([0.6] * 4 + [0.4]).wrong is None


@pytest.mark.parametrize(
    ("key", "reduce", "said"),
    [
        ("rewrd", None, "alerts.rules.0.key: there is no metric 'rewrd'"),
        ("step_time", None, "it is called perf/fwd_bwd_s here"),
        ("reward", "ratio", "alerts.rules.0.reduce: reward has no ratio; choose one of mean"),
        ("custom/mine", None, "declare one of your own under [metrics]"),
    ],
)
def test_a_rule_about_what_is_not_measured_is_refused(key: str, reduce: Any, said: str) -> None:
    rule = AlertRule(name="mine", key=key, reduce=reduce, threshold=1.0, for_steps=1)
    with pytest.raises(UserError, match=r"alerts\.rules\.0") as refused:
        compile_rules(Alerts(rules=(rule,)), CATALOGUE)
    assert said in str(refused.value)


def test_a_metric_of_ones_own_can_ring() -> None:
    catalogue = with_custom({"custom/mine": CustomMetric(instrument="count", meaning="Mine.")})
    rule = AlertRule(name="mine", key="custom/mine", threshold=1.0, for_steps=1)
    found = compile_rules(Alerts(rules=(rule,)), catalogue)[-1]
    assert isinstance(found.by, KeyRule)
    assert found.by.reduction == "sum"
