import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launcher.figures import (
    ABSENT,
    BLOCKS,
    clock,
    fraction,
    number,
    percent,
    sparkline,
    whole,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ABSENT),
        (math.nan, ABSENT),
        (math.inf, ABSENT),
        (0.0, "0"),
        (2.0, "2"),
        (0.4712, "0.471"),
        (-12.345, "-12.3"),
        (999.4, "999"),
        (999.9, "1k"),
        (4912.0, "4.91k"),
        (2.5e9, "2.5G"),
        (5.3e-7, "5.3e-07"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_others() -> None:
    assert whole(26098) == "26,098"
    assert whole(None) == ABSENT
    assert fraction(0.4712) == "0.47"
    assert percent(0.0912) == "9 %"
    assert percent(None) == ABSENT
    assert clock(130.9) == "2:10"
    assert clock(3700) == "1:01:40"
    assert clock(None) == ABSENT


def test_a_sparkline_shows_means_of_equal_shares() -> None:
    assert sparkline([0, 0, 1, 1], width=2) == "▁█"
    assert sparkline([0.5] * 3, width=8) == "▄▄▄"
    assert sparkline([], width=8) == ""


@given(
    st.lists(st.floats(-1e6, 1e6), max_size=300),
    st.integers(min_value=1, max_value=40),
)
def test_a_sparkline_has_at_most_its_width(values: list[float], width: int) -> None:
    drawn = sparkline(values, width=width)
    assert len(drawn) == min(width, len(values))
    assert set(drawn) <= set(BLOCKS)
