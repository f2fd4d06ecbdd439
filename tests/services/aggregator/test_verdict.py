import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from services.aggregator import wording
from services.aggregator.prediction import stage_times
from services.aggregator.rules import RULES, Name
from services.aggregator.verdict import Verdict, judge
from services.aggregator.window import STEP_PARTS, Step, Window
from services.common.config import Recipe

SMOOTH: dict[str, float] = {
    "rollout_wait_s": 0.7,
    "straggler_wait_s": 0.0,
    "data_s": 1.0,
    "fwd_bwd_s": 7.0,
    "optimizer_s": 0.7,
    "weight_sync_s": 0.5,
    "unaccounted_s": 0.1,
}
"""A step of 10 s of which no rule says anything: the trainer waits 7 %."""

QUIET: dict[str, Any] = {
    "groups_per_step": 32.0,
    "groups_waiting": 1.0,
    "samples_waiting": 3.0,
    "slots_busy_frac": 0.5,
    "slots_starved_frac": 0.0,
    "scorer_busy_frac": 0.1,
    "outstanding_frac": 0.5,
    "generator_paused_frac": 0.01,
    "duration_s": 10.0,
    "groups_generated": 640.0,
    "groups_scored": 640.0,
}

GENERATION: dict[str, Any] = {"slots_busy_frac": 0.8}
SCORING: dict[str, Any] = {"groups_waiting": 32.0, "scorer_busy_frac": 0.8}
PACING: dict[str, Any] = {"outstanding_frac": 0.95, "slots_starved_frac": 0.2}
WAITS = {"rollout_wait_s": 1.0}


def window(
    parts: Mapping[str, float | None] | None = None,
    *,
    num_steps: int = 20,
    **pooled: Any,
) -> Window:
    """Equal steps of 10 s, as SMOOTH and QUIET but for what is given."""
    each = {**SMOOTH, **(parts or {})}
    steps = tuple(Step(step=n, step_s=10.0, **each) for n in range(1, num_steps + 1))
    return Window(steps=steps, **{**QUIET, **pooled})


def verdict(parts: Mapping[str, float | None] | None = None, **rest: Any) -> Name:
    return judge(window(parts, **rest)).name


def test_a_run_that_nothing_holds_back_is_balanced() -> None:
    found = judge(window())
    assert (found.name, found.share, found.confidence, found.missing) == (
        "balanced",
        None,
        "high",
        (),
    )
    assert found.unaccounted_share == pytest.approx(0.01)
    assert found.step_s_if_free is None
    assert len(found.evidence) == len({(each.key, each.compare) for each in found.evidence})
    assert "the trainer waits 7 % of each step (0.7 of 10 s)" in wording.sentence(found)


@pytest.mark.parametrize(
    ("name", "parts", "pooled"),
    [
        ("generation-bound", WAITS, GENERATION),
        ("environment-bound", WAITS, {**GENERATION, "tool_s": 3.0, "env_s": 2.0}),
        ("environment-bound", WAITS, {**GENERATION, "tool_s": 5.0}),
        ("environment-bound", WAITS, {**GENERATION, "env_s": 5.0}),
        ("scoring-bound", WAITS, SCORING),
        ("scoring-bound", WAITS, {"scorer_busy_frac": 0.8, "score_block_s": 0.1}),
        ("straggler-bound", {"straggler_wait_s": 1.0}, {}),
        ("pacing-bound", WAITS, PACING),
        ("sync-bound", {"weight_sync_s": 1.0}, {}),
        ("sync-bound", {}, {"generator_paused_frac": 0.10}),
        ("training-bound", {"rollout_wait_s": 0.49}, {"samples_waiting": 32.0}),
        ("training-bound", {"rollout_wait_s": 0.0}, {"backpressure_s": 0.1}),
    ],
)
def test_every_row_holds_at_its_thresholds(
    name: Name, parts: dict[str, float], pooled: dict[str, Any]
) -> None:
    found = judge(window(parts, **pooled))
    assert (found.name, found.confidence) == (name, "high")
    assert wording.sentence(found).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("instead", "parts", "pooled"),
    [
        ("balanced", {"rollout_wait_s": 0.99}, GENERATION),
        ("balanced", WAITS, {"slots_busy_frac": 0.79}),
        ("balanced", WAITS, {**GENERATION, "groups_waiting": 32.0}),
        ("balanced", WAITS, {**GENERATION, "samples_waiting": 32.0}),
        ("generation-bound", WAITS, {**GENERATION, "tool_s": 3.0, "env_s": 1.9}),
        ("balanced", {"rollout_wait_s": 0.99}, SCORING),
        ("balanced", WAITS, {**SCORING, "groups_waiting": 31.9}),
        ("balanced", WAITS, {**SCORING, "groups_waiting": 31.9, "score_block_s": 0.0}),
        ("balanced", WAITS, {**SCORING, "scorer_busy_frac": 0.79}),
        ("balanced", {"straggler_wait_s": 0.99}, {}),
        ("balanced", {"rollout_wait_s": 0.99}, PACING),
        ("balanced", WAITS, {**PACING, "outstanding_frac": 0.94}),
        ("balanced", WAITS, {**PACING, "slots_starved_frac": 0.19}),
        ("balanced", {"weight_sync_s": 0.99}, {"generator_paused_frac": 0.099}),
        ("balanced", {"rollout_wait_s": 0.5}, {"samples_waiting": 32.0}),
        ("balanced", {"rollout_wait_s": 0.49}, {"samples_waiting": 31.9}),
        ("balanced", {"rollout_wait_s": 0.49}, {"backpressure_s": 0.0}),
    ],
)
def test_a_hair_on_the_other_side_does_not(
    instead: Name, parts: dict[str, float], pooled: dict[str, Any]
) -> None:
    assert verdict(parts, **pooled) == instead


