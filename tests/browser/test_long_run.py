"""A stored run of 10,000 steps x 150 keys: what its first view asks for, and that all is there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from services.aggregator.store import Store
from tests.browser.conftest import Seen
from tests.browser.data import serving
from tests.browser.first_view import first_view
from tests.browser.long_run import KEYS, STEPS, fill_long
from tests.services.aggregator.making import NOW_S

MAX_QUERIES = 12
"""Of a first view; a query a key would be 150."""

MAX_BYTES = 1_000_000
"""Of their answers; all steps of the keys in sight would be ten times as much."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Long(NamedTuple):
    """Where the run is served, and what was put in: one value a step, by key."""

    address: str
    values: dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def long(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Long]:
    folder: Path = tmp_path_factory.mktemp("long")
    store = Store.open(f"sqlite:///{folder / 'metrics.sqlite'}")
    values = fill_long(store, now_s=NOW_S)
    with serving(store) as address:
        yield Long(address, values)
    store.close()


@pytest.mark.parametrize("page", ["overview", "metrics"])
def test_a_first_view_asks_little(browser: Any, long: Long, page: str) -> None:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    found = first_view(context, long.address, f"{page}?run=long")
    context.close()
    print(f"{page}: first view after {found.seen_s:.2f} s, {found}")
    assert 0 < found.num_queries <= MAX_QUERIES
    assert 0 < found.query_bytes <= MAX_BYTES


def test_all_keys_are_there_and_drawn_when_in_sight(seen: Seen, long: Long) -> None:
    page = seen.page
    page.goto(f"{long.address}/#/metrics?run=long")
    page.locator(".slot .u-over").first.wait_for()
    known = httpx.get(f"{long.address}/api/v1/runs/long/metrics", trust_env=False).json()["metrics"]
    assert len(known) >= KEYS
    assert page.locator(".slot").count() == len(known)
    drawn = page.locator(".slot .chart").count()
    assert 0 < drawn < len(known) / 2, "charts out of sight are drawn"
    last = page.locator(".slot").last
    last.scroll_into_view_if_needed()
    last.locator(".u-over").wait_for()
    assert seen.complaints == []


def test_a_point_is_the_mean_of_its_steps(seen: Seen, long: Long) -> None:
    page = seen.page
    page.goto(f"{long.address}/#/metrics?run=long&filter=%5Ereward%24")
    page.get_by_role("button", name="reward as a table").click()
    row = page.get_by_role("region", name="reward as a table").locator("tbody tr").first
    answer = httpx.get(
        f"{long.address}/api/v1/history",
        params={"run": "long", "key": "reward", "max_points": 500},
        trust_env=False,
    ).json()["histories"][0]
    first, width = answer["points"][-1]["x"], answer["width"]
    assert width > 1
    assert row.locator("th").inner_text() == str(first)
    shown = row.locator("td").first.get_attribute("title")
    mean = long.values["reward"][first : min(first + width, STEPS)].mean()
    assert shown is not None
    assert float(shown.removesuffix(" reward")) == pytest.approx(mean, rel=1e-9)
