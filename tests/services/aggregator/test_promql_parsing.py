"""Queries as texts: matchers, limits, how coarsely is read, and what the document shows."""

import re
import time
from pathlib import Path

import numpy as np
import pytest

from services.aggregator.catalogue import CATALOGUE
from services.aggregator.promql.errors import QueryError
from services.aggregator.promql.grid import MAX_STEPS, Grid
from services.aggregator.promql.names import Names
from services.aggregator.promql.parsing import MAX_SYNTAX, parse, parse_selector
from services.aggregator.promql.selector import Matcher

DOCUMENT = Path(__file__).parents[3] / "docs" / "prometheus.md"


def test_no_regular_expression_takes_long() -> None:
    begun_s = time.monotonic()
    for pattern in ("(a+)+b", "(a|a)*b", "(.*)*" + "a*" * 100 + "b"):
        assert not Matcher("x", "=~", pattern).holds({"x": "a" * 200})
    assert time.monotonic() - begun_s < 1.0
    with pytest.raises(QueryError, match="not a regular expression here"):
        Matcher("x", "=~", "(a{1000}){1000}")


@pytest.mark.parametrize(
    ("selector", "labels", "holds"),
    [
        ('{run=~"a|b"}', {"run": "b"}, True),
        ('{run=~"a|b"}', {"run": "ab"}, False),
        ('{run=~"(?i)DEMO"}', {"run": "demo"}, True),
        ('{run!~"de.*",tool="a"}', {"run": "demo", "tool": "a"}, False),
        ('{run="x",tool=""}', {"run": "x"}, True),
        ('{run="x",tool!=""}', {"run": "x"}, False),
        ('{run="x",tool=~".*"}', {"run": "x"}, True),
        ('{run="x",tool=~".+"}', {"run": "x"}, False),
        ('a{run="x"}', {"run": "x", "__name__": "a"}, True),
        ('a{run="x"}', {"run": "x", "__name__": "b"}, False),
        (r'{run="a\"b"}', {"run": 'a"b'}, True),
    ],
)
def test_matchers_match_whole_values(selector: str, labels: dict[str, str], holds: bool) -> None:
    assert all(each.holds(labels) for each in parse_selector(selector)) == holds


def test_no_query_takes_long_to_parse() -> None:
    half = MAX_SYNTAX // 2 - 1
    begun_s = time.monotonic()
    for query in ("(" * half + "1" + ")" * half, "1" + "^1" * half, "x" + "+x" * half):
        with pytest.raises(QueryError, match="nested more than 100 deep"):
            parse(query)
    for query in ("1" + "+1" * half * 2, "x" + "-" * 20_000):
        with pytest.raises(QueryError, match="characters, or 1000 beside quoted"):
            parse(query)
    assert time.monotonic() - begun_s < 3.0
    names = "|".join(f"run-{number}" for number in range(500))
    assert parse(f'x{{run=~"{names[:3900]}", producer!="\\"\\\\"}}')


@pytest.mark.parametrize(
    ("start", "step_s", "range_s", "width_s"),
    [
        (0, 15, 60, 10),
        (0, 60, 300, 60),
        (30, 60, 240, 60),
        (30, 60, 120, 10),
        (0, 300, 300, 300),
        (0, 3600, 3600, 3600),
        (30, 3600, 3600, 300),
        (0, 3600, None, 3600),
        # A sample of an hour would be too old for the next time that is asked.
        (30, 86_400, None, 300),
        (0, 30, None, 10),
    ],
)
def test_ranges_are_read_as_coarsely_as_the_step_allows(
    start: float, step_s: float, range_s: float | None, width_s: int
) -> None:
    assert Grid(start, start + 10 * step_s, step_s).width_s(range_s) == width_s


def test_a_moment_is_read_finely() -> None:
    assert Grid.moment(0).width_s(None) == 10
    assert Grid.moment(30).width_s(60) == 10
    assert Grid.moment(30).width_s(3600) == 60
    assert Grid.moment(30).width_s(7 * 86_400) == 3600
    assert len(Grid(0, MAX_STEPS - 1, 1).times) == MAX_STEPS
    assert np.array_equal(Grid(1, 2, 0.4).times, [1, 1.4, 1.8])
    # 0.3 / 0.1 is less than 3 in doubles.
    assert np.array_equal(Grid(0, 0.3, 0.1).times, [0, 0.1, 0.2, 0.3])


def test_the_document_names_what_exists() -> None:
    text = DOCUMENT.read_text()
    known = {family.name for family in Names(CATALOGUE).families}
    named = set(re.findall(r"headrace_\w+", text))
    assert {name for name in named if not name.startswith("headrace_aggregator_")} <= known
    (block,) = re.findall(r"```promql\n(.*?)```", text, flags=re.DOTALL)
    for line in block.splitlines():
        assert parse(line)
