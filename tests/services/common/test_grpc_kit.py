"""The gRPC kit on real servers of the loopback: health, reflection, status, tokens, limits,
retries, ports."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from headrace.v1 import (
    metrics_pb2,
    metrics_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)

from services.common import grpc_kit
from services.common.config import Network
from services.common.errors import UserError
from services.common.lifecycle import Lifecycle
from tests.conftest import free_port

DEADLINE_S = 30.0
"""Of each call: a hang fails the test, a slow machine does not."""

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Policy(policy_pb2_grpc.PolicyServiceServicer):  # type: ignore[misc]
    """Answers what the tests need; with `fails`, every second call of a generator is UNAVAILABLE,
    its first to begin with."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.calls = 0
        self.calls_of: Counter[str] = Counter()
        self.answered: list[str] = []

    async def ReportServing(self, request: Any, context: Any) -> policy_pb2.ReportServingResponse:
        self.calls += 1
        self.calls_of[request.generator] += 1
        if self.fails and self.calls_of[request.generator] % 2 == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "down")
        self.answered.append(request.generator)
        return policy_pb2.ReportServingResponse()

    async def FetchWeights(
        self, request: Any, context: Any
    ) -> AsyncIterator[policy_pb2.FetchWeightsResponse]:
        for index in range(3):
            yield policy_pb2.FetchWeightsResponse(offset=index, data=b"x" * request.offset)

    async def FetchModelFiles(
        self, request: Any, context: Any
    ) -> AsyncIterator[policy_pb2.FetchModelFilesResponse]:
        await grpc_kit.abort(
            context, grpc.StatusCode.NOT_FOUND, "NO_MODEL", "no model yet", version="7"
        )
        yield policy_pb2.FetchModelFilesResponse()


class Metrics(metrics_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc]
    """Always unavailable."""

    def __init__(self) -> None:
        self.calls = 0

    async def PushDeltas(self, request: Any, context: Any) -> metrics_pb2.PushDeltasResponse:
        self.calls += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "down")
        raise AssertionError


@asynccontextmanager
async def served(
    *servicers: tuple[Callable[[Any, Any], None], Any, str],
    network: Network | None = None,
    lifecycle: Lifecycle | None = None,
) -> AsyncIterator[grpc_kit.Served]:
    running = await grpc_kit.serve(
        network or Network(), lifecycle or Lifecycle(service="trainer"), servicers
    )
    try:
        yield running
    finally:
        await running.stop(0)


def policy(servicer: Policy) -> tuple[Callable[[Any, Any], None], Any, str]:
    add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
    return add, servicer, "headrace.v1.PolicyService"


def report(name: str = "g") -> policy_pb2.ReportServingRequest:
    return policy_pb2.ReportServingRequest(generator=name)


def reason_of(error: grpc.RpcError) -> tuple[str, dict[str, str]]:
    """ErrorInfo's reason and metadata."""
    status = rpc_status.from_call(cast(grpc.Call, error))
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "headrace"
    return info.reason, dict(info.metadata)


# Health, reflection, status


async def test_health_has_its_own_port_and_follows_readiness() -> None:
    lifecycle = Lifecycle(service="trainer")
    async with served(lifecycle=lifecycle) as running:
        assert running.health_port not in (0, running.port)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.health_port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def states() -> tuple[int, int]:
                whole, alive = [
                    await stub.Check(
                        health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S
                    )
                    for name in ("", "liveness")
                ]
                return whole.status, alive.status

            assert await states() == (NOT_SERVING, SERVING)
            await lifecycle.set_ready(True)
            assert await states() == (SERVING, SERVING)
            await lifecycle.set_ready(False)
            assert await states() == (NOT_SERVING, SERVING)


async def test_the_health_port_carries_nothing_else() -> None:
    async with (
        served() as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.health_port}") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status_pb2_grpc.StatusServiceStub(channel).GetStatus(
                status_pb2.GetStatusRequest(), timeout=DEADLINE_S
            )
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_lists_all_services() -> None:
    async with (
        served(policy(Policy())) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [
            answer
            async for answer in stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE_S)
        ]
        names = {found.name for found in answers[0].list_services_response.service}
        assert {"headrace.v1.PolicyService", "headrace.v1.StatusService"} <= names


async def test_status_answers_before_the_service_is_ready() -> None:
    lifecycle = Lifecycle(service="generator", replica="2")
    lifecycle.enter("compiling the first request")
    lifecycle.details["served_version"] = "3"
    async with (
        served(lifecycle=lifecycle) as running,
        grpc_kit.channel(f"127.0.0.1:{running.port}", Network()) as channel,
    ):
        answer = await status_pb2_grpc.StatusServiceStub(channel).GetStatus(
            status_pb2.GetStatusRequest(), timeout=DEADLINE_S
        )
    assert (answer.service, answer.producer, answer.ready) == ("generator", "generator-2", False)
    assert answer.phase == "compiling the first request"
    assert dict(answer.details) == {"served_version": "3"}
    assert 0 <= answer.phase_s <= answer.uptime_s


