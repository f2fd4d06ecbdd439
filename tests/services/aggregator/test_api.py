import json
import re

import httpx
import pytest
from sqlalchemy import text

from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from services.common.tokens import Tokens
from tests.services.aggregator.asking import problem, strict
from tests.services.aggregator.making import (
    NAN,
    NOW_S,
    Producer,
    count,
    event,
    observed,
    ratio,
)


async def test_probes(client: httpx.AsyncClient) -> None:
    assert strict(await client.get("/healthz")) == {"status": "ok"}
    assert strict(await client.get("/readyz")) == {"status": "ready"}


async def test_a_store_that_cannot_be_written_is_not_ready(
    client: httpx.AsyncClient, store: Store
) -> None:
    with store.engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TRIGGER broken BEFORE UPDATE ON meta "
                "BEGIN SELECT RAISE(ABORT, 'the disk broke'); END"
            )
        )
    assert "the disk broke" in await problem(client, "/readyz", 503)
    assert (await client.get("/healthz")).status_code == 200


async def test_runs_show_who_was_seen(client: httpx.AsyncClient, ingest: Ingest) -> None:
    assert strict(await client.get("/api/v1/runs")) == {"runs": []}
    Producer("trainer-0").send(ingest, [("loss", observed([1.0]))], step=7)
    Producer("scorer-0", service="scorer").send(
        ingest, [("reward", observed([0.5]))], step=8, now_s=NOW_S + 5, sequence=3
    )
    (run,) = strict(await client.get("/api/v1/runs"))["runs"]
    assert run == {
        "run": "demo",
        "attempt": 1,
        "latest_step": 8,
        "first_seen": "2027-01-15T07:59:59Z",
        "last_seen": "2027-01-15T08:00:05Z",
        "num_producers": 3,
        "missing_batches": 2,
        "keep_days": None,
        "kept_until": None,
    }
    detail = strict(await client.get("/api/v1/runs/demo"))
    assert [(a["attempt"], a["first_step"], a["last_step"]) for a in detail["attempts"]] == [
        (1, 7, 8)
    ]
    seen = {p["producer"]: (p["service"], p["missing_batches"]) for p in detail["producers"]}
    assert seen == {
        "aggregator": ("aggregator", 0),
        "scorer-0": ("scorer", 2),
        "trainer-0": ("trainer", 0),
    }


async def test_what_comes_before_the_trainer_is_of_no_attempt(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    early = Producer("generator-0", service="generator")
    early.send(ingest, [("loss", observed([1.0]))], step=0, attempt=0)
    detail = strict(await client.get("/api/v1/runs/demo"))
    assert (detail["attempt"], detail["attempts"]) == (None, [])
    early.send(ingest, [("loss", observed([1.0]))], step=1)
    detail = strict(await client.get("/api/v1/runs/demo"))
    assert (detail["attempt"], [each["attempt"] for each in detail["attempts"]]) == (1, [1])


async def test_metrics_list_latest_values(client: httpx.AsyncClient, ingest: Ingest) -> None:
    producer = Producer("trainer-0")
    producer.send(ingest, [("loss", observed([1.0])), ("kl", ratio(0, 0))], step=1)
    producer.send(ingest, [("loss", observed([3.0, 5.0, NAN])), ("kl/0", ratio(1, 4))], step=2)
    metrics = strict(await client.get("/api/v1/runs/demo/metrics?match=^(loss|kl)"))["metrics"]
    assert metrics == [
        {
            "key": "kl",
            "instrument": "ratio",
            "unit": "nats",
            "reduce": "ratio",
            "value": None,
            "step": 1,
        },
        {
            "key": "kl/0",
            "instrument": "ratio",
            "unit": "nats",
            "reduce": "ratio",
            "value": 0.25,
            "step": 2,
        },
        {
            "key": "loss",
            "instrument": "observation",
            "unit": "1",
            "reduce": "mean",
            "value": 4.0,
            "step": 2,
            "nan": 1,
        },
    ]
    everything = strict(await client.get("/api/v1/runs/demo/metrics"))["metrics"]
    assert {"ingest/deltas", "ingest/gaps", "loss"} <= {each["key"] for each in everything}


@pytest.fixture
def recorded(ingest: Ingest) -> None:
    """`loss` at one step."""
    Producer("trainer-0").send(ingest, [("loss", observed([1.0]))])


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("runs/none", "no run 'none'; runs here: demo"),
        ("runs/none/metrics", "no run"),
        ("runs/none/groups/counts", "no run"),
        ("runs/demo/metrics/nothing", "/api/v1/catalogue"),
        ("runs/demo/metrics/iteration_time_s", "iteration_time_s is called perf/step_s here"),
        ("nothing", "/docs lists"),
    ],
)
async def test_what_is_not_there_is_404(client: httpx.AsyncClient, path: str, says: str) -> None:
    assert says in await problem(client, f"/api/v1/{path}", 404)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("runs?all=1", "'all' is no parameter of this endpoint; it has none"),
        ("runs/demo/metrics?reduce=max", "'reduce' is no parameter of this endpoint; it has match"),
        ("runs/demo/export?keys=loss", "it has key, format, axis"),
        ("runs/demo/stream?since=4", "it has key, after"),
        ("runs/demo/verdict?steps=20", "it has window, speed_up"),
        ("history?run=demo&key=loss&limit=4", "it has run, key"),
    ],
)
async def test_a_parameter_that_is_not_there_is_not_ignored(
    client: httpx.AsyncClient, path: str, says: str
) -> None:
    assert says in await problem(client, f"/api/v1/{path}", 422)


