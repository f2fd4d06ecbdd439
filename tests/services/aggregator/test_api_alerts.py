"""Alerts by REST, and in the stream of a run."""

from typing import Any

import httpx
import pytest

from services.aggregator import alert_book
from services.aggregator.api import stream
from services.aggregator.api.backend import Backend
from services.aggregator.ingest import Ingest
from services.aggregator.series import find_run
from services.aggregator.store import Store
from tests.services.aggregator.asking import problem, strict
from tests.services.aggregator.making import NOW_S, Producer, observed
from tests.services.aggregator.test_api_stream import listening, serving

PATH = "/api/v1/runs/demo/alerts"


@pytest.fixture(autouse=True)
def begun(ingest: Ingest, monkeypatch: pytest.MonkeyPatch) -> Producer:
    """A run with one step."""
    monkeypatch.setattr(stream, "POLL_S", 0.05)
    producer = Producer("trainer-0")
    producer.send(ingest, [("loss", observed([1.0]))], step=3)
    return producer


def fire(store: Store, name: str, *, now_s: float = NOW_S) -> None:
    with store.write() as writing:
        alert_book.fire(
            writing.connection,
            run_id(store),
            name=name,
            severity="warning",
            sentence=f"{name} is wrong.",
            value=2.5,
            step=3,
            now_s=now_s,
            tell=False,
        )


def end(store: Store, name: str, *, now_s: float = NOW_S + 60) -> None:
    with store.write() as writing:
        alert_book.end(
            writing.connection,
            run_id(store),
            name=name,
            because="it is right again",
            now_s=now_s,
            tell=False,
        )


def run_id(store: Store) -> int:
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
    assert run is not None
    return run.id


async def test_firing_and_past_alerts_are_listed(client: httpx.AsyncClient, store: Store) -> None:
    assert strict(await client.get(PATH)) == {
        "run": "demo",
        "firing": [],
        "past": [],
        "failed_calls": 0,
        "pending_calls": 0,
    }
    for name in ("a", "b", "c"):
        fire(store, name)
    end(store, "b")
    answer = strict(await client.get(PATH))
    assert [each["name"] for each in answer["firing"]] == ["c", "a"]
    assert answer["past"] == [
        {
            "id": 2,
            "name": "b",
            "severity": "warning",
            "sentence": "b is wrong.",
            "value": 2.5,
            "step": 3,
            "fired_at": "2027-01-15T08:00:00Z",
            "ended_at": "2027-01-15T08:01:00Z",
            "ended_because": "it is right again",
            "told": {},
        }
    ]
    assert strict(await client.get(PATH, params={"limit": 0}))["past"] == []


async def test_what_is_asked_wrongly_is_refused(client: httpx.AsyncClient) -> None:
    assert "no run 'other'" in await problem(client, "/api/v1/runs/other/alerts", 404)
    await problem(client, f"{PATH}?limit=-1", 422)
    await problem(client, f"{PATH}?newest=1", 422)


def test_old_alerts_are_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_book, "KEPT", 3)
    for number in range(6):
        fire(store, f"alert-{number}")
        end(store, f"alert-{number}")
    fire(store, "last")
    with store.engine.begin() as connection:
        found = alert_book.past(connection, run_id(store), limit=10)
    assert [each.name for each in found] == ["alert-5", "alert-4", "alert-3"]


async def test_the_stream_tells_of_alerts_when_they_change(
    backend: Backend, ingest: Ingest, begun: Producer
) -> None:
    async with serving(backend) as client, listening(client) as listener:
        assert (await listener.event()).name == "line"
        fire(backend.store, "stall")
        event = await listener.event()
        assert (event.name, names(event.data["firing"])) == ("alerts", ["stall"])
        begun.send(ingest, [("loss", observed([0.5]))], step=4)
        assert (await listener.event()).name == "points"  # and the alerts, unchanged, are not told
        end(backend.store, "stall")
        event = await listener.event()
        assert (event.name, event.data["firing"]) == ("alerts", [])
        assert names(event.data["past"]) == ["stall"]


async def test_who_begins_to_listen_is_told_what_fires(backend: Backend) -> None:
    fire(backend.store, "stall")
    async with serving(backend) as client, listening(client, "?key=loss") as listener:
        first, second = await listener.event(), await listener.event()
        assert (first.name, second.name) == ("line", "alerts")
        assert names(second.data["firing"]) == ["stall"]
        assert second.id == first.id


def names(found: list[dict[str, Any]]) -> list[str]:
    return [each["name"] for each in found]
