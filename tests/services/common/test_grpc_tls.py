"""Mutual TLS of gRPC on real servers: who is let in, and certificates renewed meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import status_pb2, status_pb2_grpc

from services.common import grpc_kit, grpc_tls
from services.common.certificates import Certificates, certificates_of
from services.common.config import Network
from services.common.errors import UserError
from services.common.lifecycle import Lifecycle
from tests.certificates import Authority, network_of

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@asynccontextmanager
async def served(network: Network) -> AsyncIterator[grpc_kit.Served]:
    running = await grpc_kit.serve(network, Lifecycle(service="trainer"))
    try:
        yield running
    finally:
        await running.stop(0)


async def ask(channel: grpc.aio.Channel) -> str:
    stub = status_pb2_grpc.StatusServiceStub(channel)
    answer = await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=DEADLINE_S)
    return str(answer.service)


async def refusal(network: Network | None, address: str) -> grpc.aio.AioRpcError:
    """How a call ends; without a network on a channel without TLS."""
    channel = (
        grpc.aio.insecure_channel(address)
        if network is None
        else grpc_kit.channel(address, network)
    )
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel)
        return caught.value


async def test_both_kinds_of_channels_reach_a_server_that_trusts_them(
    authority: Authority, tmp_path: Path
) -> None:
    server = network_of(authority.write(tmp_path / "server"))
    client = network_of(authority.write(tmp_path / "client"))
    async with served(server) as running:
        for host in ("localhost", "127.0.0.1"):
            address = f"{host}:{running.port}"
            async with grpc_kit.channel(address, client) as channel:
                assert await ask(channel) == "trainer"

            def blocking(address: str = address) -> Any:
                with grpc_kit.sync_channel(address, client) as channel:
                    stub = status_pb2_grpc.StatusServiceStub(channel)
                    request = status_pb2.GetStatusRequest()
                    return (
                        stub.GetStatus(request, timeout=DEADLINE_S).service,
                        stub.GetStatus.with_call(request, timeout=DEADLINE_S)[0].service,
                        stub.GetStatus.future(request, timeout=DEADLINE_S).result().service,
                    )

            assert await asyncio.to_thread(blocking) == ("trainer",) * 3


async def test_no_certificate_or_that_of_a_stranger_is_refused_and_probes_are_not(
    authority: Authority, tmp_path: Path
) -> None:
    server = network_of(authority.write(tmp_path / "server"))
    # It trusts the server, and is signed by somebody else.
    stranger = network_of(Authority("else").write(tmp_path / "else", trusted=[authority]))
    async with served(server) as running:
        address = f"localhost:{running.port}"
        assert (await refusal(None, address)).code() is grpc.StatusCode.UNAVAILABLE
        assert (await refusal(stranger, address)).code() is grpc.StatusCode.UNAVAILABLE
        without = grpc.ssl_channel_credentials(authority.pem)
        async with grpc.aio.secure_channel(address, without) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(channel)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.health_port}") as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="liveness"), timeout=DEADLINE_S
            )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_server_of_another_name_is_not_taken_for_the_one_that_is_meant(
    authority: Authority, tmp_path: Path
) -> None:
    server = network_of(authority.write(tmp_path / "server", hosts=["aggregator"]))
    client = network_of(authority.write(tmp_path / "client"))
    async with served(server) as running:
        refused = await refusal(client, f"127.0.0.1:{running.port}")
    assert "Hostname Verification Check failed" in str(refused.details())


async def test_a_token_is_demanded_beside_the_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    folder = authority.write(tmp_path / "tls")
    async with served(network_of(folder, token_file=token)) as running:
        address = f"localhost:{running.port}"
        refused = await refusal(network_of(folder), address)
        assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
        token_alone = await refusal(Network(token_file=str(token)), address)
        assert token_alone.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc_kit.channel(address, network_of(folder, token_file=token)) as channel:
            assert await ask(channel) == "trainer"


async def test_new_certificates_of_new_authorities_are_used_without_a_restart(
    tmp_path: Path,
) -> None:
    old, new = Authority("old"), Authority("new")
    server, client = old.write(tmp_path / "server"), old.write(tmp_path / "client")
    async with served(network_of(server)) as running:
        address = f"localhost:{running.port}"
        async with grpc_kit.channel(address, network_of(client)) as channel:
            assert await ask(channel) == "trainer"
            new.write(server)
            new.write(client)
            # On the connection that there was it would succeed as well, so the old is asked, too.
            assert await ask(channel) == "trainer"
        refused = await refusal(network_of(old.write(tmp_path / "late")), address)
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(_blocking_over_a_renewal, address, client, new) == 2


def _blocking_over_a_renewal(address: str, client: Path, authority: Authority) -> int:
    with grpc_kit.sync_channel(address, network_of(client)) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        request = status_pb2.GetStatusRequest()
        answers = [stub.GetStatus(request, timeout=DEADLINE_S)]
        authority.write(client)
        answers.append(stub.GetStatus(request, timeout=DEADLINE_S))
        return len(answers)


async def test_a_call_under_way_outlives_a_renewal(authority: Authority, tmp_path: Path) -> None:
    folder = authority.write(tmp_path / "tls")
    asked, answer = asyncio.Event(), asyncio.Event()

    class Slow(status_pb2_grpc.StatusServiceServicer):  # type: ignore[misc]
        async def GetStatus(self, request: Any, context: Any) -> status_pb2.GetStatusResponse:
            asked.set()
            await answer.wait()
            return status_pb2.GetStatusResponse(service="slow")

    certificates = certificates_of(network_of(folder))
    assert certificates is not None
    server = grpc.aio.server()
    status_pb2_grpc.add_StatusServiceServicer_to_server(Slow(), server)
    credentials = grpc_tls.server_credentials(certificates)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        async with grpc_kit.channel(f"localhost:{port}", network_of(folder)) as channel:
            first = asyncio.create_task(ask(channel))
            await asyncio.wait_for(asked.wait(), DEADLINE_S)
            authority.write(folder)
            second = asyncio.create_task(ask(channel))
            answer.set()
            assert await first == await second == "slow"
    finally:
        await server.stop(0)


def test_files_that_do_not_belong_together_are_a_users_mistake(
    authority: Authority, tmp_path: Path
) -> None:
    one, other = authority.write(tmp_path / "one"), authority.write(tmp_path / "other")
    with pytest.raises(UserError, match=r"network\.tls_cert_file, network\.tls_key_file: .*one"):
        Certificates(one / "tls.crt", other / "tls.key", one / "ca.crt")
    with pytest.raises(UserError, match=r"network\.tls_ca_file: cannot be read: .*nowhere"):
        Certificates(one / "tls.crt", one / "tls.key", tmp_path / "nowhere")
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(UserError, match=r"network\.tls_ca_file: .*text holds no PEM"):
        Certificates(one / "tls.crt", one / "tls.key", tmp_path / "text")


def test_a_half_written_renewal_waits_for_its_other_half(
    authority: Authority, tmp_path: Path
) -> None:
    folder, fresh = authority.write(tmp_path / "tls"), authority.write(tmp_path / "fresh")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    certificates = Certificates(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    before = certificates.current()
    (folder / "tls.crt").write_bytes((fresh / "tls.crt").read_bytes())
    assert certificates.current() is before
    (folder / "tls.key").write_bytes((fresh / "tls.key").read_bytes())
    after = certificates.current()
    fresh_pair = (fresh / "tls.crt").read_bytes(), (fresh / "tls.key").read_bytes()
    assert (after.cert, after.key) == fresh_pair
