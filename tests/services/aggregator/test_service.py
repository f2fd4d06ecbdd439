"""The aggregator whole: gRPC and REST on loopback, its ports, its end."""

import asyncio
import contextlib
import json
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import metrics_pb2 as wire
from headrace.v1 import metrics_pb2_grpc

from services.aggregator import service
from services.common import config, grpc_kit
from services.common.command import Invocation
from services.common.lifecycle import Lifecycle
from services.common.recorder import Recorder
from tests.services.aggregator.making import Producer, count, event, observed

RECIPE = """
run = "demo"
folder = "{folder}"
[data.reasoning_gym]
task = "chain_sum"
[trainer]
max_steps = 10
[aggregator]
http_port = 0
"""

START_S = 60.0
"""Far more than a start takes, on a busy machine."""


def recipe_in(folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(folder=folder / "runs"))
    return path


def database_in(folder: Path) -> Path:
    return folder / "runs" / "demo" / "metrics.sqlite"


@dataclass(frozen=True)
class Serving:
    """An aggregator that answers."""

    ports: dict[str, int]
    network: config.Network

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports['grpc_port']}"

    async def push(
        self, request: wire.PushDeltasRequest, *, network: config.Network | None = None
    ) -> wire.PushDeltasResponse:
        async with grpc_kit.channel(self.grpc, network or self.network) as channel:
            stub = metrics_pb2_grpc.MetricsServiceStub(channel)
            answer: wire.PushDeltasResponse = await stub.PushDeltas(request, timeout=30)
            return answer

    async def ask(self, path: str, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as client:
            url = f"http://127.0.0.1:{self.ports['http_port']}{path}"
            return await client.get(url, headers=headers)

    async def get(self, path: str) -> Any:
        return (await self.ask(path)).raise_for_status().json()


@contextlib.asynccontextmanager
async def serving(folder: Path, *overrides: str) -> AsyncIterator[Serving]:
    """The aggregator's main(), in this process, until the block ends."""
    recipe = config.load(recipe_in(folder), overrides=overrides)
    announced = folder / "ports.json"
    state = Lifecycle(service="aggregator", replica="0")
    task = asyncio.create_task(service.main(Invocation(recipe, str(announced)), state))
    ready = asyncio.Event()

    async def follow(now: bool) -> None:
        if now:
            ready.set()

    state.on_ready_change(follow)
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED, timeout=START_S)
    waiting.cancel()
    if task.done():
        await task
    try:
        yield Serving(json.loads(announced.read_text()), recipe.network)
    finally:
        state.stopping.set()
        await task


