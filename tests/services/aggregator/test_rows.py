"""What is stored is what was sent, and pooling rows is merging what they were made of."""

import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.aggregator.reduce import Instrument, Observation, Reduction, reduce
from services.aggregator.rows import SCALAR_NAMES, encode, pool, thaw, to_row
from services.common import partials
from services.common.partials import Count, Ratio, Sum

numbers = st.floats(-1e9, 1e9)
any_number = st.floats(allow_nan=True, allow_infinity=True, width=32)


@st.composite
def observations(draw: st.DrawFn) -> partials.Observation:
    partial = partials.Observation()
    for at_s, value in enumerate(draw(st.lists(any_number, max_size=6))):
        partial.add(value, float(at_s + draw(st.integers(0, 3))))
    return partial


@st.composite
def same_instrument(draw: st.DrawFn) -> list[partials.Partial]:
    kinds: tuple[st.SearchStrategy[partials.Partial], ...] = (
        st.builds(Count, st.builds(Sum, st.floats(0, 1e9))),
        st.builds(Ratio, st.builds(Sum, numbers), st.builds(Sum, st.floats(0, 1e9))),
        observations(),
    )
    return draw(st.lists(draw(st.sampled_from(kinds)), min_size=1, max_size=6))


@given(same_instrument())
def test_pooling_rows_is_merging_what_they_hold(found: list[partials.Partial]) -> None:
    rows = [encode(partial) for partial in found]
    merged = copy.deepcopy(found[0])
    for partial in found[1:]:
        merged.merge(partial)  # type: ignore[arg-type]
    instrument = _instrument(found[0])
    pooled, expected = pool(instrument, rows), pool(instrument, [encode(merged)])
    if isinstance(pooled, Observation) and isinstance(expected, Observation):
        assert pooled.histogram == expected.histogram
        assert (pooled.n, pooled.minimum, pooled.maximum, pooled.last, pooled.last_at_s) == (
            expected.n,
            expected.minimum,
            expected.maximum,
            expected.last,
            expected.last_at_s,
        )
        bad = (pooled.num_nan, pooled.num_pos_inf, pooled.num_neg_inf)
        assert bad == (expected.num_nan, expected.num_pos_inf, expected.num_neg_inf)
    reductions: dict[Instrument, Reduction] = {
        "count": "sum",
        "ratio": "ratio",
        "observation": "mean",
    }
    value, right = (reduce(each, reductions[instrument]) for each in (pooled, expected))
    assert value == (None if right is None else pytest.approx(right, rel=1e-12, abs=1e-12))
    assert pool(instrument, list(reversed(rows))) == pooled


def _instrument(partial: partials.Partial) -> Instrument:
    if isinstance(partial, Count):
        return "count"
    return "ratio" if isinstance(partial, Ratio) else "observation"


@given(same_instrument())
def test_storing_keeps_all(found: list[partials.Partial]) -> None:
    for partial in found:
        row = encode(partial)
        pooled = pool(_instrument(partial), [row])
        assert to_row(pooled) == row
        assert encode(thaw(pooled)) == row


def test_equal_values_need_no_histogram() -> None:
    for value in (2.5, -2.5, 0.0):
        partial = partials.Observation()
        for _ in range(3):
            partial.add(value, 1.0)
        row = encode(partial)
        assert row[-1] is None
        other = partials.Observation()
        other.add(7.0, 1.0)
        other.add(8.0, 1.0)
        pooled = pool("observation", [row, encode(other)])
        assert isinstance(pooled, Observation)
        assert pooled.histogram.n == 5
        assert reduce(pooled, "p50") == pytest.approx(value, rel=0.01)


def test_rows_without_histograms_have_all_but_percentiles() -> None:
    partial = partials.Observation()
    partial.add(1.0, 1.0)
    partial.add(3.0, 2.0)
    row = encode(partial)[: len(SCALAR_NAMES)]
    assert reduce(pool("observation", [row, row]), "mean") == 2.0


def test_a_sum_that_overflows_is_stored_and_absent() -> None:
    partial = partials.Observation()
    for _ in range(2):
        partial.add(1.7e308, 1.0)
    partial.merge(copy.deepcopy(partial))
    row = encode(partial)
    assert not any(isinstance(each, float) and math.isnan(each) for each in row)
    assert reduce(pool("observation", [row, row]), "mean") is None
    assert reduce(pool("observation", [row, row]), "max") == 1.7e308
