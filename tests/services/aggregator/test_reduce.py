import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from headrace.v1 import metrics_pb2 as wire
from hypothesis import given
from hypothesis import strategies as st

from services.aggregator.batch import decode
from services.aggregator.reduce import (
    INSTRUMENT_OF,
    REDUCTIONS,
    Count,
    Observation,
    Partial,
    Ratio,
    Reduction,
    Sum,
    reduce,
)
from services.aggregator.rows import pool
from tests.services.aggregator.making import (
    INF,
    NAN,
    Build,
    Producer,
    count,
    deltas,
    observed,
    ratio,
    to_row,
)

numbers = st.floats(-1e6, 1e6)
any_number = st.floats(allow_nan=True, allow_infinity=True, width=32)


def partial_of(build: Build) -> Partial:
    """Through the wire, as a producer's partial reaches the aggregator."""
    batch = decode(Producer("p").request([("custom/x", build)]))
    assert batch.rejected == ()
    (delta,) = deltas(batch)
    return pool(delta.instrument, [delta.row])


def merge(*partials: Partial) -> Partial:
    """As rows of one window are pooled."""
    return pool(INSTRUMENT_OF[type(partials[0])], [to_row(partial) for partial in partials])


def observation(values: list[float], at_s: float = 0.0) -> Observation:
    partial = partial_of(observed(values))
    assert isinstance(partial, Observation)
    return partial if partial.last is None else replace(partial, last_at_s=at_s)


class TestRatioOfSums:
    """C26."""

    def test_pools_numerators_and_denominators_in_any_order_and_split(self) -> None:
        reports = [partial_of(ratio(*r)) for r in ((3, 12), (3, 4), (0, 0))]
        for order in itertools.permutations(reports):
            assert reduce(merge(*order), "ratio") == 0.375
            first, second, third = order
            assert reduce(merge(first, merge(second, third)), "ratio") == 0.375
        assert reduce(merge(reports[0], reports[1]), "ratio") == 0.375

    def test_no_denominator_is_absent(self) -> None:
        assert reduce(partial_of(ratio(0, 0)), "ratio") is None

    def test_events_without_exposure_are_refused(self) -> None:
        batch = decode(Producer("p").request([("custom/r", ratio(2, 0))]))
        assert deltas(batch) == []
        assert [(each.key, each.reason) for each in batch.rejected] == [("custom/r", "bad_value")]


class TestNotFinite:
    """C27."""

    def test_nan_is_counted_and_enters_no_mean(self) -> None:
        partial = observation([0.5, NAN, 0.8])
        assert reduce(partial, "mean") == pytest.approx(0.65)
        assert partial.num_nan == 1

    @pytest.mark.parametrize("values", [[NAN, 1.0], [1.0, NAN]])
    def test_nan_does_not_hide_the_maximum(self, values: list[float]) -> None:
        assert reduce(observation(values), "max") == 1.0

    @pytest.mark.parametrize("reduction", REDUCTIONS["observation"])
    def test_nothing_finite_is_absent_and_can_be_told_apart(self, reduction: Reduction) -> None:
        partial = observation([NAN, INF, -INF, -INF])
        assert reduce(partial, reduction) is None
        assert (partial.num_nan, partial.num_pos_inf, partial.num_neg_inf) == (1, 1, 2)

    def test_nan_does_not_stay_in_a_running_sum(self) -> None:
        assert reduce(merge(observation([NAN]), observation([2.0])), "mean") == 2.0

    def test_an_overflowing_sum_is_absent_not_infinite(self) -> None:
        big = observation([1.7e308])
        assert reduce(merge(big, big), "mean") is None
        assert reduce(merge(big, big), "max") == 1.7e308


class TestLaws:
    @given(st.lists(st.lists(any_number, max_size=4), min_size=3, max_size=3))
    def test_merging_observations_commutes_and_associates(self, lists: list[list[float]]) -> None:
        one, two, three = (observation(values, at_s=i) for i, values in enumerate(lists))
        assert merge(one, two) == merge(two, one)
        left, right = merge(merge(one, two), three), merge(one, merge(two, three))
        assert _integers(left) == _integers(right)
        assert isinstance(left, Observation)
        assert isinstance(right, Observation)
        scale = sum(abs(v) for values in lists for v in values if math.isfinite(v))
        assert left.sum.value == pytest.approx(right.sum.value, rel=1e-12, abs=1e-12 * scale)

    @given(st.lists(numbers, min_size=1, max_size=30), st.randoms())
    def test_sums_are_exact_in_any_order_and_split(
        self, values: list[float], order: Random
    ) -> None:
        partials: list[Partial] = [Count(Sum(value)) for value in values]
        expected = math.fsum(values)
        while len(partials) > 1:
            order.shuffle(partials)
            partials.append(merge(partials.pop(), partials.pop()))
        (merged,) = partials
        assert isinstance(merged, Count)
        assert merged.sum.value == pytest.approx(expected, rel=1e-15, abs=1e-25)

    def test_small_numbers_survive_beside_large_ones(self) -> None:
        partials: list[Partial] = [Ratio(Sum(value), Sum(1.0)) for value in (1e16, 1.0, -1e16)]
        for order in itertools.permutations(partials):
            assert reduce(merge(*order), "ratio") == pytest.approx(1 / 3, rel=1e-12)

    def test_the_latest_of_two_lasts_wins_whatever_the_order(self) -> None:
        early, late = observation([5.0], at_s=1.0), observation([3.0], at_s=2.0)
        assert reduce(merge(early, late), "last") == reduce(merge(late, early), "last") == 3.0
        empty = observation([NAN])
        assert reduce(merge(empty, late), "last") == reduce(merge(late, empty), "last") == 3.0


class TestReductions:
    def test_a_rate_is_the_sum_over_the_windows_seconds(self) -> None:
        tokens = merge(*(partial_of(count(1000.0)) for _ in range(4)))
        assert reduce(tokens, "rate", seconds=1.0) == 4000.0
        assert reduce(tokens, "rate") is None
        assert reduce(tokens, "sum") == 4000.0

    def test_a_reduction_of_another_instrument_is_refused(self) -> None:
        with pytest.raises(ValueError, match="mean is not for count: choose one of sum, rate"):
            reduce(partial_of(count(1)), "mean")

    def test_percentiles_stay_within_minimum_and_maximum(self) -> None:
        partial = observation([1.0])
        assert reduce(partial, "p50") == reduce(partial, "p99") == 1.0

    def test_kinds_of_the_wire_are_all_known(self) -> None:
        fields = wire.PushDeltasRequest.DESCRIPTOR.fields
        sent = {field.name for field in fields if field.name.endswith("s")}
        assert sent >= {f"{instrument}s" for instrument in REDUCTIONS}


def _integers(partial: Partial) -> object:
    assert isinstance(partial, Observation)
    histogram = partial.histogram
    return (
        partial.n,
        partial.minimum,
        partial.maximum,
        partial.last,
        partial.num_nan,
        partial.num_pos_inf,
        partial.num_neg_inf,
        dict(histogram.positive),
        dict(histogram.negative),
        histogram.zeros,
    )
