"""A headless Chromium and an invented run for it to look at; skipped where there is no browser."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from services.aggregator.store import Store
from tests.browser.data import fill, serving

STEPS = 60

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Seen(NamedTuple):
    """A page with what the browser had to say of it."""

    page: Any
    complaints: list[str]
    """Errors and warnings of the console, exceptions, requests that failed."""
    addresses: list[str]
    """All that it asked for."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, started once a module: Playwright's event loop must have ended before a test of
    another module runs its own.
    """
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed")
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        pytest.skip("no Chromium is on the PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, as in containers, Chromium has no sandbox.
        started = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder: Path = tmp_path_factory.mktemp("browser")
    opened = Store.open(f"sqlite:///{folder / 'metrics.sqlite'}")
    fill(opened, steps=STEPS)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def address(browser: Any, store: Store) -> Iterator[str]:
    """Where the invented run is served; after `browser`, so that a skip comes first."""
    with serving(store) as found:
        yield found


def watched(context: Any) -> Seen:
    """A new page whose console and requests are written down."""
    page = context.new_page()
    seen = Seen(page, [], [])

    def said(message: Any) -> None:
        if message.type in ("error", "warning"):
            seen.complaints.append(f"{message.type}: {message.text}")

    page.on("console", said)
    page.on("pageerror", lambda error: seen.complaints.append(f"exception: {error}"))
    page.on("request", lambda request: seen.addresses.append(request.url))
    return seen


@pytest.fixture
def seen(browser: Any) -> Iterator[Seen]:
    """A page of a laptop's size, in light."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
    yield watched(context)
    context.close()
