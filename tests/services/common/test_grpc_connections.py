"""Connections of gRPC: calls go to all replicas that a name has, now and after scaling; a call
without data lives, and a dead peer is found."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from headrace.v1 import policy_pb2, policy_pb2_grpc

from services.common import grpc_kit
from services.common.config import Network
from services.common.lifecycle import Lifecycle
from tests.chaos.proxy import Proxy
from tests.conftest import free_port
from tests.services.common.name_server import NameServer
from tests.waiting import until

DEADLINE_S = 60.0
"""Of each call: a hang fails the test, a slow machine does not."""


class Replica(policy_pb2_grpc.PolicyServiceServicer):  # type: ignore[misc]
    """Counts its calls; `FetchWeights` says nothing for as long as `silent_s`."""

    def __init__(self, silent_s: float = 0.0) -> None:
        self.calls = 0
        self.silent_s = silent_s
        self.ended = asyncio.Event()

    async def ReportServing(self, request: Any, context: Any) -> policy_pb2.ReportServingResponse:
        self.calls += 1
        return policy_pb2.ReportServingResponse()

    async def FetchWeights(
        self, request: Any, context: Any
    ) -> AsyncIterator[policy_pb2.FetchWeightsResponse]:
        self.calls += 1
        try:
            await asyncio.sleep(self.silent_s)
            yield policy_pb2.FetchWeightsResponse(data=b"w")
        finally:
            self.ended.set()


@asynccontextmanager
async def replica(
    host: str = "127.0.0.1", *, port: int = 0, servicer: Replica | None = None
) -> AsyncIterator[tuple[Replica, grpc_kit.Served]]:
    """One server, as every service runs it."""
    servicer = servicer or Replica()
    network = Network(host=host, grpc_port=port)
    add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
    register = [(add, servicer, "headrace.v1.PolicyService")]
    served = await grpc_kit.serve(network, Lifecycle(service="trainer"), register)
    try:
        yield servicer, served
    finally:
        await served.stop(0)


async def calls(stub: Any, number: int) -> None:
    """One after another: as a client that waits for each answer."""
    for _ in range(number):
        await stub.ReportServing(policy_pb2.ReportServingRequest(generator="g"), timeout=DEADLINE_S)


async def eventually(question: Callable[[], Awaitable[bool]]) -> None:
    """Return once the answer is true; TimeoutError after DEADLINE_S."""
    async with asyncio.timeout(DEADLINE_S):
        while not await question():
            pass


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections live for a second instead of minutes, and names are asked for again at once."""
    monkeypatch.setattr(grpc_kit, "CONNECTION_AGE_S", 1)
    options = grpc_kit._channel_options
    again = ("grpc.dns_min_time_between_resolutions_ms", 100)
    monkeypatch.setattr(grpc_kit, "_channel_options", lambda network: [*options(network), again])


async def test_one_channel_calls_all_replicas_of_a_name() -> None:
    port = free_port()
    hosts = [f"127.0.0.{n}" for n in (1, 2, 3)]
    async with contextlib.AsyncExitStack() as stack:
        replicas = [
            (await stack.enter_async_context(replica(host, port=port)))[0] for host in hosts
        ]
        names = await stack.enter_async_context(NameServer(*hosts))
        channel = await stack.enter_async_context(grpc_kit.channel(names.target(port), Network()))
        stub = policy_pb2_grpc.PolicyServiceStub(channel)

        async def all_are_known() -> bool:
            await calls(stub, 3)
            return all(each.calls for each in replicas)

        await eventually(all_are_known)
        before = [each.calls for each in replicas]
        await calls(stub, 300)
        assert [each.calls - b for each, b in zip(replicas, before, strict=True)] == [100] * 3


