"""Several metrics and runs in one call."""

import httpx
import pytest

from services.aggregator.api import histories
from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.ingest import Ingest
from services.common.tokens import Tokens
from tests.services.aggregator.asking import problem, strict
from tests.services.aggregator.making import NAN, Producer, count, observed


@pytest.fixture
def two_runs(ingest: Ingest) -> None:
    """Runs a and b with `loss` and `rollout/failed_total`; only a has `custom/mine`."""
    for run, offset in (("a", 0.0), ("b", 10.0)):
        producer = Producer("trainer-0", run=run)
        for step in range(6):
            deltas = [
                ("loss", observed([offset + step] if step else [NAN])),
                ("rollout/failed_total", count(step)),
            ]
            if run == "a":
                deltas.append(("custom/mine", count(1)))
            producer.send(ingest, deltas, step=step)


@pytest.mark.usefixtures("two_runs")
async def test_all_runs_of_the_first_key_come_first(client: httpx.AsyncClient) -> None:
    path = "/api/v1/history?run=b&run=a&key=rollout/failed_total&key=loss&until=2&run=a"
    found = strict(await client.get(path))["histories"]
    assert [(each["key"], each["run"], each["reduce"]) for each in found] == [
        ("rollout/failed_total", "b", "sum"),
        ("rollout/failed_total", "a", "sum"),
        ("loss", "b", "mean"),
        ("loss", "a", "mean"),
    ]
    assert found[2]["points"] == [{"x": 0, "value": None, "nan": 1}, {"x": 1, "value": 11.0}]
    one = strict(await client.get("/api/v1/runs/b/metrics/loss?until=2"))
    assert found[2] == {name: value for name, value in one.items() if name != "next_page"}


@pytest.mark.usefixtures("two_runs")
async def test_they_take_the_parameters_of_one(client: httpx.AsyncClient) -> None:
    query = "axis=time&reduce=max&max_points=1&group_by=producer&attempt=1&since=2020-01-01"
    (found,) = strict(await client.get(f"/api/v1/history?run=a&key=loss&{query}"))["histories"]
    one = strict(await client.get(f"/api/v1/runs/a/metrics/loss?{query}"))
    assert one.pop("next_page") is None
    assert found == one
    assert found["by_producer"]["trainer-0"][0]["value"] == 5.0


@pytest.mark.usefixtures("two_runs")
async def test_a_key_that_one_of_the_runs_lacks_is_empty_there(client: httpx.AsyncClient) -> None:
    for key, sizes in (("custom/mine", [0, 6]), ("loss", [6, 6]), ("kl", [0, 0])):
        found = strict(await client.get(f"/api/v1/history?run=b&run=a&key={key}"))["histories"]
        assert [len(each["points"]) for each in found] == sizes, key


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("run=a&run=none&key=loss", 404, "no run 'none'; runs here: "),
        ("run=a&run=%00&key=loss", 404, "no run"),
        ("run=b&key=custom/mine", 404, "no metric 'custom/mine' in b"),
        ("run=a&run=b&key=loss&key=lost", 404, "no metric 'lost' in a, b"),
        ("run=a&run=b&key=custom/%00", 404, "no metric"),
        ("run=a&key=step_time", 404, "step_time is called perf/fwd_bwd_s here"),
        ("run=a&key=loss&key=rollout/failed_total&reduce=p95", 422, "not for rollout/failed"),
        ("run=a", 422, "key"),
        ("key=loss", 422, "run"),
        ("run=a&key=loss&since=2&until=1", 422, "since"),
        ("run=a&key=loss&max_points=0", 422, "max_points"),
        ("run=a&run=b" + "".join(f"&key=kl/{n}" for n in range(101)), 422, "200 fit"),
    ],
)
async def test_what_cannot_be_answered_says_what_to_do(
    client: httpx.AsyncClient, query: str, status: int, says: str
) -> None:
    assert says in await problem(client, f"/api/v1/history?{query}", status)


@pytest.mark.usefixtures("two_runs")
async def test_many_histories_share_the_points(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "MAX_TOTAL_POINTS", 8)
    found = strict(await client.get("/api/v1/history?run=a&run=b&key=loss&key=kl"))["histories"]
    assert [each["width"] for each in found] == [3, 3, 1, 1]
    full = "".join(f"&key=kl/{n}" for n in range(98)) + "&key=loss&key=reward"
    monkeypatch.undo()
    found = strict(await client.get(f"/api/v1/history?run=a&run=b{full}"))["histories"]
    assert len(found) == 200
    assert sum(len(each["points"]) for each in found) == 12


async def test_the_token_is_needed_here_too(backend: Backend) -> None:
    transport = httpx.ASGITransport(create_app(backend, tokens=Tokens("s3cret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://aggregator") as client:
        for path in ("history?run=a&key=b", "runs/a/metrics/b", "runs/a/export"):
            assert "bearer token" in await problem(client, f"/api/v1/{path}", 401)