@pytest.mark.usefixtures("recorded")
async def test_a_bad_expression_is_422(client: httpx.AsyncClient) -> None:
    assert "not a regular" in await problem(client, "/api/v1/runs/demo/metrics?match=(", 422)


async def test_groups_are_counted(client: httpx.AsyncClient, ingest: Ingest) -> None:
    Producer("trainer-0").send(
        ingest,
        events=[event("0.0.1.0", "trained"), event("0.1.1.0", "dropped", reason="stale")],
    )
    answer = strict(await client.get("/api/v1/runs/demo/groups/counts"))
    assert answer["states"] == {
        "dispatched": 0,
        "generating": 0,
        "generated": 0,
        "scoring": 0,
        "scored": 0,
        "queued": 0,
        "trained": 1,
        "dropped": 1,
        "given_up": 0,
        "rolled_back": 0,
    }
    assert (answer["total"], answer["in_flight"]) == (2, 0)
    assert answer["reasons"] == {"dropped": {"stale": 1}}


async def test_a_run_can_be_deleted(client: httpx.AsyncClient, ingest: Ingest) -> None:
    Producer("p").send(ingest, [("rollout/failed_total", count(1))])
    assert (await client.delete("/api/v1/runs/demo")).status_code == 204
    assert strict(await client.get("/api/v1/runs")) == {"runs": []}
    assert (await client.delete("/api/v1/runs/demo")).status_code == 404


async def test_the_catalogue_is_served(client: httpx.AsyncClient) -> None:
    answer = strict(await client.get("/api/v1/catalogue"))
    assert [each["key"] for each in answer["metrics"]] == [m.key for m in CATALOGUE.metrics]
    reward = next(each for each in answer["metrics"] if each["key"] == "reward")
    assert reward["reductions"][0] == "mean"
    assert (reward["since"], reward["old_names"]) == (None, [])
    assert answer["renamed"]["batch/pad_frac"] == ["batch/row_fill_frac"]
    (step_time,) = (each for each in answer["metrics"] if each["key"] == "perf/fwd_bwd_s")
    assert step_time["old_names"] == ["step_time"]
    assert answer["renamed"]["step_time"] == ["perf/fwd_bwd_s"]


async def test_the_docs_name_no_host(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert page.status_code == 200
    assert "//" not in re.sub(r"<!--.*?-->|// .*", "", page.text)
    linked = re.findall(r"(?:src|href)=\"([^\"]+)\"|url: '([^']+)'", page.text)
    addresses = [src or url for src, url in linked]
    assert len(addresses) == 4
    for address in addresses:
        assert (await client.get(f"/{address}")).status_code == 200, address
    assert '"validatorUrl": null' in page.text
    assert (await client.get("/docs/swagger-initializer.js")).status_code == 404


async def test_the_document_is_what_the_bundled_page_renders(client: httpx.AsyncClient) -> None:
    document = strict(await client.get("/openapi.json"))
    assert document["openapi"].startswith("3.0")
    assert '{"type": "null"}' not in json.dumps(document)
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert referred <= set(document["components"]["schemas"])
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # What speaks Prometheus' API answers its errors too.
            if "parameters" in operation and not path.startswith("/prometheus/"):
                problems = operation["responses"]["422"]["content"]
                assert set(problems) == {"application/problem+json"}


async def test_with_a_token_all_data_needs_it(backend: Backend) -> None:
    transport = httpx.ASGITransport(create_app(backend, tokens=Tokens("s3cret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://aggregator") as client:
        for path in ("/healthz", "/readyz", "/docs", "/docs/metrics", "/openapi.json"):
            assert (await client.get(path)).status_code == 200, path
        for path in ("/api/v1/runs", "/api/v1/catalogue", "/api/v1/runs/demo/metrics"):
            assert "bearer token" in await problem(client, path, 401)
        assert (await client.delete("/api/v1/runs/demo")).status_code == 401
        for sent, status in (("s3cret", 200), ("secret", 401), ("ü", 401)):
            headers = {b"Authorization": f"Bearer {sent}".encode()}
            assert (await client.get("/api/v1/runs", headers=headers)).status_code == status
