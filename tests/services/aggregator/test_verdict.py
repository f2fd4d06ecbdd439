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
from services.aggregator.lagging import Replica
from services.aggregator.rules import RULES, Name
from services.aggregator.verdict import judge
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
        ("sync-bound", WAITS, {"generator_paused_frac": 0.10}),
        ("training-bound", {"rollout_wait_s": 0.49}, {"samples_waiting": 32.0}),
        ("training-bound", {"rollout_wait_s": 0.0}, {"backpressure_s": 0.1}),
        ("training-bound", {"rollout_wait_s": 0.0}, {"slots_starved_frac": 0.2}),
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
        ("balanced", {"weight_sync_s": 0.99, **WAITS}, {"generator_paused_frac": 0.099}),
        # A pause costs nothing while the trainer has enough.
        ("balanced", {"rollout_wait_s": 0.99}, {"generator_paused_frac": 0.5}),
        ("balanced", {"rollout_wait_s": 0.5}, {"samples_waiting": 32.0}),
        ("balanced", {"rollout_wait_s": 0.49}, {"samples_waiting": 31.9}),
        ("balanced", {"rollout_wait_s": 0.49}, {"backpressure_s": 0.0}),
        ("balanced", {"rollout_wait_s": 0.49}, {"slots_starved_frac": 0.19}),
        # It waits, and the wait is shorter than its work.
        ("balanced", {"rollout_wait_s": 0.0, "straggler_wait_s": 0.5}, {"samples_waiting": 40.0}),
        ("straggler-bound", {"rollout_wait_s": 0.0, "straggler_wait_s": 1.0}, PACING),
        ("balanced", {"rollout_wait_s": 0.49}, {"slots_starved_frac": None}),
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
    waits = {"rollout_wait_s": 5.0}
    assert judge(window({"weight_sync_s": 1.0, **waits}, generator_paused_frac=0.3)).share == 0.3
    assert judge(window({"weight_sync_s": 4.0, **waits}, generator_paused_frac=0.3)).share == 0.4


def test_a_pause_costs_no_more_than_the_trainer_waits() -> None:
    paused: dict[str, Any] = {"generator_paused_frac": 0.6}
    assert judge(window({"rollout_wait_s": 2.0}, **paused)).share == pytest.approx(0.2)
    assert judge(window({"rollout_wait_s": 0.5, "weight_sync_s": 1.0}, **paused)).share == 0.1


def test_what_generators_are_paused_is_not_generations() -> None:
    """Slots are busy while their engine is paused: 7 s of waiting, 4 s of them for new weights."""
    parts = {"rollout_wait_s": 7.0, "fwd_bwd_s": 0.8}
    found = judge(window(parts, **GENERATION, generator_paused_frac=0.4))
    assert found.name == "sync-bound"
    assert found.share == pytest.approx(0.4)
    found = judge(window(parts, **GENERATION, generator_paused_frac=0.3))
    assert found.name == "generation-bound"
    assert found.share == pytest.approx(0.4)
    assert "the trainer waits 70 % of each step" in wording.sentence(found)
    found = judge(window(parts, **GENERATION, generator_paused_frac=0.09))
    assert found.name == "generation-bound"
    assert found.share == pytest.approx(0.7)


def lumps(part: str, seconds: float, *, every: int, num_steps: int = 20) -> tuple[Step, ...]:
    """Steps of 4 s, and every so many one that is longer by a part."""
    work: dict[str, float] = {**SMOOTH, "rollout_wait_s": 0.2, "fwd_bwd_s": 1.5}
    return tuple(
        Step(step=n, step_s=4.0 + seconds, **{**work, part: seconds})
        if n % every == 0
        else Step(step=n, step_s=4.0, **{**work, part: 0.0})
        for n in range(1, num_steps + 1)
    )


@pytest.mark.parametrize(
    ("name", "part"), [("sync-bound", "weight_sync_s"), ("straggler-bound", "straggler_wait_s")]
)
def test_what_comes_every_fourth_step_costs_what_it_costs_on_the_average(
    name: Name, part: str
) -> None:
    """4 s every fourth step: 20 s of 100, of a step of 5 s on the average, though the median step
    has none of it."""
    found = judge(dataclasses.replace(window(), steps=lumps(part, 4.0, every=4)))
    assert (found.name, found.confidence) == (name, "high")
    assert found.share == pytest.approx(0.2)
    assert found.step_s == pytest.approx(5.0)


def test_what_came_once_is_said_with_little_confidence() -> None:
    found = judge(dataclasses.replace(window(), steps=lumps("weight_sync_s", 12.0, every=20)))
    assert (found.name, found.confidence) == ("sync-bound", "low")


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