@pytest.mark.usefixtures("quick")
async def test_replicas_that_come_get_their_share_and_those_that_go_lose_no_call() -> None:
    """3, then 5, then 2, under calls all the time; none of them fails."""
    port = free_port()
    hosts = [f"127.0.0.{n}" for n in (1, 2, 3, 4, 5)]
    made = Counter[str]()
    async with contextlib.AsyncExitStack() as stack:
        running: dict[str, tuple[Replica, grpc_kit.Served]] = {}

        async def start(*more: str) -> None:
            for host in more:
                running[host] = await stack.enter_async_context(replica(host, port=port))

        await start(*hosts[:3])
        names = await stack.enter_async_context(NameServer(*hosts[:3]))
        channel = await stack.enter_async_context(grpc_kit.channel(names.target(port), Network()))
        stub = policy_pb2_grpc.PolicyServiceStub(channel)

        async def client() -> None:
            while True:
                await calls(stub, 1)
                made["calls"] += 1
                await asyncio.sleep(0.01)

        clients = [asyncio.create_task(client()) for _ in range(4)]

        async def share(of: list[str]) -> bool:
            """Whether each of them is called, and as often as the others."""
            before = {host: running[host][0].calls for host in of}
            await asyncio.sleep(0.5)
            new = [running[host][0].calls - before[host] for host in of]
            for each in clients:
                if each.done():
                    each.result()  # raises what failed
            return min(new) > 0.5 * max(new)

        await eventually(lambda: share(hosts[:3]))
        await start(*hosts[3:])
        names.addresses = hosts
        await eventually(lambda: share(hosts))
        names.addresses = hosts[:2]
        # A pod that goes: its name is gone, it takes no new call and lets those it has end.
        await asyncio.gather(*(running[host][1].stop(5.0) for host in hosts[2:]))
        await eventually(lambda: share(hosts[:2]))
        for each in clients:
            each.cancel()
        ended = await asyncio.gather(*clients, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
        assert sum(each.calls for each, _ in running.values()) >= made["calls"] > 100


# Keepalive


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pings every second, as if a call of twelve seconds were one of some minutes."""
    monkeypatch.setattr(grpc_kit, "KEEPALIVE_S", 1)
    monkeypatch.setattr(grpc_kit, "KEEPALIVE_TIMEOUT_S", 2)


async def fetched(address: str) -> int:
    """The chunks of a call that has no data for long."""
    async with grpc_kit.channel(address, Network()) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        call = stub.FetchWeights(policy_pb2.FetchWeightsRequest(), timeout=DEADLINE_S)
        return len([chunk async for chunk in call])


@pytest.mark.usefixtures("impatient")
async def test_pings_of_a_call_without_data_are_borne() -> None:
    async with replica(servicer=Replica(silent_s=6.0)) as (_, served):
        assert await fetched(f"127.0.0.1:{served.port}") == 1


@pytest.mark.usefixtures("impatient")
async def test_a_server_of_other_people_ends_such_a_call() -> None:
    """What the test before would see if only the client were set: gRPC bears a ping each five
    minutes."""
    server = grpc.aio.server()
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(Replica(silent_s=6.0), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fetched(f"127.0.0.1:{port}")
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "ping" in str(caught.value.details()).lower()
    finally:
        await server.stop(0)


@pytest.mark.usefixtures("impatient")
async def test_a_dead_peer_is_found_by_both_sides() -> None:
    """The network between them swallows everything, and closes nothing."""
    async with (
        replica(servicer=Replica(silent_s=DEADLINE_S)) as (servicer, served),
        Proxy(free_port(), target=served.port) as proxy,
    ):
        call = asyncio.create_task(fetched(f"127.0.0.1:{proxy.port}"))
        await until(lambda: servicer.calls == 1)
        proxy.delay_s = 10 * DEADLINE_S
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(servicer.ended.wait(), DEADLINE_S / 2)


# Deadlines


async def test_the_server_notices_that_the_caller_has_given_up() -> None:
    async with (
        replica(servicer=Replica(silent_s=DEADLINE_S)) as (servicer, served),
        grpc_kit.channel(f"127.0.0.1:{served.port}", Network()) as channel,
    ):
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.FetchWeights(policy_pb2.FetchWeightsRequest(), timeout=0.5):
                pass
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(servicer.ended.wait(), DEADLINE_S / 2)
        assert servicer.calls == 1
