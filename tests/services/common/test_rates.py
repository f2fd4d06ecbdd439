"""Token buckets of peers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.rates import Rates


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_two_a_second() -> None:
    clock = Clock()
    rates = Rates(2.0, clock=clock)
    assert [rates.take("a") for _ in range(3)] == [0.0, 0.0, pytest.approx(0.5)]
    assert rates.take("b") == 0.0
    clock.now_s += 0.5
    assert rates.take("a") == 0.0
    assert rates.take("a") == pytest.approx(0.5)
    clock.now_s += 60
    assert [rates.take("a") for _ in range(3)] == [0.0, 0.0, pytest.approx(0.5)]


def test_less_than_one_a_second_lets_one_through() -> None:
    clock = Clock()
    rates = Rates(0.1, clock=clock)
    assert [rates.take("a"), rates.take("a")] == [0.0, pytest.approx(10.0)]


@given(
    per_s=st.floats(0.5, 1000),
    pauses_s=st.lists(st.floats(0, 2, allow_subnormal=False), max_size=200),
)
def test_never_more_than_the_rate_and_one_bucket(per_s: float, pauses_s: list[float]) -> None:
    clock = Clock()
    rates = Rates(per_s, clock=clock)
    let_in_s = []
    for pause_s in pauses_s:
        clock.now_s += pause_s
        wait_s = rates.take("a")
        if wait_s == 0.0:
            let_in_s.append(clock.now_s)
        else:  # what it says is right: not before, and then
            before = clock.now_s
            clock.now_s = before + wait_s * 0.99 - 1e-6
            assert rates.take("a") > 0.0 or wait_s < 1e-5
            clock.now_s = before
    for first, begin_s in enumerate(let_in_s):
        for last in range(first, len(let_in_s)):
            number = last - first + 1
            assert number <= max(1.0, per_s) + (let_in_s[last] - begin_s) * per_s + 1e-3


def test_memory_is_bounded() -> None:
    clock = Clock()
    rates = Rates(1.0, max_peers=100, clock=clock)
    for number in range(1000):
        rates.take(str(number))
        assert len(rates) <= 100
    assert rates.take("999") > 0.0  # those made last are kept
    clock.now_s += 10
    rates.take("new")
    for number in range(100):
        rates.take(f"again {number}")
    assert len(rates) <= 100