# Tokens


@pytest.fixture
def secured(tmp_path: Path) -> Network:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    return Network(token_file=str(file))


async def fetched(channel: Any) -> int:
    call = policy_pb2_grpc.PolicyServiceStub(channel).FetchWeights(
        policy_pb2.FetchWeightsRequest(), timeout=DEADLINE_S
    )
    return len([chunk async for chunk in call])


async def test_the_token_is_sent_on_all_kinds_of_channels(secured: Network) -> None:
    servicer = Policy()
    async with served(policy(servicer), network=secured) as running:
        address = f"127.0.0.1:{running.port}"
        async with grpc_kit.channel(address, secured) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            await stub.ReportServing(report("aio"), timeout=DEADLINE_S)
            assert await fetched(channel) == 3

        def blocking() -> int:
            with grpc_kit.sync_channel(address, secured) as channel:
                stub = policy_pb2_grpc.PolicyServiceStub(channel)
                stub.ReportServing(report("sync"), timeout=DEADLINE_S)
                request = policy_pb2.FetchWeightsRequest()
                return len(list(stub.FetchWeights(request, timeout=DEADLINE_S)))

        assert await asyncio.to_thread(blocking) == 3
    assert servicer.answered == ["aio", "sync"]


@pytest.mark.parametrize("given", [None, "wrong"])
async def test_a_missing_or_wrong_token_is_refused_on_all_kinds_of_calls(
    secured: Network, tmp_path: Path, given: str | None
) -> None:
    theirs = Network()
    if given is not None:
        (tmp_path / "theirs").write_text(given)
        theirs = Network(token_file=str(tmp_path / "theirs"))
    servicer = Policy()
    async with served(policy(servicer), network=secured) as running:
        address = f"127.0.0.1:{running.port}"
        async with grpc_kit.channel(address, theirs) as channel:
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            errors = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ReportServing(report(), timeout=DEADLINE_S)
            errors.append(caught.value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fetched(channel)
            errors.append(caught.value)
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in reflect.ServerReflectionInfo(iter([request]), timeout=DEADLINE_S):
                    pass
            errors.append(caught.value)
        for error in errors:
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
            assert reason_of(error) == ("UNAUTHENTICATED", {})
            assert "network.token_file" in str(error.details())
            assert "s3cret" not in str(error)

        # Probes have no token.
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.health_port}") as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="liveness"), timeout=DEADLINE_S
            )
        assert health.status == SERVING
    assert servicer.answered == []


# Errors and limits


async def test_an_error_carries_its_reason_and_metadata() -> None:
    async with (
        served(policy(Policy())) as running,
        grpc_kit.channel(f"127.0.0.1:{running.port}", Network()) as channel,
    ):
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.FetchModelFiles(
                policy_pb2.FetchModelFilesRequest(), timeout=DEADLINE_S
            ):
                pass
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "no model yet"
    assert reason_of(caught.value) == ("NO_MODEL", {"version": "7"})


async def test_messages_may_be_larger_than_grpcs_4_mib_in_both_directions() -> None:
    servicer = Policy()
    async with (
        served(policy(servicer)) as running,
        grpc_kit.channel(f"127.0.0.1:{running.port}", Network()) as channel,
    ):
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        await stub.ReportServing(report("g" * (5 << 20)), timeout=DEADLINE_S)
        request = policy_pb2.FetchWeightsRequest(offset=5 << 20)
        sizes = [len(chunk.data) async for chunk in stub.FetchWeights(request, timeout=DEADLINE_S)]
    assert len(servicer.answered[0]) == 5 << 20
    assert sizes == [5 << 20] * 3


async def test_a_message_above_the_limit_fails_with_a_clear_code_and_is_not_repeated() -> None:
    small = Network(max_message_bytes=1 << 20)
    servicer = Policy()
    async with served(policy(servicer), network=small) as running:
        for client in (small, Network()):  # refused when sent, and when received
            async with grpc_kit.channel(f"127.0.0.1:{running.port}", client) as channel:
                stub = policy_pb2_grpc.PolicyServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.ReportServing(report("g" * (2 << 20)), timeout=DEADLINE_S)
                assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "larger than max" in str(caught.value.details())
    assert servicer.calls == 0


# Ports