def test_the_largest_share_wins() -> None:
    parts = {"rollout_wait_s": 2.0, "weight_sync_s": 3.0}
    assert verdict(parts, **GENERATION) == "sync-bound"
    assert verdict({**parts, "rollout_wait_s": 3.1}, **GENERATION) == "generation-bound"
    idle = {"rollout_wait_s": 0.1, "weight_sync_s": 1.0}
    assert verdict(idle, samples_waiting=40.0) == "training-bound"


def test_the_share_of_sync_is_the_larger_one() -> None:
    assert judge(window({"weight_sync_s": 1.0}, generator_paused_frac=0.3)).share == 0.3
    assert judge(window({"weight_sync_s": 4.0}, generator_paused_frac=0.3)).share == 0.4


@pytest.mark.parametrize(
    ("first", "parts", "pooled"),
    [
        ("environment-bound", WAITS, {**GENERATION, "tool_s": 9.0}),
        ("generation-bound", WAITS, {**GENERATION, "scorer_busy_frac": 0.9, "score_block_s": 1.0}),
        ("generation-bound", WAITS, {**GENERATION, **PACING}),
        ("scoring-bound", WAITS, {**SCORING, **PACING}),
        ("scoring-bound", {**WAITS, "straggler_wait_s": 1.0}, SCORING),
        ("straggler-bound", {**WAITS, "straggler_wait_s": 1.0}, PACING),
        ("pacing-bound", {**WAITS, "weight_sync_s": 1.0}, PACING),
    ],
)
def test_ties_go_by_the_order_of_the_table(
    first: Name, parts: dict[str, float], pooled: dict[str, Any]
) -> None:
    assert verdict(parts, **pooled) == first


def test_absent_evidence_is_named_and_nothing_is_claimed() -> None:
    found = judge(window(WAITS, slots_busy_frac=None))
    assert (found.name, found.confidence) == ("not enough data", None)
    assert found.missing == ("rollout/slots_busy_frac",)
    absent = next(each for each in found.evidence if each.key == "rollout/slots_busy_frac")
    assert (absent.value, absent.holds) == (None, False)
    assert wording.sentence(found) == (
        "not enough data: of the last 20 steps there is no rollout/slots_busy_frac"
    )
    assert "which service does not report" in wording.knob(found)


def test_absent_evidence_that_decides_nothing_is_not_asked_for() -> None:
    """The trainer hardly waits: whatever the slots do, generation does not hold it back."""
    found = judge(window(slots_busy_frac=None, slots_starved_frac=None, outstanding_frac=None))
    assert (found.name, found.missing) == ("balanced", ())


def test_another_verdict_stands_beside_absent_evidence() -> None:
    found = judge(window({**WAITS, "weight_sync_s": 2.0}, slots_busy_frac=None))
    assert (found.name, found.missing) == ("sync-bound", ("rollout/slots_busy_frac",))
    assert found.step_s_if_free is None


