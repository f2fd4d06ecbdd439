"""The Grafana dashboard: each of its queries, put to the real API over a store that holds every
metric of the catalogue."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.metric import Metric
from services.aggregator.promql.names import Names
from services.aggregator.store import Store
from tests.services.aggregator.making import NOW_S, Build, Producer, count, observed, ratio

ROOT = Path(__file__).parents[2]

DASHBOARD = json.loads((ROOT / "deploy/grafana/headrace.json").read_text())

BUCKETS = 18
"""Of 10 s: the run of these tests lasts three minutes."""

END_S = NOW_S + 10 * BUCKETS

PLACES = {"lag": "0", "stream": "groups"}
"""Values of placeholders that the dashboard names; others are `some`."""

DISJOINT = 9
"""Parts that make up a step."""


def panels() -> list[dict[str, Any]]:
    return [each for each in DASHBOARD["panels"] if each["type"] != "row"]


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def measured(metric: Metric) -> Build:
    match metric.instrument:
        case "count":
            return count(40.0)
        case "ratio":
            return ratio(1.0, 4.0)
        case _:
            return observed([2.0])


def every_key(service: str) -> list[tuple[str, Build]]:
    """All that a service records."""
    found = []
    for metric in CATALOGUE.metrics:
        if metric.producers[0] == service:
            name = re.search(r"\{(\w+)\}", metric.key)
            value = PLACES.get(name.group(1), "some") if name else "some"
            found.append((metric.key_for(value), measured(metric)))
    return found


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """The application over a run in which two replicas of each service record every key."""
    store = Store.open(f"sqlite:///{tmp_path_factory.mktemp('grafana') / 'metrics.sqlite'}")
    ingest = Ingest(store)
    services = ("generator", "scorer", "trainer", "aggregator")
    producers = {
        (service, number): Producer(f"{service}-{number}", service=service)
        for service in services
        for number in (0, 1)
    }
    for bucket in range(BUCKETS):
        for (service, _), producer in producers.items():
            producer.send(
                ingest,
                every_key(service),
                step=bucket,
                duration_s=9.999,
                now_s=NOW_S + 10 * bucket + 9.999,
            )
    with ThreadPoolExecutor(1) as writer:
        yield create_app(Backend(store, CATALOGUE, writer), clock=lambda: END_S)
    store.close()


def shown(query: str) -> str:
    """A query as Grafana sends it: its variables filled in."""
    filled = query.replace("$__rate_interval", "1m").replace("$run", "demo")
    assert "$" not in filled, f"{query}: an unknown variable"
    return filled


async def range_of(app: FastAPI, query: str) -> list[Any]:
    """What a panel shows of the last two minutes."""
    async with client(app) as asking:
        response = await asking.post(
            "/prometheus/api/v1/query_range",
            data={
                "query": shown(query),
                "start": END_S - 120,
                "end": END_S,
                "step": 10,
            },
        )
    assert response.status_code == 200, f"{query}: {response.text}"
    answer = response.json()
    assert answer["status"] == "success"
    found: list[Any] = answer["data"]["result"]
    return found


def client(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://aggregator")


@pytest.mark.parametrize("query", sorted(set(queries())))
async def test_every_query_is_answered_with_numbers(app: FastAPI, query: str) -> None:
    found = await range_of(app, query)
    assert found, f"{query}: no series"
    for series in found:
        assert len(series["values"]) >= 10
        assert all(float(value) >= 0 for _, value in series["values"])


def test_every_name_is_one_of_the_catalogue() -> None:
    known = {family.name for family in Names(CATALOGUE).families}
    named = {name for query in queries() for name in re.findall(r"headrace_\w+", query)}
    assert named
    assert named <= known, named - known


async def test_legends_name_labels_that_there_are(app: FastAPI) -> None:
    for panel in panels():
        for target in panel["targets"]:
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for series in await range_of(app, target["expr"]):
                assert labels <= set(series["metric"]), (panel["title"], series["metric"])


async def test_the_numbers_are_the_runs(app: FastAPI) -> None:
    by_title = {panel["title"]: panel for panel in panels()}
    (fleet,) = await range_of(app, by_title["Generated"]["targets"][0]["expr"])
    assert float(fleet["values"][-1][1]) == pytest.approx(2 * 40 / 10, rel=0.01)
    each = await range_of(app, by_title["Generated tokens per second"]["targets"][0]["expr"])
    assert {series["metric"]["producer"] for series in each} == {"generator-0", "generator-1"}
    parts = by_title["Seconds of a step"]["targets"]
    assert len({part["expr"] for part in parts}) == DISJOINT
    (share,) = await range_of(app, by_title["Waits for rollouts"]["targets"][0]["expr"])
    assert float(share["values"][-1][1]) == pytest.approx(1.0)


async def test_the_variable_lists_the_runs(app: FastAPI) -> None:
    (run,) = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "run"]
    label = re.fullmatch(r"label_values\((\w+)\)", run["query"]["query"])
    assert label is not None
    async with client(app) as asking:
        answer = (await asking.get(f"/prometheus/api/v1/label/{label.group(1)}/values")).json()
    assert answer["data"] == ["demo"]


def test_nothing_in_it_is_bound_to_one_grafana() -> None:
    """It is imported as it is: panels take the data source of the variable, and do not overlap."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            assert panel["description"]
            for holder in (panel, *panel["targets"]):
                assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert all(column < 24 for column, _ in cells)
        assert not cells & taken, f"{panel['title']} overlaps another panel"
        taken |= cells