async def test_a_taken_port_is_said_and_not_shared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for network in (Network(grpc_port=port), Network(health_port=port)):
            with pytest.raises(grpc_kit.PortTaken, match=f"port {port} on 127.0.0.1 is taken"):
                await grpc_kit.serve(network, Lifecycle(service="trainer"))


async def test_one_port_cannot_be_both() -> None:
    port = free_port()
    with pytest.raises(grpc_kit.PortTaken, match=str(port)):
        await grpc_kit.serve(
            Network(grpc_port=port, health_port=port), Lifecycle(service="trainer")
        )


async def test_a_fixed_port_is_free_again_at_once() -> None:
    network = Network(grpc_port=free_port())
    for _ in range(2):
        async with (
            served(policy(Policy()), network=network) as running,
            grpc_kit.channel(f"127.0.0.1:{running.port}", network) as channel,
        ):
            assert running.port == network.grpc_port
            await policy_pb2_grpc.PolicyServiceStub(channel).ReportServing(
                report(), timeout=DEADLINE_S
            )


def test_a_host_that_is_no_address_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match=r"network\.host: 'no such host' is no address"):
        grpc_kit.check_port_free("no such host", 1)


# Retries and deadlines


async def test_of_100_idempotent_calls_none_is_lost_when_every_second_fails() -> None:
    servicer = Policy(fails=True)
    async with (
        served(policy(servicer)) as running,
        grpc_kit.channel(f"127.0.0.1:{running.port}", Network()) as channel,
    ):
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        names = [f"g{index}" for index in range(100)]
        await asyncio.gather(
            *(stub.ReportServing(report(name), timeout=DEADLINE_S) for name in names)
        )
    assert sorted(servicer.answered) == sorted(names)
    assert servicer.calls == 200


async def test_a_large_idempotent_call_is_repeated_too() -> None:
    """gRPC keeps 256 KiB of a request for a repetition unless told otherwise."""
    servicer = Policy(fails=True)
    async with (
        served(policy(servicer)) as running,
        grpc_kit.channel(f"127.0.0.1:{running.port}", Network()) as channel,
    ):
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        await stub.ReportServing(report("g" * (4 << 20)), timeout=DEADLINE_S)
    assert servicer.calls == 2


async def test_a_blocking_channel_repeats_by_the_same_rules() -> None:
    servicer = Policy(fails=True)
    async with served(policy(servicer)) as running:

        def blocking() -> None:
            with grpc_kit.sync_channel(f"127.0.0.1:{running.port}", Network()) as channel:
                stub = policy_pb2_grpc.PolicyServiceStub(channel)
                for _ in range(2):
                    stub.ReportServing(report(), timeout=DEADLINE_S)

        await asyncio.to_thread(blocking)
    assert (servicer.calls, len(servicer.answered)) == (4, 2)


async def test_push_deltas_is_not_repeated_by_the_channel() -> None:
    servicer = Metrics()
    register = (
        metrics_pb2_grpc.add_MetricsServiceServicer_to_server,
        servicer,
        "headrace.v1.MetricsService",
    )
    async with (
        served(register) as running,
        grpc_kit.channel(f"127.0.0.1:{running.port}", Network()) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await metrics_pb2_grpc.MetricsServiceStub(channel).PushDeltas(
                metrics_pb2.PushDeltasRequest(), timeout=DEADLINE_S
            )
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert servicer.calls == 1


@pytest.mark.parametrize("listening", [False, True])
async def test_a_peer_that_is_away_or_mute_is_an_error_by_the_deadline(listening: bool) -> None:
    """Nobody listens; or somebody takes the connection and never says a word."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if listening:
            mute.listen()
        async with grpc_kit.channel(f"127.0.0.1:{mute.getsockname()[1]}", Network()) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await policy_pb2_grpc.PolicyServiceStub(channel).ReportServing(
                    report(), timeout=0.5
                )
    assert caught.value.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


async def test_a_channel_finds_a_peer_that_comes_back() -> None:
    network = Network(grpc_port=free_port())
    servicer = Policy()
    async with grpc_kit.channel(f"127.0.0.1:{network.grpc_port}", network) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        for expected in (1, 2):
            async with served(policy(servicer), network=network):
                await stub.ReportServing(report(), timeout=DEADLINE_S)
            assert servicer.calls == expected


async def test_the_users_proxy_is_not_for_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    servicer = Policy()
    async with (
        served(policy(servicer)) as running,
        grpc_kit.channel(f"127.0.0.1:{running.port}", Network()) as channel,
    ):
        await policy_pb2_grpc.PolicyServiceStub(channel).ReportServing(report(), timeout=DEADLINE_S)
    assert servicer.calls == 1
