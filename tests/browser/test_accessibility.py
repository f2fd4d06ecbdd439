"""No page has a serious fault that axe-core can tell, in light and in dark."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import watched
from tests.browser.test_pages import MARKS

PACKAGES = ("axe_playwright_python", "axe_core_python")
"""Any of them brings axe-core along."""


@pytest.fixture(scope="module")
def axe() -> str:
    """The program of axe-core."""
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            return (Path(found.origin).parent / "axe.min.js").read_text()
    pytest.skip("axe-core is not installed (axe-playwright-python)")


SIZES = {"laptop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}

STATES = {"metrics": "&compare=baseline", "runs": "&beside=baseline", "lineage": "&step=2"}
"""More of a page than it shows by itself."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", MARKS)
def test_no_serious_violation(
    browser: Any, address: str, axe: str, name: str, scheme: str, size: str
) -> None:
    # axe-core is put into the page, which the page's own policy forbids.
    context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, bypass_csp=True)
    page = watched(context).page
    page.goto(f"{address}/#/{name}?run=demo{STATES.get(name, '')}")
    page.locator(MARKS[name]).first.wait_for()
    page.evaluate(axe)
    answer = page.evaluate("axe.run()")
    context.close()
    assert len(answer["passes"]) > 10, "axe-core looked at next to nothing"
    serious = {
        each["id"]: [node["html"][:200] for node in each["nodes"][:3]]
        for each in answer["violations"]
        if each["impact"] in ("serious", "critical")
    }
    assert not serious, json.dumps(serious, indent=1)
