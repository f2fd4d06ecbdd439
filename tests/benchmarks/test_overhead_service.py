import time

from benchmarks.overhead_service import Clock


def busy(seconds: float) -> str:
    """Use so much of this thread's CPU time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass
    return "done"


def test_a_call_within_a_timed_one_is_part_of_it() -> None:
    clock = Clock(empty_frac=0.0)
    inner = clock.timed(busy)
    outer = clock.timed(lambda: [inner(0.01), inner(0.01)])
    assert outer() == ["done", "done"]
    assert inner(0.01) == "done"
    spent = clock.result()
    assert (spent.calls, spent.inner_calls) == (2, 2)
    assert spent.seconds >= 0.025


def test_what_timing_costs_is_taken_off() -> None:
    clock, whole = Clock(empty_frac=0.5), Clock(empty_frac=0.0)
    for each in (clock, whole):
        empty = each.timed(lambda: None)
        for _ in range(5_000):
            empty()
    spent, raw = clock.result(), whole.result()
    assert spent.calls == raw.calls == 5_000
    assert spent.timing_s > 0 == raw.timing_s
    assert spent.seconds < raw.seconds / 2


def test_calls_that_were_not_timed_count_as_those_that_were() -> None:
    clock = Clock(empty_frac=0.5)
    slow, outer = clock.timed(busy), clock.timed(lambda: slow(0.001))
    assert [outer() for _ in range(40)] == ["done"] * 40
    spent = clock.result()
    assert (spent.calls, spent.inner_calls) == (40, 40)
    assert spent.seconds >= 0.04 * 0.9