def test_the_tool_that_takes_longest_is_named() -> None:
    latencies = {"search": 50.0, "run": 70.0}
    slow = judge(window(WAITS, **GENERATION, tool_s=6.0, env_s=1.0, tool_latency_s=latencies))
    assert "the tool run faster" in wording.knob(slow)
    slow = judge(window(WAITS, **GENERATION, tool_s=1.0, env_s=6.0, tool_latency_s=latencies))
    assert "the environment faster" in wording.knob(slow)
    lived = {"sandbox": 400.0, "board": 20.0}
    slow = judge(window(WAITS, **GENERATION, env_s=6.0, environment_s=lived))
    assert slow.culprit == "the environment sandbox"
    assert "make the environment sandbox faster" in wording.knob(slow)
    assert "the tools faster" in wording.knob(judge(window(WAITS, **GENERATION, tool_s=6.0)))


def test_the_reward_function_that_takes_longest_is_named() -> None:
    functions = {"exact_match": 0.5, "judge": 70.0}
    slow = judge(window(WAITS, **SCORING, function_s=functions))
    assert slow.culprit == "the reward function judge"
    assert "make the reward function judge faster (rewards.functions)" in wording.knob(slow)
    unknown = judge(window(WAITS, **SCORING))
    assert "make the reward functions faster" in wording.knob(unknown)
    assert judge(window(WAITS, **GENERATION, function_s=functions)).culprit is None


SLOW = (
    Replica(name="generator-0", work=900.0, busy_s=30.0),
    Replica(name="generator-1", work=300.0, busy_s=25.0),
)
"""12 tokens a second of a slot where the other makes 30."""


@pytest.mark.parametrize(
    ("parts", "pooled", "replica"),
    [
        (WAITS, {**GENERATION, "generators": SLOW}, "generator-1"),
        (WAITS, {**GENERATION, "generators": SLOW, "tool_s": 6.0}, "generator-1"),
        (WAITS, {**SCORING, "scorers": SLOW}, "generator-1"),
        (WAITS, {**SCORING, "generators": SLOW}, None),
        (WAITS, {**GENERATION, "generators": SLOW[:1]}, None),
        ({"weight_sync_s": 1.0}, {"generators": SLOW}, None),
        ({"straggler_wait_s": 1.0}, {"generators": SLOW}, "generator-1"),
        ({"straggler_wait_s": 1.0}, {"scorers": SLOW}, None),
    ],
)
def test_the_replica_that_lags_in_the_stage_to_blame_is_named(
    parts: dict[str, float], pooled: dict[str, Any], replica: str | None
) -> None:
    found = judge(window(parts, **pooled))
    assert (None if found.lag is None else found.lag.replica) == replica
    first = "look at generator-1 first, which works at 40 % of the others' pace; then: "
    assert wording.knob(found).startswith(first) == (replica is not None)


def test_of_a_slow_sync_the_replica_that_is_paused_most_is_named() -> None:
    fleet = tuple(
        Replica(name=f"generator-{n}", paused_frac=frac)
        for n, frac in enumerate((0.02, 0.3, 0.02, 0.04, 0.4))
    )
    found = judge(window({"weight_sync_s": 1.0}, generators=fleet))
    assert wording.knob(found).startswith(
        "look at generator-4 first, which is paused 40 % of the time, the others 3 %; then: publish"
    )


def test_what_the_parts_leave_unexplained_is_a_share_of_the_step() -> None:
    parts = {"rollout_wait_s": 1.0, "fwd_bwd_s": 3.5, "unaccounted_s": 3.3}
    assert judge(window(parts)).unaccounted_share == pytest.approx(0.33)
    assert judge(window({"unaccounted_s": None})).unaccounted_share is None
    # Timed apart from the step, the parts may exceed it by a tick.
    assert judge(window({"unaccounted_s": -0.01})).unaccounted_share == 0.0


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
REPLICAS = st.lists(
    st.builds(
        Replica,
        name=st.sampled_from(["generator-0", "generator-1", "generator-2"]),
        work=AMOUNTS,
        busy_s=AMOUNTS,
        paused_frac=AMOUNTS,
        version=AMOUNTS,
    ),
    max_size=3,
).map(tuple)
FLEETS = ("generators", "scorers")
POOLED = [
    each.name
    for each in dataclasses.fields(Window)
    if each.name not in ("steps", *BY_NAME, *FLEETS)
]
WINDOWS = st.builds(
    Window,
    steps=st.lists(STEPS, max_size=25).map(tuple),
    **dict.fromkeys(POOLED, AMOUNTS),
    **dict.fromkeys(FLEETS, REPLICAS),
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
