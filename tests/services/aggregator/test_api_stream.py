"""Live updates, read as a listener reads them: over HTTP on loopback."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastapi.routing
import httpx
import pytest
import uvicorn

from services.aggregator import http_server
from services.aggregator.api import feed, stream
from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from services.common.tokens import Tokens
from tests.services.aggregator.asking import problem, strict_json
from tests.services.aggregator.making import INF, NAN, NOW_S, Producer, count, observed
from tests.services.aggregator.test_service import serving as aggregator

STREAM = "/api/v1/runs/demo/stream"

WAIT_S = 30.0
"""Far longer than an event takes, on a busy machine."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "POLL_S", 0.05)


@pytest.fixture
async def served(backend: Backend) -> AsyncIterator[httpx.AsyncClient]:
    """The application behind a real server, which can send while it is read."""
    async with serving(backend) as client:
        yield client


@contextlib.asynccontextmanager
async def serving(
    backend: Backend, *, tokens: Tokens | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(backend, tokens=tokens)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as client:
            yield client
            backend.draining.set()
        server.should_exit = True
        await asyncio.wait_for(task, WAIT_S)


@dataclass(frozen=True)
class Event:
    """One event, or a comment."""

    name: str
    id: int
    data: Any


class Listener:
    """Reads the events of one stream."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def event(self) -> Event:
        """The next event; raises StopAsyncIteration at the end of the stream."""
        fields: dict[str, str] = {}
        while True:
            line = await asyncio.wait_for(anext(self._lines), WAIT_S)
            if line == "" and fields:
                break
            name, _, value = line.partition(": ")
            fields[name or "comment"] = value
        if "comment" in fields:
            return Event("comment", -1, fields["comment"])
        return Event(fields["event"], int(fields["id"]), strict_json(fields["data"]))

    async def points(self) -> tuple[int, dict[str, list[tuple[int, float | None]]]]:
        """The revision and the points of the next event, by key."""
        event = await self.event()
        assert event.name == "points", event
        assert event.data["revision"] == event.id
        return event.id, {
            series["key"]: [(point["x"], point["value"]) for point in series["points"]]
            for series in event.data["series"]
        }

    async def ended(self) -> bool:
        with pytest.raises(StopAsyncIteration):
            await self.event()
        return True


@contextlib.asynccontextmanager
async def listening(
    client: httpx.AsyncClient, query: str = "", **headers: str
) -> AsyncIterator[Listener]:
    async with client.stream("GET", f"{STREAM}{query}", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        yield Listener(response)


def send(
    ingest: Ingest, step: int, value: float = 1.0, *, key: str = "loss", **placed: Any
) -> None:
    """One value of one step, in a batch of its own."""
    boot_id = f"{key}-{step}-{value}-{placed}"
    Producer("trainer-0", boot_id=boot_id).send(
        ingest, [(key, observed([value]))], step=step, **placed
    )


async def test_what_is_recorded_is_told_once(served: httpx.AsyncClient, ingest: Ingest) -> None:
    send(ingest, 1)
    async with listening(served, "?key=loss") as listener:
        first = await listener.event()
        assert first.name == "line"
        assert first.data == {
            "run": "demo",
            "line": [{"attempt": 1, "first_step": 1, "end_step": None}],
        }
        revisions = [first.id]
        send(ingest, 2, 0.5)
        told = await listener.points()
        # Nothing is remembered yet of what was told before: the block is told whole, once.
        assert told[1] == {"loss": [(1, 1.0), (2, 0.5)]}
        revisions.append(told[0])
        for step, value, shown in ((3, 0.25, 0.25), (4, NAN, None), (5, INF, None)):
            send(ingest, step, value)
            revision, points = await listener.points()
            assert points == {"loss": [(step, shown)]}
            revisions.append(revision)
        # A late report amends its step.
        send(ingest, 3, 0.75)
        revision, points = await listener.points()
        assert points == {"loss": [(3, 0.5)]}
        revisions.append(revision)
        assert revisions == sorted(set(revisions))


async def test_a_listener_resumes_where_it_was(served: httpx.AsyncClient, ingest: Ingest) -> None:
    for step in (1, 200):
        send(ingest, step)
    async with listening(served, "?key=loss&after=0") as listener:
        await listener.event()
        revision, points = await listener.points()
        assert points == {"loss": [(1, 1.0), (200, 1.0)]}
    send(ingest, 201, 2.0)
    send(ingest, 202, 3.0)
    for query, headers in ((f"&after={revision}", {}), ("&after=0", {"Last-Event-ID": revision})):
        sent = {name: str(value) for name, value in headers.items()}
        async with listening(served, f"?key=loss{query}", **sent) as listener:
            await listener.event()
            resumed, points = await listener.points()
            assert resumed > revision
            # Step 1 has not changed and is in another block.
            assert points == {"loss": [(200, 1.0), (201, 2.0), (202, 3.0)]}
    send(ingest, 1, 5.0, key="reward")
    send(ingest, 203, 4.0)
    async with listening(served, f"?key=loss&after={resumed}") as listener:
        await listener.event()
        _, points = await listener.points()
        assert points == {"loss": [(200, 1.0), (201, 2.0), (202, 3.0), (203, 4.0)]}


async def test_after_a_revision_of_another_store_everything_comes(
    served: httpx.AsyncClient, ingest: Ingest
) -> None:
    for step in (1, 200):
        send(ingest, step)
    async with listening(served, "?key=loss&after=1000000") as listener:
        await listener.event()
        revision, points = await listener.points()
        assert revision < 1_000_000
        assert points == {"loss": [(1, 1.0), (200, 1.0)]}


async def test_a_run_that_is_not_there_has_no_stream(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    send(ingest, 1)
    assert "runs here: demo" in await problem(client, "/api/v1/runs/none/stream", 404)


async def test_without_keys_all_of_the_run_come(served: httpx.AsyncClient, ingest: Ingest) -> None:
    send(ingest, 1)
    send(ingest, 1, 3.0, key="reward")
    async with listening(served, "?after=0") as listener:
        await listener.event()
        _, points = await listener.points()
        assert {"loss", "reward", "ingest/deltas"} <= set(points)


async def test_much_comes_in_pieces_that_can_be_resumed(
    served: httpx.AsyncClient, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MESSAGE_POINTS", 10)
    for step in range(25):
        send(ingest, step, float(step))
    async with listening(served, "?key=loss&after=0") as listener:
        await listener.event()
        told = [await listener.points() for _ in range(3)]
        assert [len(points["loss"]) for _, points in told] == [10, 10, 5]
        assert [point for _, points in told for point in points["loss"]] == [
            (step, float(step)) for step in range(25)
        ]
        # Who breaks off before the last piece gets all of them again.
        assert [revision == told[-1][0] for revision, _ in told] == [False, False, True]
        assert told[0][0] == told[1][0] == 0


async def test_a_new_attempt_tells_the_line_before_its_points(
    served: httpx.AsyncClient, ingest: Ingest
) -> None:
    for step in range(6):
        send(ingest, step, 1.0)
    async with listening(served, "?key=loss&after=0") as listener:
        await listener.event()
        await listener.points()
        send(ingest, 4, 1.0, attempt=2)
        line = await listener.event()
        assert line.data["line"] == [
            {"attempt": 2, "first_step": 4, "end_step": None},
            {"attempt": 1, "first_step": 0, "end_step": 4},
        ]
        event = await listener.event()
        # Step 4 is told again although its value is the same: the other attempt's is forgotten.
        assert event.data["series"] == [
            {"key": "loss", "attempt": 2, "points": [{"x": 4, "value": 1.0}]}
        ]
        # What the superseded attempt still sends is on no line.
        send(ingest, 5, 7.0, attempt=1)
        send(ingest, 5, 2.0, attempt=2)
        _, points = await listener.points()
        assert points == {"loss": [(5, 2.0)]}


async def test_a_rate_is_told_when_its_steps_length_is_known(
    served: httpx.AsyncClient, ingest: Ingest
) -> None:
    Producer("generator-0").send(ingest, [("rollout/generated_tok_s", count(100))], step=3)
    async with listening(served, "?key=rollout/generated_tok_s&after=0") as listener:
        await listener.event()
        assert (await listener.points())[1] == {"rollout/generated_tok_s": [(3, None)]}
        send(ingest, 3, 2.0, key="perf/step_s")
        assert (await listener.points())[1] == {"rollout/generated_tok_s": [(3, 50.0)]}


async def test_replicas_that_said_nothing_in_a_block_still_count(
    served: httpx.AsyncClient, ingest: Ingest
) -> None:
    Producer("generator-0").send(ingest, [("rollout/inflight", observed([30.0]))], step=63)
    async with listening(served, "?key=rollout/inflight") as listener:
        await listener.event()
        Producer("generator-1").send(
            ingest, [("rollout/inflight", observed([5.0]))], step=64, now_s=NOW_S + 1
        )
        assert (await listener.points())[1] == {"rollout/inflight": [(64, 35.0)]}


async def test_a_deleted_run_ends_the_stream(
    served: httpx.AsyncClient, ingest: Ingest, store: Store
) -> None:
    send(ingest, 1)
    async with listening(served) as listener:
        await listener.event()
        store.delete_run("demo")
        gone = await listener.event()
        assert (gone.name, gone.data) == ("gone", {"run": "demo"})
        assert await listener.ended()


async def test_another_run_of_the_same_name_ends_it_too(
    served: httpx.AsyncClient, ingest: Ingest, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "POLL_S", 1.0)
    send(ingest, 1)
    async with listening(served) as listener:
        await listener.event()
        store.delete_run("demo")
        send(ingest, 1, now_s=NOW_S + 100)
        assert (await listener.event()).name == "gone"
        assert await listener.ended()


async def test_the_stream_ends_when_the_server_drains(
    served: httpx.AsyncClient, backend: Backend, ingest: Ingest
) -> None:
    send(ingest, 1)
    async with listening(served) as listener:
        await listener.event()
        backend.draining.set()
        assert await listener.ended()


async def test_a_silent_stream_is_kept_alive(
    served: httpx.AsyncClient, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vars(fastapi.routing)["_PING_INTERVAL"] == 15.0
    monkeypatch.setattr("fastapi.routing._PING_INTERVAL", 0.2)
    send(ingest, 1)
    async with listening(served) as listener:
        await listener.event()
        assert (await listener.event()).name == "comment"
        assert (await listener.event()).name == "comment"
        send(ingest, 2)
        while (event := await listener.event()).name == "comment":
            pass
        assert event.name == "points"


async def test_a_store_that_fails_ends_the_stream_which_resumes(
    served: httpx.AsyncClient, ingest: Ingest, store: Store
) -> None:
    send(ingest, 1)
    async with listening(served, "?key=loss") as listener:
        first = await listener.event()
        with store.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE runs RENAME TO away")
        assert await listener.ended()
    with store.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE away RENAME TO runs")
    send(ingest, 2)
    async with listening(served, f"?key=loss&after={first.id}") as listener:
        await listener.event()
        assert (await listener.points())[1] == {"loss": [(1, 1.0), (2, 1.0)]}


@pytest.mark.parametrize(
    ("query", "headers", "status", "says"),
    [
        ("?key=lost", {}, 404, "no metric 'lost'"),
        ("?key=loss&key=%00", {}, 404, "no metric"),
        ("?key=step_time", {}, 404, "is called perf/fwd_bwd_s here"),
        ("?after=-1", {}, 422, "after"),
        ("?after=now", {}, 422, "after"),
        ("", {"Last-Event-ID": "x"}, 422, "Last-Event-ID: "),
    ],
)
async def test_what_cannot_be_streamed_says_what_to_do(
    client: httpx.AsyncClient,
    ingest: Ingest,
    query: str,
    headers: dict[str, str],
    status: int,
    says: str,
) -> None:
    send(ingest, 1)
    client.headers.update(headers)
    assert says in await problem(client, f"{STREAM}{query}", status)


async def test_the_stream_needs_the_token(backend: Backend, ingest: Ingest) -> None:
    send(ingest, 1)
    async with serving(backend, tokens=Tokens("s3cret")) as client:
        assert (await client.get(STREAM)).status_code == 401
        async with listening(client, Authorization="Bearer s3cret") as listener:
            assert (await listener.event()).name == "line"


async def test_a_stream_does_not_hold_the_aggregators_end_up(tmp_path: Path) -> None:
    async with aggregator(tmp_path) as whole:
        await whole.push(Producer("p").request([("loss", observed([1.0]))]))
        url = f"http://127.0.0.1:{whole.ports['http_port']}"
        client = httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False)
        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(client)
        listener = await stack.enter_async_context(listening(client))
        await listener.event()
        began_s = time.monotonic()
    # With the stream open: it ended by itself, before open connections are cut.
    assert time.monotonic() - began_s < http_server.DRAIN_S
    assert await listener.ended()
    await stack.aclose()
