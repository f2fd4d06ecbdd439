"""A replica with a fake engine, and what is around it: queue, policy service, metrics."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from headrace.v1 import generator_pb2, generator_pb2_grpc, metrics_pb2, metrics_pb2_grpc
from headrace.v1 import rollout_pb2 as wire

from services.common import queue
from services.common.command import Invocation
from services.common.config import Recipe
from services.common.lifecycle import Lifecycle, cancel
from services.common.queue import GROUP, QueueClient
from services.generator.service import Replica, RunningEngine
from services.trainer.run_queue import RunQueue
from tests.services.generator.fakes import FakeEngine, recipe_of
from tests.services.generator.trainers import Trainer, trainer
from tests.waiting import PATIENCE_S, until


class Metrics(metrics_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc,unused-ignore]
    """An aggregator that only takes."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.states: list[tuple[str, str]] = []

    async def PushDeltas(self, request: metrics_pb2.PushDeltasRequest, context: Any) -> Any:
        self.keys |= set(request.keys)
        names = metrics_pb2.GroupState.Name
        self.states += [(event.group_id, names(event.state)) for event in request.events]
        return metrics_pb2.PushDeltasResponse(accepted=len(request.keys))


@dataclass
class River:
    """What is around a replica."""

    recipe: Recipe
    client: QueueClient
    run_queue: RunQueue
    trainer: Trainer
    metrics: Metrics
    folder: Path
    tasks: "list[asyncio.Task[bool]]" = field(default_factory=list)

    def start(self, engine: FakeEngine, name: str = "0") -> "Started":
        """Start a replica."""

        async def start_engine(folder: Path, recipe: Recipe) -> RunningEngine:
            assert (folder / "config.json").exists()
            return engine

        async def import_at_once() -> Any:
            return start_engine

        lifecycle = Lifecycle(service="generator", replica=name)
        announce = self.folder / f"{name}.json"
        invocation = Invocation(recipe=self.recipe, announce=str(announce))
        importing = asyncio.create_task(import_at_once())
        replica = Replica(invocation, lifecycle, importing=importing)
        task = asyncio.create_task(replica.run())
        self.tasks.append(task)
        return Started(lifecycle, engine, task, announce)

    async def put(self, *requests: wire.RolloutRequest, evaluation: bool = False) -> None:
        for request in requests:
            await self.run_queue.dispatch(
                request.group_id, request.SerializeToString(), evaluation=evaluation
            )

    async def entries(self, stream: str, number: int) -> list[dict[str, bytes]]:
        """The entries of a stream, once there are `number`."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for task in self.tasks:
                    if task.done():
                        task.result()
                found = await self.client.raw.xrange(getattr(self.client.keys, stream))
                if len(found) >= number:
                    assert len(found) == number
                    return [{k.decode(): v for k, v in fields.items()} for _, fields in found]
                await asyncio.sleep(0.01)

    async def groups(self, number: int, stream: str = "groups") -> list[wire.RolloutGroup]:
        entries = await self.entries(stream, number)
        return [wire.RolloutGroup.FromString(entry["data"]) for entry in entries]

    async def pending(self) -> list[tuple[bytes, int]]:
        """Consumer and deliveries of what is held in `requests`."""
        page = await self.client.raw.xpending_range(
            self.client.keys.requests, GROUP, min="-", max="+", count=99
        )
        return [(item["consumer"], item["times_delivered"]) for item in page]


@dataclass
class Started:
    """A replica under way."""

    lifecycle: Lifecycle
    engine: FakeEngine
    task: "asyncio.Task[bool]"
    announce: Path

    async def ready(self) -> None:
        await until(lambda: self.task.done() or self.lifecycle.ready)
        if self.task.done():
            self.task.result()

    async def stop(self) -> None:
        """As SIGTERM does."""
        self.lifecycle.stopping.set()
        async with asyncio.timeout(PATIENCE_S):
            await self.task

    async def call(self, request: generator_pb2.GenerateRequest) -> Any:
        await until(self.announce.exists)
        port = json.loads(self.announce.read_text())["grpc_port"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = generator_pb2_grpc.GeneratorServiceStub(channel)
            return await stub.Generate(request, timeout=PATIENCE_S)


@asynccontextmanager
async def river(url: str, folder: Path, **sections: dict[str, Any]) -> AsyncIterator[River]:
    server, metrics = grpc.aio.server(), Metrics()
    metrics_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, server)
    aggregator = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with trainer(folder) as made:
        network = {
            "trainer": f"127.0.0.1:{made.port}",
            "aggregator": f"127.0.0.1:{aggregator}",
        }
        around: dict[str, dict[str, Any]] = {
            "queue": {"url": url},
            "network": network,
            "recorder": {"flush_s": 0.1},
        }
        recipe = recipe_of(**around | sections)
        client = await queue.connect(url, run="r", claim_after_s=recipe.queue.claim_after_s)
        run_queue = RunQueue(client)
        await run_queue.start(floor=1, recipe="x")
        seen = River(recipe, client, run_queue, made, metrics, folder)
        try:
            yield seen
        finally:
            await cancel(*seen.tasks)
            await asyncio.gather(*seen.tasks, return_exceptions=True)
            await client.close()
            await server.stop(0)
