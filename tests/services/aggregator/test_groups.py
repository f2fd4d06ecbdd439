"""Rows reduced column by column, against pooling and reducing each group's rows one by one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.aggregator.groups import Groups, Rows, joined, needed
from services.aggregator.reduce import REDUCTIONS, Instrument, Reduction, reduce
from services.aggregator.rows import COLUMN_NAMES, Row, pool
from tests.services.aggregator.test_rows import same_instrument

SECONDS = 8.0


def grouped(
    instrument: Instrument, reduction: Reduction, groups: list[list[Row]], *, num: int
) -> Groups:
    """As a query reads them: only the columns that it needs."""
    names = needed(instrument, reduction)
    indexes = [COLUMN_NAMES.index(name) for name in names]
    found = [
        (position, 1, *(row[index] for index in indexes))
        for position, rows in enumerate(groups)
        for row in rows
    ]
    rows = joined([Rows.of(found[::2], names), Rows.of(found[1::2], names)], names)
    return Groups(rows, rows.position, num)


@given(same_instrument(), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_all_groups_at_once_are_the_same_as_one_by_one(
    found: tuple[Instrument, list[Row]], places: list[int]
) -> None:
    instrument, rows = found
    groups: list[list[Row]] = [[], [], [], []]
    for row, place in zip(rows, places, strict=False):
        groups[place].append(row)
    for reduction in REDUCTIONS[instrument]:
        if reduction == "sum_last":
            continue  # over producers: lasts.py
        at_once = grouped(instrument, reduction, groups, num=5)
        seconds = np.full(5, SECONDS)
        values = at_once.values(reduction, seconds=seconds).tolist()
        assert math.isnan(values[4])
        for value, held in zip(values, groups, strict=False):
            right = None
            if held:
                right = reduce(pool(instrument, held), reduction, seconds=SECONDS)
            if right is None:
                assert math.isnan(value), reduction
            else:
                assert value == pytest.approx(right, rel=1e-12, abs=1e-12), reduction
        num_nan = [sum(row[9] or 0 for row in held) for held in groups]
        assert at_once.counts("num_nan").tolist() == [*num_nan, 0]


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40))
def test_sums_are_exact(values: list[float]) -> None:
    rows = Rows.of(
        [(0, 1, value, 0.0) for value in [*values, 1e17, -1e17]], ("sum_high", "sum_low")
    )
    groups = Groups(rows, rows.position, 1)
    assert groups.values("sum")[0] == pytest.approx(math.fsum(values), rel=1e-15, abs=1e-14)


def test_what_overflows_is_absent() -> None:
    rows = Rows.of([(0, 1, 1.7e308, 0.0), (0, 1, 1.7e308, 0.0)], ("sum_high", "sum_low"))
    assert math.isnan(Groups(rows, rows.position, 1).values("sum")[0])


def test_percentiles_of_both_signs_and_zero() -> None:
    histogram = {-3.0: 2, 0.0: 1, 2.0: 1}
    names = ("n", "minimum", "maximum", "histogram")
    rows = Rows.of(
        [(0, 1, n, value, value, None) for value, n in histogram.items()],
        names,
    )
    groups = Groups(rows, rows.position, 1)
    assert groups.values("p50")[0] == pytest.approx(-3.0, rel=0.01)
    assert groups.values("p95")[0] == pytest.approx(2.0, rel=0.01)
    zeros = Rows.of([(0, 1, 5, 0.0, 0.0, None), (0, 1, 4, 7.0, 7.0, None)], names)
    assert Groups(zeros, zeros.position, 1).values("p50")[0] == 0.0
