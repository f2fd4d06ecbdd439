import random

import pytest

from benchmarks.growth import SETTLED_AFTER_S, Memory, balanced, of_halves


def lived(
    memory: Memory, *, pid: int, begin_s: float, level_mib: float, slope_mib_s: float
) -> None:
    """A life of 20 minutes, looked at every 10 s, with some noise."""
    draw = random.Random(pid)
    memory.lives[pid, begin_s] += [
        (begin_s + t, level_mib + slope_mib_s * t + draw.gauss(0, 0.5)) for t in range(0, 1200, 10)
    ]


def test_a_leak_is_found_over_lives_of_different_levels() -> None:
    memory = Memory()
    lived(memory, pid=1, begin_s=0, level_mib=300, slope_mib_s=0.01)
    lived(memory, pid=2, begin_s=1300, level_mib=100, slope_mib_s=0.01)
    grown = memory.growth()
    assert grown is not None
    slope, error, _ = grown
    assert slope == pytest.approx(36, abs=2)
    assert 0 < error < 3


def test_restarts_of_a_process_that_leaks_nothing_are_no_growth() -> None:
    memory = Memory()
    for number in range(4):  # each begins higher than the one before
        level_mib = 100 + 50 * number
        lived(memory, pid=number, begin_s=1300 * number, level_mib=level_mib, slope_mib_s=0)
    grown = memory.growth()
    assert grown is not None
    slope, error, median = grown
    assert abs(slope) <= 2 * error
    assert 150 <= median <= 200


def test_what_a_process_takes_while_it_starts_is_no_growth() -> None:
    memory = Memory()
    points = [(t, min(t, SETTLED_AFTER_S)) for t in range(0, 1200, 10)]
    memory.lives[1, 0.0] += [(float(t), float(v)) for t, v in points]
    grown = memory.growth()
    assert grown is not None
    assert grown[0] == pytest.approx(0, abs=1e-6)


def test_nothing_is_said_of_lives_that_were_too_short() -> None:
    memory = Memory()
    memory.lives[1, 0.0] += [(0.0, 5.0), (SETTLED_AFTER_S, 5.0), (SETTLED_AFTER_S + 10, 5.0)]
    assert memory.growth() is None


def test_halves_of_what_was_seen() -> None:
    points = [{"groups": float(n)} for n in (1, 3, 5, 7)]
    assert of_halves(points, "groups") == (2.0, 6.0, 7.0)


def test_a_ledger_balances_when_every_group_is_somewhere_once() -> None:
    groups = {
        "dispatched": 10,
        "trained": 6,
        "rolled_back": 1,
        "dropped": {"stale": 2},
        "given_up": 1,
        "in_flight": 0,
        "trained_twice": 0,
    }
    assert balanced(groups)
    assert not balanced(groups | {"trained": 5})
    assert not balanced(groups | {"dispatched": 11, "in_flight": 1})
    assert not balanced(groups | {"trained_twice": 1})
