"""Laws of the instruments: the histogram's error, and that order and split do not show."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.columns import histogram
from services.common.partials import LOG_GAMMA, Count, Observation, Ratio, Sum

finite = st.floats(min_value=-1e300, max_value=1e300).filter(lambda x: x == 0 or abs(x) > 1e-300)
anything = st.one_of(finite, st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0]))


def observed(values: list[float]) -> Observation:
    partial = Observation()
    for index, value in enumerate(values):
        partial.add(value, float(index))
    return partial


def middle(index: int) -> float:
    """What a reader takes for a value in bucket `index`."""
    return math.exp((index - 0.5) * LOG_GAMMA)


@given(finite)
def test_a_value_read_from_the_histogram_is_at_most_1_percent_off(value: float) -> None:
    partial = observed([value])
    if value == 0:
        assert (partial.zeros, partial.positive, partial.negative) == (1, {}, {})
        return
    buckets, empty = partial.positive, partial.negative
    if value < 0:
        buckets, empty = empty, buckets
    (index,) = buckets
    assert empty == {}
    assert middle(index) == pytest.approx(abs(value), rel=0.01)


@given(st.lists(finite.map(abs), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_percentile_is_at_most_1_percent_off(values: list[float], share: float) -> None:
    partial = observed(values)
    rank = math.ceil(share * len(values))
    below = [0.0] * partial.zeros
    for index in sorted(partial.positive):
        below += [middle(index)] * partial.positive[index]
    assert below[rank - 1] == pytest.approx(sorted(values)[rank - 1], rel=0.01)


@given(st.lists(anything, max_size=30), st.integers(0, 30), st.randoms(use_true_random=False))
def test_merged_parts_are_the_whole(values: list[float], cut: int, shuffled: random.Random) -> None:
    whole = observed(values)
    mixed = values.copy()
    shuffled.shuffle(mixed)
    left, right = observed(mixed[:cut]), observed(mixed[cut:])
    for first, second in ((left, right), (right, left)):
        merged = Observation()
        merged.merge(first)
        merged.merge(second)
        for name in ("n", "min", "max", "positive", "negative", "zeros"):
            assert getattr(merged, name) == getattr(whole, name), name
        for name in ("num_nan", "num_pos_inf", "num_neg_inf"):
            assert getattr(merged, name) == getattr(whole, name), name
        taken = [value for value in values if math.isfinite(value)]
        scale = math.fsum(abs(value) for value in taken)
        assert merged.sum == pytest.approx(math.fsum(taken), rel=1e-12, abs=scale * 1e-25)


@given(st.lists(st.integers(0, 2**40), max_size=30), st.randoms(use_true_random=False))
def test_integers_are_exact_in_any_order(values: list[int], shuffled: random.Random) -> None:
    total = Sum()
    for value in values:
        total.add(value)
    shuffled.shuffle(values)
    again = Sum()
    for value in values:
        part = Sum()
        part.add(value)
        again.merge(part)
    assert total.value == again.value == sum(values)


def test_what_is_large_does_not_swallow_what_is_small() -> None:
    count, ratio = Count(), Ratio()
    for value in [1e16, *[1.0] * 1000, -1e16]:
        count.total.add(value)
        ratio.over.add(value)
    assert (count.sum, ratio.numerator) == (1000.0, 1000.0)


def test_a_sum_beyond_a_double_is_infinite_and_not_nan() -> None:
    total = Sum()
    for _ in range(3):
        total.add(1.7e308)
    assert total.value == math.inf


def test_the_last_value_is_the_latest_and_not_the_last_merged() -> None:
    early, late = Observation(), Observation()
    early.add(1.0, 10.0)
    late.add(2.0, 11.0)
    late.merge(early)
    assert (late.last, late.last_s) == (2.0, 11.0)
    early.merge(late)
    assert (early.last, early.last_s) == (2.0, 11.0)
    late.merge(Observation())
    assert late.last == 2.0


def test_nan_and_infinities_are_counted_and_enter_nothing_else() -> None:
    partial = observed([math.nan, math.inf, -math.inf, math.nan])
    assert (partial.num_nan, partial.num_pos_inf, partial.num_neg_inf) == (2, 1, 1)
    assert (partial.n, partial.sum, partial.positive, partial.negative) == (0, 0.0, {}, {})
    assert histogram(partial) == {}


@given(st.floats(allow_nan=False), st.integers(1, 40))
def test_a_value_taken_several_times_is_as_often_there(value: float, times: int) -> None:
    at_once, one_by_one = Observation(), Observation()
    at_once.add(value, 1.0, times)
    for _ in range(times):
        one_by_one.add(value, 1.0)
    assert at_once.sum == pytest.approx(one_by_one.sum, rel=1e-12)
    at_once.total = one_by_one.total
    assert at_once == one_by_one


@given(st.lists(anything, min_size=1, max_size=30))
def test_values_taken_together_are_those_taken_one_by_one(values: list[float]) -> None:
    together, one_by_one = Observation(), observed(values)
    together.add_many(values, 7.0)
    taken = [value for value in values if math.isfinite(value)]
    scale = math.fsum(abs(value) for value in taken)
    assert together.sum == pytest.approx(one_by_one.sum, rel=1e-12, abs=scale * 1e-25)
    if taken:
        assert (together.last, together.last_s) == (taken[-1], 7.0)
    together.total, together.last_s = one_by_one.total, one_by_one.last_s
    assert together == one_by_one