def test_confidence_is_low_where_what_is_missing_may_cost_more() -> None:
    parts = {"rollout_wait_s": 2.0, "weight_sync_s": 2.0}
    assert judge(window(parts, slots_busy_frac=None)).confidence == "high"
    parts["rollout_wait_s"] = 2.1
    found = judge(window(parts, slots_busy_frac=None))
    assert (found.name, found.confidence) == ("sync-bound", "low")
    assert judge(window(parts)).confidence == "high"
    unknown = judge(window({"rollout_wait_s": None, "weight_sync_s": 2.0}, **GENERATION))
    assert (unknown.name, unknown.confidence) == ("sync-bound", "low")


def test_a_step_of_unknown_groups_leaves_the_queues_undecided() -> None:
    found = judge(window(WAITS, **{**GENERATION, "groups_per_step": None}))
    assert found.name == "not enough data"
    assert found.missing == ("batch/groups_per_step",)


def test_what_only_some_runs_have_is_never_missing() -> None:
    found = judge(window({"straggler_wait_s": None}))
    assert (found.name, found.missing) == ("balanced", ())


def test_a_part_that_most_steps_lack_is_absent() -> None:
    lacking = window({"rollout_wait_s": None}, num_steps=11).steps
    with_wait = window(WAITS, num_steps=10).steps
    mixed = dataclasses.replace(window(**GENERATION), steps=lacking + with_wait)
    assert judge(mixed).missing == ("perf/rollout_wait_s",)
    mixed = dataclasses.replace(mixed, steps=lacking[:10] + with_wait)
    assert (judge(mixed).name, judge(mixed).confidence) == ("generation-bound", "low")


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_too_few_steps_are_not_judged(num_steps: int) -> None:
    found = judge(window(num_steps=num_steps))
    assert (found.name, found.share, found.confidence) == ("not enough data", None, None)
    assert (found.num_steps, found.missing) == (num_steps, ("perf/step_s",))
    assert f"the length of {num_steps} steps is known" in wording.sentence(found)
    assert "ask again" in wording.knob(found)
    assert verdict(num_steps=3) == "balanced"


@pytest.mark.parametrize(
    ("num_holding", "num_steps", "confidence"),
    [
        (20, 20, "high"),
        (16, 20, "high"),
        (15, 20, "medium"),
        (11, 20, "medium"),
        (19, 19, "medium"),
        (3, 3, "medium"),
    ],
)
def test_confidence_is_of_the_steps_in_which_the_conditions_hold(
    num_holding: int, num_steps: int, confidence: str
) -> None:
    holding = window({"rollout_wait_s": 4.0}, num_steps=num_holding).steps
    others = window(num_steps=num_steps - num_holding).steps
    found = judge(dataclasses.replace(window(**GENERATION), steps=holding + others))
    assert (found.name, found.confidence) == ("generation-bound", confidence)


def test_half_of_the_steps_is_low_confidence() -> None:
    holding = window({"rollout_wait_s": 4.0}, num_steps=10).steps
    steps = holding + window(num_steps=10).steps
    found = judge(dataclasses.replace(window(**GENERATION), steps=steps))
    assert (found.name, found.confidence) == ("generation-bound", "low")
    assert found.share == pytest.approx((4.0 + 0.7) / 2 / 10)