async def test_what_a_recorder_sends_can_be_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path) as aggregator:
        with grpc_kit.sync_channel(aggregator.grpc, aggregator.network) as channel:
            recorder = Recorder(
                run="demo",
                producer="scorer-0",
                service="scorer",
                settings=config.Recorder(flush_s=0.05),
                channel=channel,
            )
            recorder.set_clock(attempt=1, step=3)
            recorder.observe_many("reward", [0.0, 1.0, 1.0, 1.0])
            recorder.ratio("reward/zero_std_frac", 1, 4)
            recorder.count("rollout/backpressure_s", 0.5)
            recorder.event(event("0.0.1.0", "scored"))
            assert await asyncio.to_thread(recorder.close, 30)
        answer = await aggregator.get("/api/v1/runs/demo/metrics/reward")
        assert answer["points"] == [{"x": 3, "value": 0.75}]
        listed = (await aggregator.get("/api/v1/runs/demo/metrics"))["metrics"]
        latest = {metric["key"]: metric["value"] for metric in listed}
        assert latest["reward/zero_std_frac"] == 0.25
        assert latest["rollout/backpressure_s"] == 0.5
        groups = await aggregator.get("/api/v1/runs/demo/groups/counts")
        assert groups["states"]["scored"] == 1
        producers = (await aggregator.get("/api/v1/runs/demo"))["producers"]
        assert [each["producer"] for each in producers] == ["aggregator-0", "scorer-0"]
        health_port = aggregator.ports["health_port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as probes:
            check = health_pb2_grpc.HealthStub(probes).Check
            seen = await check(health_pb2.HealthCheckRequest(), timeout=30)
        assert seen.status == health_pb2.HealthCheckResponse.SERVING
        assert await aggregator.get("/healthz") == {"status": "ok"}


async def test_a_push_is_answered_with_duplicates_and_reasons(tmp_path: Path) -> None:
    request = Producer("p").request([("loss", observed([1.0])), ("lose", observed([1.0]))])
    async with serving(tmp_path) as aggregator:
        first, again = await aggregator.push(request), await aggregator.push(request)
        assert (first.accepted, first.duplicate) == (1, False)
        (rejected,) = first.rejected
        assert (rejected.key, rejected.reason.split(":")[0]) == ("lose", "unknown_key")
        assert (again.accepted, again.duplicate) == (0, True)
        request.boot_id = ""
        with pytest.raises(grpc.RpcError) as refused:
            await aggregator.push(request)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_recipe_s_own_metrics_are_declared(tmp_path: Path) -> None:
    own = 'metrics.custom/tests={instrument = "count", unit = "tests", meaning = "Tests run."}'
    request = Producer("p").request([("custom/tests", observed([1.0]))])
    async with serving(tmp_path, own) as aggregator:
        (rejected,) = (await aggregator.push(request)).rejected
        assert rejected.reason == "wrong_instrument: declared as count, sent as observation"
        *_, last = (await aggregator.get("/api/v1/catalogue"))["metrics"]
        assert (last["key"], last["unit"], last["reductions"]) == (
            "custom/tests",
            "tests",
            ["sum", "rate"],
        )
        page = await aggregator.ask("/docs/metrics")
        assert "Tests run." in page.text


async def test_a_store_that_breaks_fails_the_call_with_a_clear_status(tmp_path: Path) -> None:
    request = Producer("p").request([("loss", observed([1.0]))])
    async with serving(tmp_path) as aggregator:
        with contextlib.closing(sqlite3.connect(database_in(tmp_path))) as broken:
            broken.execute(
                "CREATE TRIGGER broken BEFORE INSERT ON partials "
                "BEGIN SELECT RAISE(ABORT, 'the disk broke'); END"
            )
        with pytest.raises(grpc.RpcError) as failed:
            await aggregator.push(request)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        details = failed.value.details() or ""
        assert "nothing of the batch was kept: the disk broke" in details
        with contextlib.closing(sqlite3.connect(database_in(tmp_path))) as mended:
            mended.execute("DROP TRIGGER broken")
        assert not (await aggregator.push(request)).duplicate


async def test_a_token_guards_both_doors(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    request = Producer("p").request([("loss", observed([1.0]))])
    async with serving(tmp_path, f"network.token_file={token_file}") as aggregator:
        with pytest.raises(grpc.RpcError) as refused:
            await aggregator.push(request, network=config.Network())
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert (await aggregator.push(request)).accepted == 1
        assert (await aggregator.ask("/api/v1/runs")).status_code == 401
        runs = await aggregator.ask("/api/v1/runs", authorization="Bearer s3cret")
        assert runs.status_code == 200


async def test_a_taken_grpc_port_is_the_users_mistake(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(grpc_kit.PortTaken, match=str(port)):
            async with serving(tmp_path, f"network.grpc_port={port}"):
                pass


def command(folder: Path, *arguments: str) -> list[str]:
    recipe = str(recipe_in(folder))
    return [sys.executable, "-m", "services.aggregator", recipe, *arguments]


def test_a_taken_http_port_is_one_line_and_status_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            command(tmp_path, "--set", f"aggregator.http_port={port}"),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error")]
    assert str(port) in line
    assert "Traceback" not in ended.stderr


def test_killed_and_started_again_it_knows_what_it_had_acknowledged(tmp_path: Path) -> None:
    request = Producer("p").request([("loss", observed([1.0]))])
    for end, duplicate in ((signal.SIGKILL, False), (signal.SIGTERM, True)):
        announced = tmp_path / f"{end.name}.json"
        process = subprocess.Popen(
            command(tmp_path, "--announce", str(announced)), stderr=subprocess.DEVNULL
        )
        try:
            deadline_s = time.monotonic() + START_S
            while not announced.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            ports = json.loads(announced.read_text())
            assert ports["pid"] == process.pid
            with grpc.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
                push = metrics_pb2_grpc.MetricsServiceStub(channel).PushDeltas
                assert push(request, timeout=30).duplicate == duplicate
            process.send_signal(end)
            assert process.wait(30) == (0 if end == signal.SIGTERM else -signal.SIGKILL)
        finally:
            process.kill()
            process.wait()


def test_nothing_of_it_imports_torch() -> None:
    source = (
        "import sys, services.aggregator.service; "
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=START_S, check=True
    )
    assert ended.stdout.strip() == "[]"


async def test_two_aggregators_on_one_postgresql_answer_as_one(
    tmp_path: Path, postgres_url: str
) -> None:
    database = f'aggregator.database="{postgres_url}"'
    requests = [
        Producer(f"generator-{number}", service="generator").request(
            [("rollout/failed_total", count(1))], step=1
        )
        for number in range(6)
    ]
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    async with serving(folders[0], database) as one, serving(folders[1], database) as two:
        answers = await asyncio.gather(
            *(each.push(request) for request in requests for each in (one, two))
        )
        assert sorted(each.duplicate for each in answers) == [False] * 6 + [True] * 6
        for each in (one, two):
            found = await each.get("/api/v1/runs/demo/metrics/rollout/failed_total")
            assert found["points"] == [{"x": 1, "value": 6.0}]
            assert (await each.ask("/readyz")).status_code == 200
    assert not database_in(folders[0]).exists()
