"""What one peer may cost a gRPC server: calls a second, connections, headers, idle handshakes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from headrace.v1 import metrics_pb2, metrics_pb2_grpc, status_pb2, status_pb2_grpc

from services.common import grpc_kit
from services.common.config import Network
from services.common.config import Recorder as Settings
from services.common.grpc_access import address_of
from services.common.grpc_errors import retry_after_s
from services.common.lifecycle import Lifecycle
from services.common.recorder import Recorder
from tests.waiting import until

DEADLINE_S = 30.0

SLOW = Network(max_requests_per_s=0.01)
"""One call, and the next in more than a minute."""


class Metrics(metrics_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc]
    """Takes everything."""

    def __init__(self) -> None:
        self.sequences: list[int] = []

    async def PushDeltas(self, request: Any, context: Any) -> metrics_pb2.PushDeltasResponse:
        self.sequences.append(request.sequence)
        return metrics_pb2.PushDeltasResponse()


@asynccontextmanager
async def served(
    network: Network, servicer: Metrics | None = None
) -> AsyncIterator[grpc_kit.Served]:
    add = metrics_pb2_grpc.add_MetricsServiceServicer_to_server
    running = await grpc_kit.serve(
        network,
        Lifecycle(service="trainer"),
        [(add, servicer or Metrics(), "headrace.v1.MetricsService")],
    )
    try:
        yield running
    finally:
        await running.stop(0)


async def ask(channel: grpc.aio.Channel, **options: Any) -> None:
    stub = status_pb2_grpc.StatusServiceStub(channel)
    await stub.GetStatus(status_pb2.GetStatusRequest(), **{"timeout": DEADLINE_S} | options)


async def test_calls_beyond_the_rate_are_refused_and_told_when_to_come_again() -> None:
    async with (
        served(SLOW) as running,
        grpc_kit.channel(f"127.0.0.1:{running.port}", Network()) as channel,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.health_port}") as health,
    ):
        await ask(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(channel)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        info = error_details_pb2.ErrorInfo()
        status = rpc_status.from_call(refused.value)  # type: ignore[arg-type]
        assert status.details[0].Unpack(info)
        assert (info.reason, info.domain) == ("RATE_LIMITED", "headrace")
        wait_s = retry_after_s(refused.value)
        assert wait_s is not None
        assert 60 < wait_s <= 100
        # A stream counts like any other call.
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE_S):
                pass
        assert retry_after_s(refused.value) is not None
        # Probes do not.
        for _ in range(3):
            check = health_pb2.HealthCheckRequest(service="liveness")
            await health_pb2_grpc.HealthStub(health).Check(check, timeout=DEADLINE_S)


async def test_within_the_rate_all_kinds_of_calls_are_answered_as_ever() -> None:
    async with (
        served(Network()) as running,
        grpc_kit.channel(f"127.0.0.1:{running.port}", Network()) as channel,
    ):
        await asyncio.gather(*(ask(channel) for _ in range(100)))
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE_S)
        (listed,) = [answer async for answer in answers]
        assert len(listed.list_services_response.service) == 3
        nothing: Any = channel
        nothing = nothing.unary_unary("/headrace.v1.StatusService/GetNothing")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await nothing(b"", timeout=DEADLINE_S)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_who_guesses_tokens_is_slowed_down(tmp_path: Path) -> None:
    token, guess = tmp_path / "token", tmp_path / "guess"
    token.write_text("s3cret")
    guess.write_text("guess")
    network = SLOW.model_copy(update={"token_file": str(token)})
    async with served(network) as running:
        guessing = Network(token_file=str(guess))
        async with grpc_kit.channel(f"127.0.0.1:{running.port}", guessing) as channel:
            codes = []
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await ask(channel)
                codes.append(refused.value.code())
    assert codes == [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED]


async def test_a_recorder_that_is_refused_for_its_rate_loses_nothing() -> None:
    servicer = Metrics()
    # One call every 0.2 s, and a recorder that flushes four times as often.
    async with served(Network(max_requests_per_s=5.0), servicer) as running:
        with grpc_kit.sync_channel(f"127.0.0.1:{running.port}", Network()) as channel:
            recorder = Recorder(
                run="r",
                producer="p",
                service="scorer",
                settings=Settings(flush_s=0.05),
                channel=channel,
            )
            sent = 0
            while len(servicer.sequences) < 7:
                recorder.count("a")
                sent += 1
                await asyncio.sleep(0.02)
            assert await asyncio.to_thread(recorder.close, DEADLINE_S)
    assert servicer.sequences == list(range(1, len(servicer.sequences) + 1))
    assert sent > len(servicer.sequences)


async def test_connections_beyond_the_limit_are_refused_and_those_that_are_there_live_on() -> None:
    async with served(Network(max_connections=2)) as running, AsyncExitStack() as stack:
        address = f"127.0.0.1:{running.port}"
        channels = [
            # Else one process' channels share a connection.
            await stack.enter_async_context(
                grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
            )
            for _ in range(3)
        ]
        await ask(channels[0])
        await ask(channels[1])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(channels[2])
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await ask(channels[0])
        await channels[1].close(None)
        await ask(channels[2], wait_for_ready=True)


async def test_headers_are_bounded() -> None:
    async with (
        served(Network()) as running,
        grpc_kit.channel(f"127.0.0.1:{running.port}", Network()) as channel,
    ):
        await ask(channel, metadata=(("x", "a" * 4000),))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(channel, metadata=(("x", "a" * (grpc_kit.METADATA_BYTES[1] + 1)),))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after_s(refused.value) is None


async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_kit, "HANDSHAKE_S", 0.5)
    async with served(Network()) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        ended = asyncio.create_task(reader.read())
        await until(ended.done)
        writer.close()


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:41234", "ipv4:10.0.0.7"),
        ("ipv6:%5B::1%5D:41234", "ipv6:%5B::1%5D"),
        ("unix:/run/socket", "unix:/run/socket"),
    ],
)
def test_a_peer_is_its_address(peer: str, address: str) -> None:
    assert address_of(peer) == address
