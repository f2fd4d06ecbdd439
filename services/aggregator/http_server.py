"""The HTTP server under the REST interface: uvicorn in our own event loop, with limits that it has
not, and with certificates that are renewed while it runs.

waits_for: requests. unblocked_by: the lifecycle's end; what is under way gets DRAIN_S.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.common import grpc_kit
from services.common.certificates import Certificates

DRAIN_S = 5.0
"""Most seconds that calls in flight get at the end."""

HEAD_WITHIN_S = 20.0
"""A connection on which no whole head of a request has come within this time is closed; so is one
that begins the next and does not go on."""

IDLE_S = 5.0
"""A connection without a request is kept for so long after an answer."""

HEAD_BYTES = 16 << 10
"""Largest head of a request, its line and all headers, where it comes in several pieces; one piece
that holds it whole is parsed, and is at most 256 KiB."""


class _Protocol(H11Protocol):
    """One connection. `max_connections` and `head_within_s` are set by a subclass for each server.

    request.state.certified says whether the client has shown a certificate of our authorities.
    """

    max_connections: int
    head_within_s: float
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.max_connections:
            # Not counted, not answered: it is gone before it costs anything.
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        tls: Any = transport.get_extra_info("ssl_object")
        certified = tls is not None and bool(tls.getpeercert())
        self.app_state = {**self.app_state, "certified": certified}
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.head_within_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    """uvicorn inside our own event loop: signals stay with the lifecycle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PortTaken."""
    grpc_kit.check_port_free(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    # asyncio sets it only on sockets that it opens itself; without it the body of every answer
    # waits 40 ms for the acknowledgement of its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def server_context(certificates: Certificates, *, ask_clients: bool) -> ssl.SSLContext:
    """A context that shows the present certificate at each new connection.

    With `ask_clients` a client may show one, too, which must then be good; browsers would ask their
    user for it at once, so only where it is what lets a caller in.
    """
    shown = certificates.current()

    def fresh() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificates.load_into(context)
        context.verify_mode = ssl.CERT_OPTIONAL if ask_clients else ssl.CERT_NONE
        return context

    present = fresh()

    def on_hello(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        # New authorities replace the old ones only in a new context.
        nonlocal shown, present
        if certificates.current() is not shown:
            shown, present = certificates.current(), fresh()
        connection.context = present

    first = fresh()
    first.sni_callback = on_hello
    return first


@contextlib.asynccontextmanager
async def serving(
    app: Callable[..., Any],
    listening: socket.socket,
    *,
    max_connections: int,
    context: ssl.SSLContext | None = None,
    head_within_s: float = HEAD_WITHIN_S,
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve `app` until the block ends; the server's task, which ends only when it has failed."""
    limits = {"max_connections": max_connections, "head_within_s": head_within_s}
    config = uvicorn.Config(
        app,
        http=type("Protocol", (_Protocol,), limits),
        h11_max_incomplete_event_size=HEAD_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        # A header would else say which address a request comes from.
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=round(IDLE_S),
        timeout_graceful_shutdown=round(DRAIN_S),
        ssl_context_factory=None if context is None else lambda *_: context,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="http")
    try:
        yield task
    finally:
        server.should_exit = True
        await task
