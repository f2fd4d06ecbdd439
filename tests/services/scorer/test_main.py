"""The scorer as a process: `python -m services.scorer`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import reasoning_gym
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import (
    metrics_pb2,
    metrics_pb2_grpc,
    scorer_pb2,
    scorer_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)

from tests.conftest import free_port
from tests.processes import service
from tests.services.scorer.groups import group_of
from tests.waiting import PATIENCE_S, until

RECIPE = """
run = "scorer-test"
rewards.functions = [{ function = "exact_match" }]
[data.reasoning_gym]
task = "chain_sum"
[trainer]
max_steps = 1
[recorder]
flush_s = 0.2
"""


class Metrics(metrics_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc,unused-ignore]
    """Takes what the recorder sends."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    async def PushDeltas(self, request: metrics_pb2.PushDeltasRequest, context: Any) -> Any:
        self.keys |= set(request.keys)
        return metrics_pb2.PushDeltasResponse(accepted=len(request.keys))


@pytest.fixture
async def aggregator() -> AsyncIterator[tuple[str, Metrics]]:
    server, metrics = grpc.aio.server(), Metrics()
    metrics_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", metrics
    await server.stop(0)


def arguments(folder: Path, *overrides: str) -> list[str]:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    sets = [part for override in overrides for part in ("--set", override)]
    return [sys.executable, "-m", "services.scorer", str(recipe), "--replica", "0", *sets]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ('rewards.functions=[{function="no_such_module:f"}]', "rewards.functions[0].function"),
        ("queue.url=http://127.0.0.1:1", "queue.url"),
        ("rewards.workers=1", "queue.url is not set"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(tmp_path: Path, override: str, key: str) -> None:
    ended = subprocess.run(
        arguments(tmp_path, override), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert key in line
    assert "Traceback" not in ended.stderr


def scorer(folder: Path, *overrides: str) -> AbstractContextManager["subprocess.Popen[bytes]"]:
    """The process; its log is in `folder/log`, its ports in `folder/ports`."""
    return service(arguments(folder, *overrides), folder)


async def until_serving(health_port: int) -> None:
    """Ask as a probe does until it answers SERVING."""
    async with (
        asyncio.timeout(PATIENCE_S),
        grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            await asyncio.sleep(0.02)


async def test_it_serves_says_what_it_waits_for_and_drains(
    tmp_path: Path, valkey_url: str, aggregator: tuple[str, Metrics]
) -> None:
    address, metrics = aggregator
    overrides = (
        f"queue.url={valkey_url}",
        f"network.aggregator={address}",
        'rewards.functions=[{function="reasoning_gym"}]',
    )
    with scorer(tmp_path, *overrides) as process:
        await until(lambda: (tmp_path / "ports").exists() or process.poll() is not None)
        ports = json.loads((tmp_path / "ports").read_text())
        await until_serving(ports["health_port"])
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
            ask = status_pb2_grpc.StatusServiceStub(channel).GetStatus
            status = await ask(status_pb2.GetStatusRequest())
            assert (status.service, status.producer) == ("scorer", "scorer-0")
            assert status.ready
            await check_score(scorer_pb2_grpc.ScorerServiceStub(channel))
        await until(lambda: "rollout/scorer_busy_frac" in metrics.keys)
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        assert not any(child.is_running() for child in children)
    log = (tmp_path / "log").read_text()
    assert "waiting for the queue server at" in log
    assert "drained" in log


async def check_score(stub: scorer_pb2_grpc.ScorerServiceStub) -> None:
    row = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    group = group_of(row["answer"], "no idea", row=row)
    answer = await stub.Score(scorer_pb2.ScoreRequest(group=group), timeout=PATIENCE_S)
    assert answer.scored.rollouts[0].reward == 1.0
    assert answer.scored.rollouts[0].functions[0].name == "reasoning_gym"
    advantages = [rollout.advantage for rollout in answer.scored.rollouts]
    assert advantages == pytest.approx([1, -1])
    group.rollouts[0].sequences[0].logprobs = b""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Score(scorer_pb2.ScoreRequest(group=group), timeout=PATIENCE_S)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_signal_ends_the_wait_for_an_absent_queue_server(tmp_path: Path) -> None:
    url = f"queue.url=redis://user:secret@127.0.0.1:{free_port()}"
    log = tmp_path / "log"
    with scorer(tmp_path, url) as process:
        await until(lambda: "waiting for the queue server" in log.read_text())
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert "secret" not in log.read_text()


def test_it_imports_nothing_that_only_others_need() -> None:
    code = (
        "import sys, services.scorer.service, services.scorer.__main__, services.common.workers\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'fastapi'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert ended.stdout.strip() == "[]"