def test_stage_times_are_for_the_groups_of_a_step() -> None:
    """In 200 s slots were 80 % busy and 320 groups were made: 0.5 s a group, 16 s for 32."""
    stages = stage_times(window(slots_busy_frac=0.8, groups_generated=320.0))
    assert stages.generation_s == pytest.approx(16.0)
    assert stages.scoring_s == pytest.approx(1.0)
    assert stages.training_s == pytest.approx(9.2)
    assert stage_times(window(groups_generated=None)).generation_s is None


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
            "for free a step would take 1.2 s; 2 times as fast, 1.5 s",
        ),
        (
            judge(river({"rollout_wait_s": 1.9}, tool_s=5.0)),
            "environment-bound: the trainer waits 61 % of each step (1.9 of 3.1 s) for "
            "conversations that spend 50 % of their time in tools and the environment; with tools "
            "and environment for free a step would take 1.5 s",
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
            "weight sync for free a step would take 1.1 s",
        ),
        (
            judge(river({"rollout_wait_s": 0.2}, generator_paused_frac=0.3)),
            "sync-bound: generators are paused 30 % of the time for new weights; with weight sync "
            "for free a step would take 2.1 s",
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


def test_the_tool_that_takes_longest_is_named() -> None:
    latencies = {"search": 50.0, "run": 70.0}
    slow = judge(window(WAITS, **GENERATION, tool_s=6.0, env_s=1.0, tool_latency_s=latencies))
    assert "the tool run faster" in wording.knob(slow)
    slow = judge(window(WAITS, **GENERATION, tool_s=1.0, env_s=6.0, tool_latency_s=latencies))
    assert "the environment faster" in wording.knob(slow)
    assert "the tools faster" in wording.knob(judge(window(WAITS, **GENERATION, tool_s=6.0)))


def test_the_reward_function_that_takes_longest_is_named() -> None:
    functions = {"exact_match": 0.5, "judge": 70.0}
    slow = judge(window(WAITS, **SCORING, function_s=functions))
    assert slow.culprit == "the reward function judge"
    assert "make the reward function judge faster (rewards.functions)" in wording.knob(slow)
    unknown = judge(window(WAITS, **SCORING))
    assert "make the reward functions faster" in wording.knob(unknown)
    assert judge(window(WAITS, **GENERATION, function_s=functions)).culprit is None


def test_knobs_are_keys_of_the_recipe() -> None:
    assert {rule.name for rule in RULES} < set(wording.KNOBS)
    for text in wording.KNOBS.values():
        for section, key in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", text):
            model = Recipe.model_fields[section].annotation
            assert isinstance(model, type), section
            assert issubclass(model, BaseModel), section
            assert key in model.model_fields, f"{section}.{key}"


@pytest.mark.parametrize("speed_up", [0.5, 0.0, -1.0, math.inf, math.nan])
def test_a_speed_up_that_is_none_is_refused(speed_up: float) -> None:
    with pytest.raises(ValueError, match="speed_up"):
        judge(window(), speed_up=speed_up)


@pytest.mark.parametrize("wrong", [{"step_s": 0.0}, {"step_s": math.nan}, {"data_s": math.inf}])
def test_steps_and_windows_hold_measurements_only(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="step 1: "):
        Step(**{"step": 1, "step_s": 1.0, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="duration_s"):
        Window(steps=(), duration_s=math.nan)


AMOUNTS = st.none() | st.floats(-0.5, 100)
STEPS = st.builds(
    Step,
    step=st.integers(0, 1000),
    step_s=st.floats(1e-3, 100),
    **dict.fromkeys(STEP_PARTS, AMOUNTS),
)
BY_NAME = ("tool_latency_s", "function_s")
POOLED = [each.name for each in dataclasses.fields(Window) if each.name not in ("steps", *BY_NAME)]
WINDOWS = st.builds(
    Window,
    steps=st.lists(STEPS, max_size=25).map(tuple),
    **dict.fromkeys(POOLED, AMOUNTS),
)


@given(WINDOWS, st.none() | st.floats(1, 1e6))
def test_any_window_has_one_verdict_in_numbers_that_json_knows(
    some: Window, speed_up: float | None
) -> None:
    found = judge(some, speed_up=speed_up)
    assert judge(some, speed_up=speed_up) == found
    assert wording.sentence(found).startswith(f"{found.name}: ")
    assert wording.knob(found)
    json.dumps(dataclasses.asdict(found), allow_nan=False)
    for share in (found.share, found.unaccounted_share):
        assert share is None or 0 <= share <= 1
    for predicted in (found.step_s_if_free, found.step_s_at_speed_up):
        assert predicted is None or (found.step_s is not None and 0 <= predicted <= found.step_s)
    if found.step_s_if_free is not None and found.step_s_at_speed_up is not None:
        assert found.step_s_if_free <= found.step_s_at_speed_up + 1e-9
    assert (found.name == "not enough data") == (found.confidence is None)
    assert found.name != "balanced" or found.missing == ()


@given(WINDOWS)
def test_what_is_absent_holds_nothing(some: Window) -> None:
    for each in judge(some).evidence:
        assert each.holds is False or (each.value is not None and each.threshold is not None)
