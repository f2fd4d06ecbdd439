"""The HTTP server on real connections: TLS, renewed certificates, and what one peer may cost it."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.aggregator import http_server
from services.aggregator.api import limits
from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.common.certificates import Certificates
from services.common.tokens import Tokens
from tests.certificates import Authority
from tests.waiting import until

WAIT_S = 30.0

RUNS = "/api/v1/runs"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@dataclass(frozen=True)
class Running:
    """A server that listens."""

    port: int
    url: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@contextlib.asynccontextmanager
async def serving(
    app: Any,
    *,
    certificates: Certificates | None = None,
    ask_clients: bool = False,
    max_connections: int = 100,
    head_within_s: float = WAIT_S,
) -> AsyncIterator[Running]:
    context = (
        None
        if certificates is None
        else http_server.server_context(certificates, ask_clients=ask_clients)
    )
    with http_server.listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        async with http_server.serving(
            app,
            listening,
            max_connections=max_connections,
            context=context,
            head_within_s=head_within_s,
        ):
            yield Running(port, f"{'https' if certificates else 'http'}://localhost:{port}")


async def get(
    url: str,
    headers: dict[str, str] | None = None,
    *,
    verify: ssl.SSLContext | bool = True,
) -> httpx.Response:
    async with httpx.AsyncClient(verify=verify, timeout=WAIT_S, trust_env=False) as client:
        return await client.get(url, headers=headers)


def certificates_in(folder: Path) -> Certificates:
    return Certificates(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")


def trusting(authority: Authority, *, certified: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.pem.decode())
    if certified is not None:
        context.load_cert_chain(certified / "tls.crt", certified / "tls.key")
    return context


# TLS


async def test_with_tokens_a_browser_needs_no_certificate(
    backend: Backend, authority: Authority, tmp_path: Path
) -> None:
    app = create_app(backend, tokens=Tokens("s3cret"), needs_certificate=True)
    certificates = certificates_in(authority.write(tmp_path / "tls"))
    verify = trusting(authority)
    async with serving(app, certificates=certificates) as server:
        assert (await get(f"{server.url}{RUNS}", verify=verify)).status_code == 401
        told = await get(f"{server.url}{RUNS}", {"Authorization": "Bearer s3cret"}, verify=verify)
        assert told.status_code == 200
        assert (await get(f"{server.url}/healthz", verify=verify)).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await get(f"{server.url}/healthz")


async def test_without_tokens_the_certificate_lets_a_caller_in(
    backend: Backend, authority: Authority, tmp_path: Path
) -> None:
    app = create_app(backend, needs_certificate=True)
    folder = authority.write(tmp_path / "tls")
    stranger = Authority("else").write(tmp_path / "else")
    async with serving(app, certificates=certificates_in(folder), ask_clients=True) as server:
        url = f"{server.url}{RUNS}"
        refused = await get(url, verify=trusting(authority))
        assert refused.status_code == 403
        assert "network.tls_ca_file" in refused.json()["detail"]
        assert (await get(f"{server.url}/readyz", verify=trusting(authority))).status_code == 200
        told = await get(url, verify=trusting(authority, certified=folder))
        assert told.status_code == 200
        with pytest.raises(httpx.TransportError):
            await get(url, verify=trusting(authority, certified=stranger))


async def test_renewed_certificates_and_authorities_are_used_by_new_connections(
    backend: Backend, tmp_path: Path
) -> None:
    old, new = Authority("old"), Authority("new")
    folder, before = old.write(tmp_path / "tls"), old.write(tmp_path / "before")
    app = create_app(backend, needs_certificate=True)
    async with serving(app, certificates=certificates_in(folder), ask_clients=True) as server:
        url = f"{server.url}{RUNS}"
        assert (await get(url, verify=trusting(old, certified=before))).status_code == 200
        new.write(folder)
        told = await get(url, verify=trusting(new, certified=folder))
        assert told.status_code == 200
        with pytest.raises(httpx.ConnectError):
            await get(url, verify=trusting(old, certified=before))
        # Who signed the client's certificate is not trusted any more.
        with pytest.raises(httpx.TransportError):
            await get(url, verify=trusting(new, certified=before))


# Limits


async def test_requests_beyond_the_rate_are_refused_and_probes_are_not(backend: Backend) -> None:
    app = create_app(backend, max_requests_per_s=0.01)
    async with serving(app) as server:
        assert (await get(f"{server.url}{RUNS}")).status_code == 200
        refused = await get(f"{server.url}{RUNS}")
        assert refused.status_code == 429
        assert 60 < int(refused.headers["Retry-After"]) <= 100
        assert refused.headers["Content-Type"] == "application/problem+json"
        assert "network.max_requests_per_s = 0.01" in refused.json()["detail"]
        # Nor does a header make it another peer.
        told = await get(f"{server.url}{RUNS}", {"X-Forwarded-For": "10.9.8.7"})
        assert told.status_code == 429
        for path in limits.EXEMPT:
            assert (await get(f"{server.url}{path}")).status_code == 200


async def test_connections_beyond_the_limit_are_closed_and_others_live_on(backend: Backend) -> None:
    async with serving(create_app(backend), max_connections=2) as server:
        streams = [await server.connect() for _ in range(2)]
        for reader, writer in streams:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        reader, writer = await server.connect()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        for _, writer in streams:
            writer.close()
        answers: list[httpx.Response] = []

        async def asked() -> None:
            while not answers:
                with contextlib.suppress(httpx.TransportError):
                    answers.append(await get(f"{server.url}/healthz"))

        await asyncio.wait_for(asked(), WAIT_S)
        assert answers[0].status_code == 200


@pytest.mark.parametrize("after_an_answer", [False, True])
@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: h\r\nX-"])
async def test_who_sends_no_whole_head_is_let_go(
    backend: Backend, sent: bytes, after_an_answer: bool
) -> None:
    async with serving(create_app(backend), head_within_s=0.5) as server:
        reader, writer = await server.connect()
        if after_an_answer:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
            await asyncio.wait_for(reader.readuntil(b'"ok"}'), WAIT_S)
        writer.write(sent)
        ended = asyncio.create_task(reader.read())
        await until(ended.done)
        writer.close()


async def test_an_answer_that_goes_on_is_no_slow_head(backend: Backend) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10):
            await asyncio.sleep(0.1)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app, head_within_s=0.3) as server:
        assert (await get(server.url)).text == "x" * 10


async def test_a_head_that_is_too_large_is_refused(backend: Backend) -> None:
    async with serving(create_app(backend)) as server:
        small = await get(f"{server.url}/healthz", {"X-Long": "a" * 8000})
        assert small.status_code == 200
        # It is measured as it comes, by pieces of 256 KiB.
        reader, writer = await server.connect()
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: h\r\nX-Long: " + b"a" * (1 << 20))
        with contextlib.suppress(ConnectionResetError):
            assert (await asyncio.wait_for(reader.readline(), WAIT_S)).startswith(b"HTTP/1.1 400")
        writer.close()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """How long the body is that the application gets."""
    message = await receive()
    assert not message.get("more_body")
    answer = json.dumps(len(message.get("body", b""))).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": answer})


@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_are_bounded(chunked: bool) -> None:
    app = limits.Limits(echo, per_s=1000, body_bytes=300_000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 100_000
        yield b"x"

    async with serving(app) as server, httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as client:
        told = await client.post(server.url, content=b"x" * 300_000)
        assert (told.status_code, told.json()) == (200, 300_000)
        content: Any = pieces() if chunked else b"x" * 300_001
        with contextlib.suppress(httpx.WriteError):
            told = await client.post(server.url, content=content)
            assert told.status_code == 413
            assert "300000 bytes" in told.json()["detail"]


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    app = limits.Limits(echo, per_s=1000, body_within_s=0.3)
    async with serving(app) as server:
        reader, writer = await server.connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nab")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
