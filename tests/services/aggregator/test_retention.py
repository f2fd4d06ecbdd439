"""How long runs are kept: by REST, and by the sweep over a real store."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import SQLAlchemyError
from structlog.testing import capture_logs

from services.aggregator import retention
from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.ingest import Ingest
from services.aggregator.overview import run_names
from services.aggregator.retention import (
    DAY_S,
    FOREVER_S,
    Kept,
    expired,
    keep_sweeping,
    kept_runs,
    set_keep,
    sweep,
)
from services.aggregator.store import Store
from tests.services.aggregator.making import NOW_S, Producer, observed
from tests.services.aggregator.test_service import serving


def heard_of(ingest: Ingest, run: str, *, days_ago: float) -> None:
    producer = Producer("trainer-0", run=run, boot_id=f"{run}-{days_ago}")
    producer.send(ingest, [("loss", observed([1.0]))], now_s=NOW_S - days_ago * DAY_S)


def names(store: Store) -> list[str]:
    with store.engine.begin() as connection:
        return run_names(connection)


def test_a_run_expires_when_its_time_has_passed_and_not_before() -> None:
    runs = [
        Kept("own", 1000.0, 60.0),
        Kept("default", 1000.0, None),
        Kept("forever", 0.0, FOREVER_S),
        Kept("older", 900.0, 60.0),
    ]
    assert expired(runs, now_s=960.0, default_s=100.0) == []
    assert expired(runs, now_s=1060.0, default_s=100.0) == ["older"]
    assert expired(runs, now_s=1060.1, default_s=100.0) == ["older", "own"]
    assert expired(runs, now_s=1100.1, default_s=100.0) == ["older", "default", "own"]
    assert expired(runs, now_s=1e12, default_s=FOREVER_S) == ["older", "own"]


async def test_a_sweep_deletes_what_has_expired(
    backend: Backend, store: Store, ingest: Ingest
) -> None:
    for run, days_ago in (("new", 1.0), ("old", 8.0), ("short", 3.0), ("kept", 30.0)):
        heard_of(ingest, run, days_ago=days_ago)
    assert set_keep(store, "short", keep_s=2 * DAY_S)
    assert set_keep(store, "kept", keep_s=FOREVER_S)
    assert not set_keep(store, "none", keep_s=1.0)
    with capture_logs() as logs:
        swept = await sweep(store, write=backend.write, default_s=7 * DAY_S, clock=lambda: NOW_S)
    assert swept == ["old", "short"]
    assert names(store) == ["new", "kept"]
    assert [(log["run"], log["kept_days"]) for log in logs] == [("old", 7.0), ("short", 2.0)]
    assert await sweep(store, write=backend.write, default_s=7 * DAY_S, clock=lambda: NOW_S) == []


async def test_a_run_that_is_heard_of_in_the_middle_of_a_sweep_stays(
    backend: Backend, store: Store, ingest: Ingest
) -> None:
    for run in ("first", "second"):
        heard_of(ingest, run, days_ago=9.0)

    async def write(work: Callable[[], Any]) -> Any:
        """A batch of `second` comes while the first run is deleted."""
        done = await backend.write(work)
        await backend.write(lambda: heard_of(ingest, "second", days_ago=0.0))
        return done

    swept = await sweep(store, write=write, default_s=7 * DAY_S, clock=lambda: NOW_S)
    assert swept == ["first"]
    assert names(store) == ["second"]


async def test_sweeping_goes_on_after_a_store_that_failed(
    backend: Backend, store: Store, ingest: Ingest
) -> None:
    heard_of(ingest, "demo", days_ago=5000.0)
    failures = [SQLAlchemyError("the disk is away")]
    tried = asyncio.Event()

    async def write(work: Callable[[], Any]) -> Any:
        if failures:
            raise failures.pop()
        done = await backend.write(work)
        tried.set()
        return done

    with capture_logs() as logs:
        sweeping = asyncio.create_task(
            keep_sweeping(store, write=write, default_s=1.0, every_s=0.01)
        )
        await asyncio.wait_for(tried.wait(), 30)
        sweeping.cancel()
    assert names(store) == []
    assert "the disk is away" in logs[0]["cause"]
    with pytest.raises(asyncio.CancelledError):
        await sweeping


async def test_a_run_says_how_long_it_is_kept(backend: Backend, ingest: Ingest) -> None:
    heard_of(ingest, "demo", days_ago=0.0)
    served = replace(backend, keep_s=10 * DAY_S)
    transport = httpx.ASGITransport(create_app(served))
    async with httpx.AsyncClient(transport=transport, base_url="http://aggregator") as client:

        async def shown() -> tuple[Any, Any]:
            (listed,) = (await client.get("/api/v1/runs")).json()["runs"]
            alone = (await client.get("/api/v1/runs/demo")).json()
            assert {name: alone[name] for name in listed} == listed
            return listed["keep_days"], listed["kept_until"]

        async def keep(days: object) -> None:
            answer = await client.patch("/api/v1/runs/demo", json={"keep_days": days})
            assert answer.status_code == 200, answer.text
            assert (answer.json()["keep_days"], answer.json()["kept_until"]) == await shown()

        assert await shown() == (None, "2027-01-25T08:00:00Z")
        await keep(0.5)
        assert await shown() == (0.5, "2027-01-15T20:00:00Z")
        await keep(3.609)
        assert (await shown())[0] == 3.609
        await keep("forever")
        assert await shown() == ("forever", None)
        with backend.read() as connection:
            assert kept_runs(connection)["demo"].keep_s == math.inf
        await keep(None)
        assert await shown() == (None, "2027-01-25T08:00:00Z")
        await keep(36_500)
        assert (await shown())[1].startswith("2126-")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"keep_days": 0}', "greater than 0"),
        ('{"keep_days": -1}', "greater than 0"),
        ('{"keep_days": 36501}', "less than or equal to 36500"),
        ('{"keep_days": NaN}', "finite"),
        ('{"keep_days": 1e999}', "finite"),
        ('{"keep_days": true}', "valid number"),
        ('{"keep_days": "7"}', "forever"),
        ('{"keep_days": []}', "valid number"),
        ("{}", "keep_days: Field required"),
        ('{"keep_days": 1, "keep_s": 1}', "keep_s: Extra inputs"),
        ('{"keep_days"', "JSON"),
        ("[]", ""),
    ],
)
async def test_a_time_that_is_none_is_refused(
    client: httpx.AsyncClient, ingest: Ingest, body: str, says: str
) -> None:
    heard_of(ingest, "demo", days_ago=0.0)
    answer = await client.patch(
        "/api/v1/runs/demo", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert says in answer.json()["detail"]
    assert (await client.get("/api/v1/runs/demo")).json()["keep_days"] is None


async def test_a_run_that_is_not_there_is_not_kept(client: httpx.AsyncClient) -> None:
    answer = await client.patch("/api/v1/runs/none", json={"keep_days": 1})
    assert answer.status_code == 404
    assert "no run 'none'" in answer.json()["detail"]


async def test_the_aggregator_sweeps_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "SWEEP_EVERY_S", 0.5)
    one_second = 1 / DAY_S
    async with serving(tmp_path, f"aggregator.keep_runs_days={one_second:.9f}") as aggregator:
        await aggregator.push(Producer("p").request([("loss", observed([1.0]))]))
        (run,) = (await aggregator.get("/api/v1/runs"))["runs"]
        until, seen = (datetime.fromisoformat(run[at]) for at in ("kept_until", "last_seen"))
        assert 0.9 < (until - seen).total_seconds() < 1.1
        async with asyncio.timeout(30):
            while (await aggregator.get("/api/v1/runs"))["runs"]:  # noqa: ASYNC110 - as tests.waiting
                await asyncio.sleep(0.1)
