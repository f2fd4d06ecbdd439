import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.aggregator.histogram import Histogram
from services.common.partials import Observation

finite = st.floats(allow_nan=False, allow_infinity=False)


def histogram(values: list[float]) -> Histogram:
    """Filled by the recorder: both sides must mean the same by a bucket."""
    partial = Observation()
    for value in values:
        partial.add(value, 0.0)
    return Histogram(partial.positive, partial.negative, partial.zeros)


@given(st.lists(finite, min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.95, 0.99, 1.0]))
def test_a_percentile_is_at_most_one_percent_off(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    found = histogram(values).percentile(share)
    assert found == pytest.approx(exact, rel=0.01, abs=1e-320)


def test_the_median_of_four_is_the_second() -> None:
    assert histogram([4.0, 1.0, 3.0, 2.0]).percentile(0.5) == pytest.approx(2.0, rel=0.01)


def test_signs_keep_their_order() -> None:
    spread = histogram([-3.0, -1.0, 0.0, 1.0, 3.0])
    shares = (0.2, 0.4, 0.6, 0.8, 1.0)
    found = [spread.percentile(share) for share in shares]
    assert found == pytest.approx([-3.0, -1.0, 0.0, 1.0, 3.0], rel=0.01)


def test_nothing_has_no_percentile() -> None:
    assert Histogram().percentile(0.5) is None
