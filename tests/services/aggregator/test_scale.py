"""The rules that say how many generators and scorers there should be."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.aggregator.scale import Calm, Fleet, Generators, generators, scorers
from services.aggregator.window import Step, Window

CALM = Calm(wanted_s=3600, steps_s=3590, wait_s=10, slots_starved_frac=0.7)


def window(*, wait_s: float = 6.0, num_steps: int = 20, **pooled: Any) -> Window:
    """Steps of 10 s and 32 groups, of which the trainer waits; slots are busy."""
    steps = tuple(Step(step=n, step_s=10.0, rollout_wait_s=wait_s) for n in range(num_steps))
    defaults: dict[str, Any] = {
        "groups_per_step": 32.0,
        "requests_waiting": 100.0,
        "requests_held": 16.0,
        "groups_waiting": 0.0,
        "samples_waiting": 3.0,
        "slots_busy_frac": 0.95,
        "slots_starved_frac": 0.0,
        "groups_generated": 32.0 * num_steps,
    }
    return Window(steps=steps, **{**defaults, **pooled})


def ask(seen: Window | None = None, *, live: int = 2, **rest: Any) -> Generators:
    """Of replicas that all produced in the whole window of 200 s."""
    seen = window() if seen is None else seen
    fleet = Fleet(live=live, unchanged_s=rest.pop("unchanged_s", 7200.0))
    given = {"replica_s": 200.0 * live, "quiet_s": 0.0, "calm": None, "over": False}
    return generators(seen, fleet, **{**given, **rest})


def test_more_by_what_one_makes_and_what_the_trainer_could_take() -> None:
    """2 replicas make 3.2 groups/s; without its wait the trainer would take 32 in 4 s."""
    found = ask()
    rates = [found.needed_groups_per_s, found.produced_groups_per_s, found.producing]
    assert rates == pytest.approx([8.0, 3.2, 2.0])
    assert found.replicas == 4  # 5 are enough; from 2, 4 at first
    assert "5 are enough" in found.reason
    assert all(each.holds for each in found.evidence)
    assert ask(live=4).replicas == 8
    assert ask(window(wait_s=2.0), live=4).replicas == 5


def test_those_that_start_are_no_evidence_for_more() -> None:
    """4 are live and 2 have produced: 5 are enough, and 4 are at most sensible."""
    assert ask(live=4, replica_s=400.0).replicas == 4
    # One produced for a quarter of the window: 2.25 replicas made what 2 made before.
    assert ask(live=3, replica_s=450.0).replicas == 5
    # More are live than are enough: they are not taken away by this rule.
    assert ask(window(wait_s=2.0), live=9, replica_s=400.0).replicas == 9


def test_no_more_than_there_are_requests_for() -> None:
    assert ask(window(requests_waiting=8.0)).replicas == 3
    assert ask(window(requests_waiting=0.0)).replicas == 2
    assert ask(window(requests_waiting=None)).replicas == 4


@pytest.mark.parametrize(
    ("against", "key"),
    [
        ({"wait_s": 0.99}, "perf/rollout_wait_s"),
        ({"slots_busy_frac": 0.79}, "rollout/slots_busy_frac"),
        ({"groups_waiting": 32.0}, "queue/waiting/groups"),
        ({"samples_waiting": 32.0}, "queue/waiting/samples"),
    ],
)
def test_what_speaks_against_more_is_said(against: dict[str, Any], key: str) -> None:
    found = ask(window(**against), live=3)
    assert found.replicas == 3
    assert found.reason.startswith(f"held: {key} is ")


def test_a_wait_in_every_third_step_is_a_wait() -> None:
    steps = tuple(
        Step(step=n, step_s=10.0, rollout_wait_s=9.0 if n % 3 == 0 else 0.0) for n in range(21)
    )
    found = ask(Window(**{**_fields(window()), "steps": steps}))
    assert found.replicas == 3
    assert "waits 30 % of the time" in found.reason


def test_too_little_to_go_by_holds_and_says_so() -> None:
    assert ask(window(num_steps=2), live=0).replicas == 1
    assert "2 steps of known length" in ask(window(num_steps=2), live=3).reason
    assert ask(window(slots_busy_frac=None), live=3).replicas == 3
    assert "rollout/slots_busy_frac" in ask(window(slots_busy_frac=None)).reason
    assert "count of groups made" in ask(window(groups_generated=None)).reason
    assert ask(replica_s=0.0, live=3).replicas == 3
    stale = ask(live=3, quiet_s=91.0)
    assert (stale.replicas, stale.reason) == (3, "held: the last step ended 91 s ago")
    assert ask(live=3, quiet_s=90.0).replicas == 6


def test_a_run_that_is_over_needs_none() -> None:
    assert ask(over=True).replicas == 0


def test_one_fewer_after_a_calm_time() -> None:
    seen = window(wait_s=0.0, slots_busy_frac=0.3)
    assert ask(seen, live=2, calm=CALM).replicas == 1
    assert ask(seen, live=5, calm=CALM).replicas == 4
    assert "trainer waited 0 %" in ask(seen, live=5, calm=CALM).reason


@pytest.mark.parametrize(
    "against",
    [
        {"calm": None},
        {"live": 1},
        {"unchanged_s": 3599.0},
        {"calm": Calm(wanted_s=3600, steps_s=3200, wait_s=0, slots_starved_frac=0.7)},
        {"calm": Calm(wanted_s=3600, steps_s=3600, wait_s=72, slots_starved_frac=0.7)},
        {"calm": Calm(wanted_s=3600, steps_s=3600, wait_s=0, slots_starved_frac=0.6)},
        {"calm": Calm(wanted_s=3600, steps_s=3600, wait_s=0, slots_starved_frac=None)},
    ],
)
def test_what_is_not_calm_takes_nobody_away(against: dict[str, Any]) -> None:
    asked = {"live": 2, "calm": CALM, **against}
    assert ask(window(wait_s=0.0), **asked).replicas == asked["live"]


@given(
    wait_s=st.floats(0, 10),
    live=st.integers(0, 50),
    producing=st.floats(0, 50),
    busy=st.none() | st.floats(0, 1),
    made=st.none() | st.floats(1, 1e6),
    requests=st.none() | st.floats(0, 1e4),
)
def test_it_is_a_number_within_bounds(
    wait_s: float,
    live: int,
    producing: float,
    busy: float | None,
    made: float | None,
    requests: float | None,
) -> None:
    seen = window(
        wait_s=wait_s, slots_busy_frac=busy, groups_generated=made, requests_waiting=requests
    )
    found = ask(seen, live=live, replica_s=200.0 * producing)
    assert max(1, live) <= found.replicas <= max(1, live, 2 * producing + 1)


# Scorers


def wanted(**given: Any) -> int:
    asked = {"waiting": 0.0, "held": 0.0, "live": 0, "max_groups": 8, "held_back": False, **given}
    asked.setdefault("peak", asked["waiting"] + asked["held"])
    return scorers(**asked).replicas


def test_one_group_is_enough_to_wake_from_none() -> None:
    assert wanted() == 0
    assert wanted(waiting=1.0) == 1


def test_what_waits_makes_more_and_what_is_held_keeps_them() -> None:
    assert wanted(waiting=20.0, held=16.0, live=2) == 5
    assert wanted(held=24.0, live=3) == 3  # nothing waits, all are busy
    assert wanted(held=13.0, live=3) == 3
    assert wanted(held=8.0, live=3) == 2
    assert wanted(held=0.0, peak=13.0, live=3) == 3  # a moment ago there was more
    assert wanted(held=0.0, live=3) == 0


def test_a_full_rollout_queue_is_no_reason_for_more() -> None:
    assert wanted(waiting=64.0, held=16.0, live=2, held_back=True) == 2
    assert wanted(waiting=64.0, held_back=True) == 1
    assert wanted(held=2.0, live=2, held_back=True) == 1


def test_without_a_look_at_the_queue_none_goes() -> None:
    assert wanted(peak=None, live=3) == 3
    assert wanted(peak=None, waiting=64.0, live=3) == 8


def _fields(seen: Window) -> dict[str, Any]:
    return {name: getattr(seen, name) for name in Window.__dataclass_fields__}
