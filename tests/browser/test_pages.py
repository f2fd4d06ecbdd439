"""The other pages: what is in the address is what is shown."""

import re
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.browser.conftest import Seen, watched
from tests.browser.data import SECRET

MARKS = {
    "overview": ".verdict .said",
    "metrics": ".slot .u-over",
    "time": "tbody tr",
    "rollouts": ".rollout-list li",
    "lineage": ".facts",
    "runs": "tbody tr",
    "alerts": "tbody tr",
}
"""What each page has once it is drawn."""


def opened(seen: Seen, address: str, state: str, mark: str) -> Any:
    seen.page.goto(f"{address}/#/{state}")
    seen.page.locator(mark).first.wait_for()
    return seen.page


@pytest.mark.parametrize("name", MARKS)
def test_a_page_is_drawn_without_a_complaint(seen: Seen, address: str, name: str) -> None:
    page = opened(seen, address, f"{name}?run=demo", MARKS[name])
    assert page.locator(".problem").count() == 0
    assert page.locator("nav [aria-current=page]").inner_text().lower() == name
    assert seen.complaints == []
    assert {urlsplit(each).netloc for each in seen.addresses} == {urlsplit(address).netloc}


@pytest.mark.parametrize("name", MARKS)
def test_a_page_fits_a_phone(browser: Any, address: str, name: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page = opened(watched(context), address, f"{name}?run=demo", MARKS[name])
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    context.close()


def test_the_filter_and_its_address(seen: Seen, address: str) -> None:
    page = opened(seen, address, "metrics?run=demo", ".slot .u-over")
    page.keyboard.press("/")
    page.keyboard.type("^perf/step_s$")
    page.wait_for_url("**filter=*")
    page.locator('.slot[data-key="loss"]').wait_for(state="detached")
    assert page.locator(".slot").count() == 1
    page.reload()
    page.locator('.slot[data-key="perf/step_s"]').wait_for()
    assert page.locator(".slot").count() == 1


def test_a_filter_that_is_no_expression_says_so(seen: Seen, address: str) -> None:
    page = opened(seen, address, "metrics?run=demo&filter=(", ".slot")
    assert "Invalid regular expression" in page.locator(".filter-note").inner_text()


def test_each_replica_is_a_line_of_its_own(seen: Seen, address: str) -> None:
    state = "metrics?run=demo&split=1&filter=%5Erollout%2Finflight%24"
    page = opened(seen, address, state, ".legend-entry")
    said = page.locator(".legend-entry").all_inner_texts()
    assert [each.split("\n")[0].split()[0] for each in said] == ["generator-0", "generator-1"]


def test_two_runs_over_each_other(seen: Seen, address: str) -> None:
    state = "metrics?run=demo&compare=baseline&filter=%5Eloss%24&axis=relative"
    page = opened(seen, address, state, ".legend-entry")
    assert [each.split()[0] for each in page.locator(".legend-entry").all_inner_texts()] == [
        "demo",
        "baseline",
    ]
    assert seen.complaints == []


def test_attempts_of_a_run_over_each_other(seen: Seen, address: str) -> None:
    state = "metrics?run=demo&filter=%5Eloss%24"
    page = opened(seen, address, state, ".slot .u-over")
    page.get_by_label("Compare with another run or attempt").select_option("demo@1")
    page.wait_for_url("**compare=demo%401*")
    page.locator(".legend-entry").nth(1).wait_for()
    said = [each.split("\n")[0] for each in page.locator(".legend-entry").all_inner_texts()]
    assert said[0].startswith("demo")
    assert said[1].startswith("demo, attempt 1")
    page.get_by_role("button", name="loss as a table").click()
    rows = page.get_by_role("region", name="loss as a table").locator("tbody tr")
    first = httpx.get(
        f"{address}/api/v1/history",
        params={"run": "demo", "key": "loss", "attempt": 1, "max_points": 500},
        trust_env=False,
    ).json()["histories"][0]["points"]
    row = rows.filter(has_text=re.compile(rf"^{first[-1]['x']}\b")).first
    assert row.locator("td").nth(1).get_attribute("title") == str(first[-1]["value"])
    page.get_by_role("button", name="Stop comparing with demo, attempt 1").click()
    page.wait_for_url(lambda url: "compare" not in url)


def test_two_recipes_side_by_side(seen: Seen, address: str) -> None:
    page = opened(seen, address, "runs?run=demo", ".recipe tbody tr")
    text = page.locator(".recipe").inner_text()
    assert "trainer.max_steps" in text
    assert SECRET not in page.content()
    changes = page.get_by_role("region", name="Changes of the recipe").locator("tbody tr")
    assert [each.split()[-3:] for each in changes.all_inner_texts()] == [
        ["trainer.max_steps", "200", "400"]
    ]
    page.get_by_role("button", name="compare with demo").click()
    rows = page.get_by_role("region", name="Recipes of demo and baseline").locator("tbody tr")
    rows.first.wait_for()
    assert [each.split() for each in rows.all_inner_texts()] == [
        ["generation.num_generations", "8", "4"],
        ["optimizer.learning_rate", "1e-5", "5e-6"],
        ["run", "demo", "baseline"],
        ["trainer.max_steps", "400", "200"],
    ]


def test_a_drag_zooms_every_plot_and_r_goes_back(seen: Seen, address: str) -> None:
    page = opened(seen, address, "time?run=demo", ".u-over")
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=5)
    page.mouse.up()
    page.wait_for_url("**since=*")
    points = httpx.get(f"{address}/api/v1/runs/demo/metrics/perf/step_s", trust_env=False).json()
    last = points["points"][-1]["x"]
    zoom = re.search(r"since=(\d+)&until=(\d+)", page.url)
    assert zoom is not None
    assert int(zoom[1]) == pytest.approx(last * 0.25, abs=1)
    assert int(zoom[2]) == pytest.approx(last * 0.5 + 1, abs=1)
    page.keyboard.press("r")
    page.wait_for_url(lambda url: "since" not in url)


