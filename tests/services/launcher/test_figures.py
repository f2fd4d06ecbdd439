import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launcher.figures import (
    ABSENT,
    BLOCKS,
    ago,
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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s ago"),
        (-0.4, "0 s ago"),
        (4.9, "4 s ago"),
        (130.0, "2 min ago"),
        (9000.0, "2 h ago"),
        (1e6, "11 d ago"),
        (-9000.0, "in 2 h"),
        (-86_400.0, "in 1 d"),
        (None, ABSENT),
        (math.inf, ABSENT),
    ],
)
def test_ago(seconds: float | None, text: str) -> None:
    assert ago(seconds) == text


def test_a_sparkline_shows_means_of_equal_shares() -> None:
    assert sparkline([0, 0, 1, 1], width=2) == "▁█"
    assert sparkline([0.5] * 3, width=8) == "▄▄▄"
    assert sparkline([], width=8) == ""


def test_a_sparkline_leaves_out_what_is_absent() -> None:
    assert sparkline([None, None, 0, 1, None], width=5) == "  ▁█ "
    assert sparkline([0, None, 1, 3], width=2) == "▁█"
    assert sparkline([None] * 3, width=3) == "   "


def test_a_sparkline_is_flat_where_only_rounding_differs() -> None:
    assert sparkline([0.84] * 100, width=30) == "▄" * 30


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.none(), max_size=50),
    st.integers(min_value=1, max_value=40),
)
def test_a_sparkline_of_any_numbers(values: list[float | None], width: int) -> None:
    drawn = sparkline(values, width=width)
    assert len(drawn) == min(width, len(values))
    assert set(drawn) <= {*BLOCKS, " "}


@given(
    st.lists(st.floats(-1e6, 1e6), max_size=300),
    st.integers(min_value=1, max_value=40),
)
def test_a_sparkline_has_at_most_its_width(values: list[float], width: int) -> None:
    drawn = sparkline(values, width=width)
    assert len(drawn) == min(width, len(values))
    assert set(drawn) <= set(BLOCKS)
