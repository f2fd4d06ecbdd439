import time

from benchmarks.overhead_service import Clock


def busy(seconds: float) -> str:
    """Use so much of this thread's CPU time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass
    return "done"


def test_a_call_within_a_timed_one_is_part_of_it() -> None:
    clock = Clock()
    inner = clock.timed(busy)
    outer = clock.timed(lambda: [inner(0.01), inner(0.01)])
    assert outer() == ["done", "done"]
    assert inner(0.01) == "done"
    spent = clock.result()
    assert (spent.calls, spent.inner_calls) == (2, 2)
    assert spent.seconds >= 0.025


def test_what_timing_costs_is_taken_off() -> None:
    clock = Clock()
    empty = clock.timed(lambda: None)
    for _ in range(5_000):
        empty()
    raw_s = clock.spent.seconds
    assert clock.result().seconds < raw_s
