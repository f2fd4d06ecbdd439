"""What is stored is what was sent; adding rows up and pooling them is the same."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.aggregator.batch import decode
from services.aggregator.reduce import Instrument, Observation, Partial, Reduction, reduce
from services.aggregator.rows import (
    COMPACT_BYTES,
    HISTOGRAM,
    SCALAR_NAMES,
    Row,
    added,
    pool,
)
from services.common import partials
from tests.services.aggregator.making import (
    Build,
    Producer,
    count,
    deltas,
    observed,
    ratio,
    to_row,
)

numbers = st.floats(-1e9, 1e9)
any_number = st.floats(allow_nan=True, allow_infinity=True, width=32)
observations = st.builds(
    lambda values, at_s: (observed(values), at_s),
    st.lists(any_number, max_size=6),
    st.floats(0, 9),
)

REDUCTIONS: dict[Instrument, Reduction] = {
    "count": "sum",
    "observation": "mean",
    "ratio": "ratio",
}


def row_of(build: Build, at_s: float = 0.0) -> tuple[Instrument, Row]:
    """As it comes from a producer."""
    if isinstance(build, partials.Observation):
        build.last_s = at_s
    batch = decode(Producer("p").request([("custom/x", build)]))
    assert batch.rejected == ()
    (delta,) = deltas(batch)
    return delta.instrument, delta.row


@st.composite
def same_instrument(draw: st.DrawFn) -> tuple[Instrument, list[Row]]:
    kinds: tuple[st.SearchStrategy[tuple[Build, float]], ...] = (
        st.tuples(st.builds(count, st.floats(0, 1e9)), st.just(0.0)),
        st.tuples(st.builds(ratio, numbers, st.floats(0.1, 1e9)), st.just(0.0)),
        observations,
    )
    built = draw(st.lists(draw(st.sampled_from(kinds)), min_size=1, max_size=6))
    rows = [row_of(build, at_s) for build, at_s in built]
    return rows[0][0], [row for _, row in rows]


def exact(partial: Partial) -> object:
    """What does not depend on the order of adding floats."""
    if not isinstance(partial, Observation):
        return None
    return (
        partial.n,
        partial.minimum,
        partial.maximum,
        partial.last,
        partial.last_at_s,
        partial.histogram,
        (partial.num_nan, partial.num_pos_inf, partial.num_neg_inf),
    )


@given(same_instrument())
def test_adding_rows_up_and_pooling_them_is_the_same(
    found: tuple[Instrument, list[Row]],
) -> None:
    instrument, rows = found
    for order in (rows, rows[::-1]):
        total = order[0]
        for row in order[1:]:
            total = added(total, row)
        pooled, expected = pool(instrument, rows), pool(instrument, [total])
        assert exact(pooled) == exact(expected)
        value, right = (reduce(each, REDUCTIONS[instrument]) for each in (pooled, expected))
        assert value == (None if right is None else pytest.approx(right, rel=1e-12, abs=1e-12))
    assert pool(instrument, rows[::-1]) == pool(instrument, rows)


@given(same_instrument())
def test_storing_keeps_all(found: tuple[Instrument, list[Row]]) -> None:
    instrument, rows = found
    for row in rows:
        pooled = pool(instrument, [row])
        assert pool(instrument, [to_row(pooled)]) == pooled


@given(st.lists(numbers, min_size=2, max_size=30))
def test_sums_of_rows_are_exact(values: list[float]) -> None:
    _, total = row_of(ratio(values[0], 1))
    for value in values[1:]:
        total = added(total, row_of(ratio(value, 1))[1])
    exactly = math.fsum(values)
    assert total[0] + total[1] == pytest.approx(exactly, rel=1e-15, abs=1e-20)


def test_equal_values_need_no_histogram() -> None:
    for value in (2.5, -2.5, 0.0):
        _, row = row_of(observed([value] * 3))
        assert row[HISTOGRAM] is None
        pooled = pool("observation", [row, row_of(observed([7.0, 8.0]))[1]])
        assert isinstance(pooled, Observation)
        assert pooled.histogram.n == 5
        assert reduce(pooled, "p50") == pytest.approx(value, rel=0.01)


def test_rows_without_histograms_have_all_but_percentiles() -> None:
    row = row_of(observed([1.0, 3.0]))[1][: len(SCALAR_NAMES)]
    assert reduce(pool("observation", [row, row]), "mean") == 2.0


def test_a_bucket_of_very_many_values_keeps_them_all() -> None:
    partial = partials.Observation()
    partial.add(1.0, 0.0)
    partial.add(3.0, 0.0)
    _, row = row_of(partial)
    for _ in range(33):
        row = added(row, row)
    pooled = pool("observation", [row])
    assert isinstance(pooled, Observation)
    assert pooled.n == pooled.histogram.n == 2**34
    again = pool("observation", [to_row(pooled)])
    assert isinstance(again, Observation)
    assert again.histogram == pooled.histogram
    _, equal = row_of(observed([2.0]))
    for _ in range(33):
        equal = added(equal, equal)
    both = pool("observation", [added(equal, row)])
    assert isinstance(both, Observation)
    assert both.histogram.n == 2**33 + 2**34


def test_a_histogram_that_is_added_to_for_long_stays_small() -> None:
    _, total = row_of(observed([1.0, 2.0]))
    for _ in range(2000):
        total = added(total, row_of(observed([1.0, 2.0, -3.0, 0.0]))[1])
        assert len(total[HISTOGRAM]) <= COMPACT_BYTES
    pooled = pool("observation", [total])
    assert isinstance(pooled, Observation)
    assert pooled.histogram.n == pooled.n == 8002
    assert pooled.histogram.zeros == 2000


def test_a_sum_that_overflows_is_stored_and_absent() -> None:
    _, row = row_of(observed([1.7e308]))
    row = added(row, row)
    assert not any(isinstance(each, float) and math.isnan(each) for each in row)
    assert reduce(pool("observation", [row, row]), "mean") is None
    assert reduce(pool("observation", [row, row]), "max") == 1.7e308
