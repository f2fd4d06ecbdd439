"""The first view: its numbers are the API's, and it says what to do."""

from typing import Any
from urllib.parse import urlsplit

import httpx

from services.aggregator.store import Store
from services.common.tokens import Tokens
from tests.browser.conftest import Seen, watched
from tests.browser.data import serving


def asked(address: str, path: str) -> Any:
    return httpx.get(f"{address}/api/v1/runs/demo{path}", trust_env=False).raise_for_status().json()


def overview(seen: Seen, address: str) -> Any:
    seen.page.goto(f"{address}/#/overview?run=demo")
    seen.page.locator(".ledger .sum").wait_for()
    seen.page.locator(".verdict .said").wait_for()
    return seen.page


def test_the_verdict_is_the_first_thing_that_is_read(seen: Seen, address: str) -> None:
    page = overview(seen, address)
    found = asked(address, "/verdict")
    said = page.locator(".verdict .said").inner_text()
    assert found["verdict"] == "generation-bound"
    assert said.startswith("Generation-bound. The trainer waits ")
    assert f"{found['share'] * 100:.0f} % of each step" in said
    assert "generator.replicas" in page.locator(".verdict .next").inner_text()


def test_the_dam_stands_before_the_stage_that_holds_the_run_back(seen: Seen, address: str) -> None:
    page = overview(seen, address)
    share = asked(address, "/verdict")["share"]
    page.locator(".river .dam").wait_for()
    assert page.locator(".river .dam-text").text_content() == f"holds {share * 100:.0f} %"
    dam = page.locator(".river rect.dam").bounding_box()
    stage = page.locator(".river .stage.dammed")
    stage.wait_for()
    generators = stage.bounding_box()
    assert dam is not None
    assert generators is not None
    assert dam["x"] < generators["x"] < dam["x"] + 12


def test_the_ledger_on_the_screen_is_the_apis(seen: Seen, address: str) -> None:
    page = overview(seen, address)
    found = asked(address, "/ledger")
    text = " ".join(page.locator(".ledger").inner_text().split())
    assert f"{found['dispatched']:,} groups dispatched =" in text
    assert f"{found['trained']:,} trained" in text
    assert f"{found['dropped']:,} dropped" in text
    assert f"{found['in_flight']:,} in flight" in text
    assert "adds up" in text


def test_a_table_behind_a_plot_has_the_apis_values(seen: Seen, address: str) -> None:
    page = overview(seen, address)
    page.get_by_role("button", name="Reward as a table").click()
    row = page.get_by_role("region", name="Reward as a table").locator("tbody tr").first
    points = asked(address, "/metrics/reward")["points"]
    assert row.locator("th").inner_text() == str(points[-1]["x"])
    assert row.locator("td").first.get_attribute("title") == f"{points[-1]['value']} reward"


def test_no_complaint_and_no_other_host(seen: Seen, address: str) -> None:
    overview(seen, address)
    seen.page.locator(".u-over").first.wait_for()
    assert seen.complaints == []
    assert {urlsplit(each).netloc for each in seen.addresses} == {urlsplit(address).netloc}


def test_firing_alerts_are_said(seen: Seen, address: str) -> None:
    page = overview(seen, address)
    said = page.get_by_role("region", name="Firing alerts")
    said.wait_for()
    (firing,) = asked(address, "/alerts")["firing"]
    assert f"{firing['name']} {firing['sentence']}." in said.inner_text()


def test_a_token_is_asked_for_once_and_kept_out_of_the_address(browser: Any, store: Store) -> None:
    with serving(store, tokens=Tokens("secret")) as address:
        context = browser.new_context()
        seen = watched(context)
        seen.page.goto(address)
        seen.page.get_by_label("This aggregator wants a token:").fill("wrong")
        seen.page.get_by_role("button", name="Continue").click()
        seen.page.get_by_label("That token was not accepted. Token:").fill("secret")
        seen.page.get_by_role("button", name="Continue").click()
        seen.page.locator(".verdict .said").wait_for()
        seen.page.reload()
        seen.page.locator(".verdict .said").wait_for()
        assert not any("secret" in each for each in seen.addresses)
        context.close()