def test_from_a_step_to_a_group_to_its_row(seen: Seen, address: str) -> None:
    page = opened(seen, address, "lineage?run=demo&step=2", "tbody a")
    page.locator("tbody a").first.click()
    page.get_by_role("heading", name=re.compile(r"^Group 0\.64\.1\.1")).wait_for()
    assert "800 ms" in page.locator(".way").inner_text()
    page.get_by_role("link", name="64", exact=True).click()
    page.get_by_role("heading", name=re.compile("^Row 64 was dispatched in")).wait_for()


def test_a_conversation_is_read_from_top_to_bottom(seen: Seen, address: str) -> None:
    page = opened(seen, address, "rollouts?run=demo&reward_min=0.5", ".rollout-list li")
    listed = page.locator(".rollout-list li")
    known = httpx.get(
        f"{address}/api/v1/runs/demo/rollouts", params={"reward_min": 0.5}, trust_env=False
    ).json()["rollouts"]
    assert listed.count() == len(known) == 8
    listed.first.locator("a").click()
    page.locator(".message").first.wait_for()
    roles = [each.split()[0] for each in page.locator(".message .role").all_inner_texts()]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert page.locator(".tokens .trained").all_inner_texts() == ["Fo", "ur."]
    page.get_by_role("button", name="by log-probability").click()
    doubts = page.locator(".tokens .shaded").evaluate_all(
        "all => all.map(each => each.style.getPropertyValue('--doubt'))"
    )
    assert doubts == ["8%", "4%"]
    page.get_by_role("link", name="older →").click()
    page.get_by_role("heading", name=known[1]["rollout_id"]).wait_for()
    assert "reward_min=0.5" in page.url
    page.keyboard.press("j")
    page.get_by_role("heading", name=known[2]["rollout_id"]).wait_for()
    page.keyboard.press("k")
    page.get_by_role("heading", name=known[1]["rollout_id"]).wait_for()
    assert "reward_min=0.5" in page.url


def test_what_is_not_there_is_said(seen: Seen, address: str) -> None:
    seen.page.goto(f"{address}/#/overview?run=nobody")
    said = seen.page.get_by_role("alert")
    said.wait_for()
    assert said.inner_text().endswith("no run 'nobody'; runs here: demo, baseline")


def test_the_theme_is_kept(seen: Seen, address: str) -> None:
    page = opened(seen, address, "runs?run=demo", "tbody tr")
    page.keyboard.press("t")
    page.keyboard.press("t")
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
