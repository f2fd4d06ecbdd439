"""What the course asks of a run: the aggregator by REST, services by gRPC."""

import asyncio
from typing import Any

import grpc
import httpx
from headrace.v1 import status_pb2, status_pb2_grpc

from tests.deploy.containers.cluster import Cluster, Pod

TIMEOUT_S = 30.0
"""Of one question, on a machine that is busy."""

NO_PROGRESS_S = 900.0
"""A run that makes no step in this time has stopped for good."""

SETTLED_WITHIN_S = 60.0
"""Services send what they have measured every few seconds."""

POLL_S = 1.0

REST_PORT, GRPC_PORT = 8080, 50051


class Stuck(Exception):
    """The run makes no progress, or is over too early."""


async def status(pod: Pod) -> status_pb2.GetStatusResponse:
    """What a service says of itself. grpc.RpcError."""
    async with grpc.aio.insecure_channel(f"{pod.host}:{GRPC_PORT}") as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        answer: status_pb2.GetStatusResponse = await stub.GetStatus(
            status_pb2.GetStatusRequest(), timeout=TIMEOUT_S
        )
        return answer


class Questions:
    """About one run in a cluster. `async with` ends its connections."""

    def __init__(self, cluster: Cluster, *, run: str) -> None:
        self._cluster, self.run = cluster, run
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> "Questions":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def rest(self, path: str = "", **query: str | int) -> Any:
        """JSON of `/api/v1/runs/{run}` and `path`; None for what is not there yet."""
        (aggregator,) = self._cluster.of("aggregator")
        url = f"http://{aggregator.host}:{REST_PORT}/api/v1/runs/{self.run}{path}"
        answer = await self._http.get(url, params=query)
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        return answer.json()

    async def parquet(self) -> bytes:
        """The run's metrics as a Parquet file."""
        (aggregator,) = self._cluster.of("aggregator")
        url = f"http://{aggregator.host}:{REST_PORT}/api/v1/runs/{self.run}/export"
        answer = await self._http.get(url, params={"format": "parquet"})
        answer.raise_for_status()
        return answer.content

    async def step(self) -> int:
        """The latest step that REST knows; 0 before the first."""
        run = await self.rest()
        return 0 if run is None else int(run["latest_step"] or 0)

    async def progressed(self, steps: int) -> int:
        """Return once REST shows so many steps more than now. Stuck."""
        loop = asyncio.get_running_loop()
        seen = await self.step()
        wanted, last_s = seen + steps, loop.time()
        while seen < wanted:
            await asyncio.sleep(POLL_S)
            before, seen = seen, await self.step()
            if seen > before:
                last_s = loop.time()
            elif loop.time() - last_s > NO_PROGRESS_S:
                raise Stuck(f"no step for {NO_PROGRESS_S:.0f} s after step {seen}")
            if seen < wanted and (await self.trainer()).phase == "complete":
                raise Stuck(f"the run was over at step {seen}")
        return seen

    async def trainer(self) -> status_pb2.GetStatusResponse:
        """The trainer's own word."""
        (trainer,) = self._cluster.of("trainer")
        return await status(trainer)

    async def complete(self) -> status_pb2.GetStatusResponse:
        """The trainer's word once the run is over. Stuck."""
        loop = asyncio.get_running_loop()
        last, last_s = "", loop.time()
        while (said := await self.trainer()).phase != "complete":
            if said.details["step"] != last:
                last, last_s = said.details["step"], loop.time()
            elif loop.time() - last_s > NO_PROGRESS_S:
                raise Stuck(f"step {last} for {NO_PROGRESS_S:.0f} s")
            await asyncio.sleep(POLL_S)
        return said

    async def settled_ledger(self) -> dict[str, Any]:
        """The ledger once nothing is in flight in it, or as it stays for SETTLED_WITHIN_S."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + SETTLED_WITHIN_S
        while True:
            ledger: dict[str, Any] = await self.rest("/ledger")
            if ledger["in_flight"] == 0 or loop.time() > deadline_s:
                return ledger
            await asyncio.sleep(POLL_S)

    async def tokens(self) -> dict[str, float]:
        """Generated tokens by producer, over the whole run."""
        found = await self.rest(
            "/metrics/rollout/generated_tok_s",
            axis="time",
            reduce="sum",
            group_by="producer",
            max_points=1,
        )
        by_producer = {} if found is None else found["by_producer"]
        return {
            name: sum(point["value"] or 0.0 for point in points)
            for name, points in by_producer.items()
        }
