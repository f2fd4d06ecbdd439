"""The rule for generators in a closed loop: it finds the right number, stays there, and follows."""

import itertools
import math

import pytest

from tests.services.aggregator.fleet_model import CALM_S, World, numbers


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("ratio", [0.6, 2.03, 3.4, 6.4])
def test_it_finds_the_number_that_is_enough(ratio: float, noise: float) -> None:
    world = World(ratio=ratio, noise=noise)
    world.run(hours=2)
    found = numbers(world.changes)
    assert math.ceil(0.9 * ratio) <= world.wanted <= math.ceil(1.1 * ratio)
    assert found == sorted(set(found))  # upwards only
    assert world.waits(since_s=5400) < 0.11
    assert all(at_s < 5400 for at_s, _ in world.changes)


@pytest.mark.parametrize("start_s", [0, 300, 1500])
def test_replicas_that_start_are_not_asked_for_twice(start_s: int) -> None:
    world = World(ratio=3.4, start_s=start_s, noise=0.3)
    world.run(hours=2)
    assert world.wanted == 4
    assert numbers(world.changes) == sorted(set(numbers(world.changes)))
    for answer in world.answers:
        # Those that start make nothing yet: they are no evidence that more are needed.
        assert answer.replicas <= max(1, math.ceil(2 * (answer.producing or 0.5)))


def test_a_trainer_that_gets_faster_gets_more() -> None:
    world = World(ratio=2.0, replicas=2)
    world.run(hours=1)
    assert world.changes == []
    world.work_s /= 2
    world.run(hours=1)
    assert world.wanted == 4
    assert world.waits(since_s=world.now_s - 1200) < 0.1


@pytest.mark.parametrize("seed", range(2))
def test_a_number_that_is_right_stays(seed: int) -> None:
    world = World(ratio=3.8, replicas=4, noise=0.5, seed=seed)
    world.run(hours=3)
    assert set(numbers(world.changes)) <= {5}


def test_replicas_too_many_go_one_by_one() -> None:
    world = World(ratio=2.0, replicas=5)
    world.run(hours=3.5)
    assert numbers(world.changes) == [4, 3]  # at 3, a third of the slots is free: not one and more
    times_s = [at_s for at_s, _ in world.changes]
    assert all(b - a > CALM_S for a, b in itertools.pairwise(times_s))
    assert world.waits(since_s=0) < 0.02


def test_where_free_slots_deceive_a_try_an_hour_is_all_it_costs() -> None:
    """Of a saturated engine slots are free although it can do no more."""
    world = World(ratio=2.3, replicas=3, saturated=True, noise=0.2)
    world.run(hours=5)
    assert world.wanted in (2, 3)
    downs = [at_s for at_s, number in world.changes if number == 2]
    assert 2 <= len(downs) <= 5
    assert all(b - a > CALM_S for a, b in itertools.pairwise(downs))
    assert world.waits(since_s=0) < 0.05


def test_what_pacing_holds_back_is_not_scaled_without_end() -> None:
    """With 14 replicas there would be 112 slots; 80 groups may be under way, a step's included."""
    world = World(ratio=14.0)
    world.run(hours=3)
    assert world.wanted <= 10
    assert world.waits(since_s=7200) > 0.2  # more replicas would find nothing to do
