"""A page that is left open: news without a reload, an aggregator that is away, a hidden tab."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from tests.browser.conftest import Seen
from tests.browser.data import InventedRun, serving
from tests.processes import service

START_S = 60.0
SOON_MS = 90_000
"""Far more than any change takes, on a busy machine."""

pytestmark = pytest.mark.timeout(600)

RECIPE = """
run = "demo"
folder = "{folder}"
data.reasoning_gym.task = "chain_sum"
trainer.max_steps = 10
aggregator.http_port = {port}
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store of the test's own, in the place where the recipe's is."""
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    opened = Store.open(f"sqlite:///{tmp_path / 'runs' / 'demo' / 'metrics.sqlite'}")
    yield opened
    opened.close()


@pytest.fixture
def run(store: Store) -> InventedRun:
    """A run of three steps that has just made the last."""
    invented = InventedRun("demo", begin_s=time.time() - 20)
    advance(invented, store, steps=3)
    return invented


def advance(run: InventedRun, store: Store, *, steps: int) -> None:
    ingest = Ingest(store)
    for _ in range(steps):
        run.advance(ingest)


def step_is(page: Any, step: int) -> None:
    page.locator(".header-step", has_text=f"step {step}").wait_for(timeout=SOON_MS)


def live_is(page: Any, state: str) -> None:
    page.locator(f".live[data-state={state}]").wait_for(timeout=SOON_MS)


def marked(page: Any, address: str) -> Any:
    """Open the page and leave a mark that a reload would wipe out."""
    page.goto(f"{address}/#/overview?run=demo")
    page.locator(".verdict .said").wait_for(timeout=SOON_MS)
    page.evaluate("window.mark = 'here since'")
    return page


def is_the_same(page: Any) -> bool:
    return bool(page.evaluate("window.mark === 'here since'"))


def test_news_come_by_the_stream(seen: Seen, store: Store, run: InventedRun) -> None:
    with serving(store) as address:
        page = marked(seen.page, address)
        live_is(page, "live")
        step_is(page, 2)
        advance(run, store, steps=2)
        step_is(page, 4)
        assert is_the_same(page)
    assert seen.complaints == []


def test_without_a_stream_the_page_asks_every_few_seconds(
    seen: Seen, store: Store, run: InventedRun
) -> None:
    with serving(store) as address:
        seen.page.route("**/stream?*", lambda route: route.fulfill(status=502, body="a proxy"))
        page = marked(seen.page, address)
        live_is(page, "polling")
        assert page.locator(".live").inner_text() == "every 5 s"
        advance(run, store, steps=2)
        step_is(page, 4)
        assert is_the_same(page)


def test_a_hidden_tab_asks_nothing(seen: Seen, store: Store, run: InventedRun) -> None:
    with serving(store) as address:
        page = seen.page
        page.clock.install()
        marked(page, address)
        live_is(page, "live")
        page.evaluate(
            """() => {
                Object.defineProperty(document, "hidden", {value: true, configurable: true});
                document.dispatchEvent(new Event("visibilitychange"));
            }"""
        )
        live_is(page, "paused")
        before = len(seen.addresses)
        advance(run, store, steps=2)
        page.clock.run_for(60_000)
        assert seen.addresses[before:] == []
        page.evaluate(
            """() => {
                delete document.hidden;
                document.dispatchEvent(new Event("visibilitychange"));
            }"""
        )
        page.clock.run_for(2_000)
        step_is(page, 4)
        assert any("/stream?" in address for address in seen.addresses[before:])


@contextmanager
def aggregator(folder: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """The real service on this port, once it answers."""
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(folder=folder / "runs", port=port))
    ports = folder / "ports"
    ports.unlink(missing_ok=True)
    with service([sys.executable, "-m", "services.aggregator", str(recipe)], folder) as process:
        deadline_s = time.monotonic() + START_S
        while not ports.exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline_s, "the aggregator did not start"
            time.sleep(0.05)
        assert json.loads(ports.read_text())["http_port"] == port
        yield process


def test_an_aggregator_that_was_away_is_found_again(
    seen: Seen, tmp_path: Path, store: Store, run: InventedRun
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with aggregator(tmp_path, port) as first:
        page = marked(seen.page, f"http://127.0.0.1:{port}")
        live_is(page, "live")
        step_is(page, 2)
        first.send_signal(signal.SIGTERM)
        assert first.wait(START_S) == 0
        live_is(page, "lost")
        assert "does not answer" in page.locator(".live").inner_text()
    advance(run, store, steps=2)
    with aggregator(tmp_path, port):
        step_is(page, 4)
        live_is(page, "live")
        assert page.locator(".problem").count() == 0
        assert is_the_same(page)
    refused = [each for each in seen.complaints if "ERR_CONNECTION_REFUSED" not in each]
    assert [each for each in refused if "ERR_INCOMPLETE_CHUNKED" not in each] == []
