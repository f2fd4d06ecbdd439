"""A real run, watched in the browser from its first steps on: vLLM, queue, trainer and all."""

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import TimeoutError as NotShown

from tests.browser.conftest import Seen
from tests.launching import ROOT, launched

SETTINGS = {
    "trainer.max_steps": 400,
    "trainer.groups_per_step": 8,
    "generation.num_generations": 4,
    "generator.replicas": 1,
    "recorder.flush_s": 0.5,
    "aggregator.http_port": 0,
}
"""More steps than are watched: the run is ended with the test."""

STEPS = 4
"""That are watched."""

LIMIT_S = 420
SOON_MS = 60_000
SHOWN_MS = 1_000
"""Until what the page has been told stands on it."""

PAGE = re.compile(r"http://127\.0\.0\.1:\d+")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S * 2)]


def page_of(process: "subprocess.Popen[str]") -> str:
    """The page's address, as the launcher says it; its output is read on: it never waits."""
    said: list[str] = []
    found = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if PAGE.search(line):
                found.set()

    threading.Thread(target=read, daemon=True).start()
    deadline_s = time.monotonic() + LIMIT_S
    while not found.wait(0.2):
        assert process.poll() is None, "".join(said)
        assert time.monotonic() < deadline_s, "".join(said)
    match = PAGE.search("".join(said))
    assert match is not None
    return match[0]


@pytest.fixture(scope="module")
def address(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("live")
    recipe = ROOT / "recipes" / "arithmetic.toml"
    with launched(recipe, folder=folder, run="live", settings=SETTINGS) as process:
        yield page_of(process)


def answered(page: Any, path: str) -> Any:
    """The next answer that the page gets from this path of the API."""
    with page.expect_response(
        lambda each: urlsplit(each.url).path == f"/api/v1/{path}", timeout=SOON_MS
    ) as found:
        pass
    return found.value.json()


def shown(page: Any, path: str, words: Callable[[Any], str | None]) -> Any:
    """An answer of the API that the page shows: `words` of it, once they stand there. The next may
    overtake it before it is looked at; then that is looked for."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        found = answered(page, path)
        said = words(found)
        if said is not None:
            pattern = re.compile(re.escape(said).replace(r"\ ", r"\s*") + r"(?!\d)")
            with suppress(NotShown):
                page.get_by_text(pattern).first.wait_for(timeout=SHOWN_MS)
                return found
        assert time.monotonic() < deadline_s, page.locator("main").inner_text()


def test_a_run_is_watched_while_it_goes(seen: Seen, address: str) -> None:
    page = seen.page
    page.goto(address)
    # From "no run yet" to its first steps: whoever opens the page early need not reload it.
    deadline_s = time.monotonic() + LIMIT_S
    while page.locator(".ledger .sum").count() == 0:
        assert time.monotonic() < deadline_s, page.locator("main").inner_text()
        page.wait_for_timeout(500)
    page.evaluate("window.mark = 'here since'")

    shown(
        page,
        "runs/live/ledger",
        lambda found: f"{found['dispatched']:,} groups dispatched = {found['trained']:,} trained",
    )
    first = answered(page, "runs/live")["latest_step"] or 0

    def step_of(found: Any) -> str | None:
        step = found["latest_step"] or 0
        return f"step {step}" if step >= first + STEPS else None

    shown(page, "runs/live", step_of)

    # The chart says one of the rewards that the API gave so far.
    rewards: set[str] = set()
    chart = page.locator(".chart", has=page.get_by_role("heading", name="Reward"))
    while (title := chart.locator(".chart-now").get_attribute("title")) not in rewards:
        assert time.monotonic() < deadline_s, f"{title} is none of {rewards}"
        for each in answered(page, "history")["histories"]:
            if each["key"] == "reward":
                rewards |= {f"{point['value']} reward" for point in each["points"]}

    assert page.evaluate("window.mark === 'here since'")
    assert seen.complaints == []
    assert {urlsplit(each).netloc for each in seen.addresses} == {urlsplit(address).netloc}


def test_the_recipe_of_the_run_is_shown(seen: Seen, address: str) -> None:
    page = seen.page
    page.goto(f"{address}/#/runs?run=live")
    row = page.locator(".recipe tr", has_text="trainer.max_steps")
    row.wait_for(timeout=SOON_MS)
    assert row.locator("td").first.inner_text() == str(SETTINGS["trainer.max_steps"])
