"""Faults: what each is found in, and what a hair on the other side is not."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from services.aggregator.catalogue import CATALOGUE
from services.aggregator.faults import Fault, Symptoms, find_faults
from services.aggregator.lagging import Replica
from services.aggregator.lineage import InFlight
from services.aggregator.said import STATES, TERMINAL
from services.common.config import Recipe

HEALTHY: dict[str, Any] = {
    "gap": 0.004,
    "first_gap": 0.003,
    "kl_course": (2e-5, 3e-5, 1e-5, 4e-5, 2e-5, 3e-5, 2e-5, 5e-5, 1e-5, 3e-5, 4e-5, 2e-5),
    "dropped_samples": 1.0,
    "dropped_tokens": 900.0,
    "trained_samples": 99.0,
    "trained_tokens": 400.0,
    "reward": 0.5,
    "zero_signal_frac": 0.4,
    "scored": 950.0,
    "unscored": 50.0,
    "rewards_given": {"judge": 950.0, "exact_match": 950.0},
    "failed_calls": 2.0,
    "rejected": {},
    "recorder_dropped": 0.0,
    "stuck_after_s": 600.0,
}
"""Numbers of a run in which nothing is wrong."""


def group(state: str = "generating", holder: str | None = "generator-1") -> InFlight:
    return InFlight("0.17.1.1", 17, state, age_s=720.0, in_state_s=660.0, holder=holder)


STUCK: dict[str, Any] = {"stuck": group(), "num_stuck": 1}
SLOW = (
    Replica(name="generator-0", work=900.0, busy_s=30.0),
    Replica(name="generator-1", work=300.0, busy_s=25.0),
)
RISING = tuple(1e-5 * (number + 1) for number in range(12))
SICK: dict[str, dict[str, Any]] = {
    "engine-disagrees": {"gap": 0.0091},
    "engine-drifts": {"kl_course": RISING},
    "short-samples-favoured": {"dropped_samples": 11.0},
    "replica-lags": {"generators": SLOW},
    "reward-abstains": {"rewards_given": {"judge": 500.0, "exact_match": 950.0}},
    "conversations-unscored": {"scored": 900.0, "unscored": 100.0},
    "zero-signal": {"zero_signal_frac": 0.8},
    "stage-stalled": STUCK,
    "metrics-lost": {"rejected": {"unknown_key": 12.0}},
}
"""What is enough for each, beside what is healthy."""


def look(**found: Any) -> tuple[Fault, ...]:
    return find_faults(Symptoms(**{**HEALTHY, **found}))


def only(**found: Any) -> Fault:
    (fault,) = look(**found)
    return fault


def test_a_healthy_run_has_none() -> None:
    assert look() == ()
    assert find_faults(Symptoms()) == ()


@pytest.mark.parametrize("name", SICK)
def test_each_is_found_alone(name: str) -> None:
    found = only(**SICK[name])
    assert found.name == name
    assert found.evidence
    assert all(each.holds and each.value is not None for each in found.evidence)
    for each in found.evidence:
        assert each.value is not None
        assert each.threshold is not None
        beyond = {
            ">": each.value > each.threshold,
            ">=": each.value >= each.threshold,
            "<": each.value < each.threshold,
        }
        assert beyond[each.compare], each


def test_all_of_them_are_found_at_once() -> None:
    everything: dict[str, Any] = {}
    for found in SICK.values():
        everything |= found
    assert [fault.name for fault in look(**everything)] == [*SICK]


def without(found: Mapping[str, Any], absent: str) -> dict[str, Any]:
    """The symptoms as if one was not measured: as it is by default."""
    return {**HEALTHY, **found, absent: getattr(Symptoms(), absent)}


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("engine-disagrees", "gap"),
        ("engine-drifts", "kl_course"),
        ("short-samples-favoured", "dropped_samples"),
        ("short-samples-favoured", "dropped_tokens"),
        ("short-samples-favoured", "trained_samples"),
        ("short-samples-favoured", "trained_tokens"),
        ("replica-lags", "generators"),
        ("reward-abstains", "rewards_given"),
        ("conversations-unscored", "unscored"),
        ("zero-signal", "zero_signal_frac"),
        ("stage-stalled", "stuck"),
        ("stage-stalled", "stuck_after_s"),
        ("metrics-lost", "rejected"),
    ],
)
def test_what_was_not_measured_makes_no_fault(name: str, absent: str) -> None:
    assert find_faults(Symptoms(**without(SICK[name], absent))) == ()


@pytest.mark.parametrize(
    "almost",
    [
        {"gap": 0.0089},
        # Below float32's rounding three times nothing is nothing.
        {"gap": 1e-5, "first_gap": 1e-7},
        {"gap": 0.1, "first_gap": 0.05},
        {"gap": 0.1, "first_gap": None},
        # Rises, but not to twice what it was; from rounding to rounding; for nine points only.
        {"kl_course": tuple(1e-5 * (10 + number) for number in range(12))},
        {"kl_course": tuple(each * 8e-4 for each in RISING)},
        {"kl_course": RISING[:9]},
        # 2 of 102 samples.
        {"dropped_samples": 2.0, "trained_samples": 100.0},
        {"dropped_samples": 50.0, "dropped_tokens": 599.0},
        {"rewards_given": {"judge": 501.0}},
        {"scored": 901.0, "unscored": 99.0},
        {"zero_signal_frac": 0.79},
        {"rejected": {"unknown_key": 0.0}},
        # Nobody has scored anything yet.
        {"scored": None, "unscored": None, "rewards_given": {"judge": 0.0}},
    ],
)
def test_a_hair_on_the_other_side_is_none(almost: dict[str, Any]) -> None:
    assert look(**almost) == ()


@pytest.mark.parametrize(
    ("gap", "first_gap", "threshold"),
    [
        (0.02, 0.004, 0.012),
        # What is wrong from the first step on has no good step to be compared with.
        (0.3, 0.3, 0.1),
        (0.3, None, 0.1),
        (2e-5, 1e-7, 1e-5),
    ],
)
def test_the_gap_at_lag_0_is_compared_with_the_first_step(
    gap: float, first_gap: float | None, threshold: float
) -> None:
    (evidence,) = only(gap=gap, first_gap=first_gap).evidence
    assert evidence.key == "policy/logprob_gap_mean/0"
    assert evidence.value == gap
    assert evidence.threshold == pytest.approx(threshold)


def test_a_course_that_rises_with_every_version_says_from_where_to_where() -> None:
    """Quarters of three points: 2e-5 on average at first, 11e-5 at last; all 66 pairs rise."""
    found = only(**SICK["engine-drifts"])
    assert "from 2e-05 to 0.00011 nats" in found.sentence
    last, tau = found.evidence
    assert last.key == "kl/0"
    assert last.value == pytest.approx(11e-5)
    assert last.threshold == pytest.approx(4e-5)
    assert (tau.value, tau.threshold) == (1.0, 0.6)


def test_one_jump_is_no_drift_and_a_noisy_rise_is() -> None:
    """A jump has as many pairs that do not rise as its two levels are long; of a noisy rise most
    do."""
    assert look(kl_course=(1e-5,) * 6 + (9e-5,) * 6) == ()
    noisy = (1e-5, 3e-5, 2e-5, 4e-5, 3e-5, 6e-5, 5e-5, 7e-5, 9e-5, 8e-5, 7e-5, 9e-5)
    assert only(kl_course=noisy).name == "engine-drifts"
    assert look(kl_course=noisy[::-1]) == ()


def test_dropping_that_takes_the_long_ones_says_how_much() -> None:
    """11 of 110 samples with 900 tokens, where the 99 that were trained on have 400."""
    found = only(**SICK["short-samples-favoured"])
    assert found.sentence == (
        "dropping favours short samples: 10 % of the samples are dropped, with 900 tokens on "
        "average where those trained on have 400"
    )
    tokens, share = found.evidence
    assert (tokens.value, tokens.threshold) == (900.0, 600.0)
    assert (share.value, share.threshold) == (0.1, 0.02)


def test_dropping_that_takes_the_short_ones_is_none() -> None:
    assert look(dropped_samples=50.0, dropped_tokens=200.0) == ()


def test_each_replica_that_lags_is_a_fault_with_its_reason() -> None:
    scorers = (
        Replica(name="scorer-0", work=100.0, busy_s=10.0),
        Replica(name="scorer-1", work=20.0, busy_s=10.0),
    )
    behind = (Replica(name="generator-2", version=40.0), Replica(name="generator-3", version=45.0))
    found = look(scorers=scorers, generators=(*SLOW, *behind))
    assert [(fault.name, fault.sentence, fault.evidence[0].key) for fault in found] == [
        (
            "replica-lags",
            "generator-1 works at 40 % of the others' pace",
            "rollout/generated_tok_s",
        ),
        (
            "replica-lags",
            "generator-2 serves version 40 where another serves 45",
            "policy/served_version",
        ),
        ("replica-lags", "scorer-1 works at 20 % of the others' pace", "rollout/score_s"),
    ]
    assert all("restarting" in fault.knob for fault in found)


def test_the_reward_function_that_abstains_is_named_with_the_calls_that_failed() -> None:
    found = only(rewards_given={"judge": 0.0, "exact_match": 950.0}, failed_calls=40.0)
    assert found.sentence == (
        "the reward function judge abstains in 100 % of the conversations; 40 calls of reward "
        "functions failed"
    )
    assert found.evidence[0].key == "rewards/judge"


@pytest.mark.parametrize(
    ("state", "holder", "says", "look_at"),
    [
        ("dispatched", None, "generation stands still", "any process of generation is ready"),
        ("generating", "generator-1", "is with generator-1 for 660 s", "generator-1 lives"),
        ("generated", None, "waits for a scorer for 660 s", "any process of scoring is ready"),
        ("scoring", "scorer-0", "scoring stands still", "scorer-0 lives"),
        ("scored", None, "training stands still", "any process of training is ready"),
        ("queued", "trainer-0", "is with trainer-0 for 660 s", "trainer-0 lives"),
    ],
)
def test_a_stall_names_the_stage_and_the_group(
    state: str, holder: str | None, says: str, look_at: str
) -> None:
    found = only(stuck=group(state, holder), num_stuck=3)
    assert "group 0.17.1.1 (row 17) has been in flight for 720 s" in found.sentence
    assert found.sentence.endswith("; 3 groups are in flight for more than 600 s")
    assert says in found.sentence
    assert look_at in found.knob
    (evidence,) = found.evidence
    assert (evidence.value, evidence.compare, evidence.threshold) == (720.0, ">", 600.0)


def test_every_state_of_a_group_in_flight_can_stall() -> None:
    for state in set(STATES.values()) - set(TERMINAL):
        assert only(stuck=group(state, None), num_stuck=1).name == "stage-stalled"


def test_all_that_was_lost_is_one_fault() -> None:
    found = only(
        rejected={"unknown_key": 1200.0, "instrument": 1.0}, recorder_dropped=7.0, missing_batches=2
    )
    assert found.sentence == (
        "measurements are missing; rejected deltas: 1 (instrument), 1,200 (unknown key); partials "
        "dropped before they were sent: 7; batches that have not come, though later ones did: 2"
    )
    assert [each.value for each in found.evidence] == [1.0, 1200.0, 7.0, 2.0]


def test_evidence_is_of_declared_metrics_and_knobs_are_keys_of_the_recipe() -> None:
    named = {"oldest group in flight", "sample/dropped/{reason}"}
    for sick in SICK.values():
        for fault in look(**sick):
            for each in fault.evidence:
                assert each.key in named or CATALOGUE.find(each.key) is not None, each.key
            for section, key in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", fault.knob):
                model = Recipe.model_fields[section].annotation
                assert isinstance(model, type)
                assert issubclass(model, BaseModel)
                assert key in model.model_fields, f"{section}.{key}"


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_symptoms_are_measurements_only(wrong: float) -> None:
    with pytest.raises(ValueError, match="reward"):
        Symptoms(reward=wrong)
    with pytest.raises(ValueError, match="kl_course"):
        Symptoms(kl_course=(1.0, wrong))


AMOUNTS = st.none() | st.floats(0, 1e9)
NUMBERS: list[str] = [
    each.name for each in dataclasses.fields(Symptoms) if "float | None" in str(each.type)
]


@given(
    st.fixed_dictionaries(dict.fromkeys(NUMBERS, AMOUNTS)),
    st.dictionaries(st.sampled_from(["judge", "exact_match"]), st.floats(0, 1e9)),
    st.dictionaries(st.sampled_from(["unknown_key", "instrument"]), st.floats(0, 1e9)),
)
def test_any_symptoms_are_faults_that_can_be_said(
    numbers: dict[str, float | None], given_rewards: dict[str, float], rejected: dict[str, float]
) -> None:
    for fault in find_faults(Symptoms(**numbers, rewards_given=given_rewards, rejected=rejected)):  # type: ignore[arg-type]
        assert fault.sentence
        assert fault.knob
        for each in fault.evidence:
            assert each.holds
            assert each.value is not None
            assert math.isfinite(each.value)
