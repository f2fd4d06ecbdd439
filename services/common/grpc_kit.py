"""gRPC as every service uses it: servers, channels, health, reflection, deadlines, retries,
authentication.

- `serve()` starts a grpc.aio server with reflection, the StatusService and, where a token is
  configured, an interceptor that refuses calls without it; `grpc.health.v1` listens on a second,
  plaintext port that carries nothing else.
- `channel()` opens an aio channel and `sync_channel()` a blocking one, with the same keepalive,
  limits and retry rules.
- Unary calls need a deadline: pass `timeout=UNARY_DEADLINE_S` (or your own). Only calls in
  `IDEMPOTENT` are retried.
"""

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from headrace.v1 import status_pb2 as wire_status
from headrace.v1 import status_pb2_grpc

from services.common.config import Network
from services.common.errors import UserError
from services.common.lifecycle import Lifecycle

UNARY_DEADLINE_S = 30.0
"""Of calls that have no reason to take longer."""

RETRY_BUFFER_BYTES = 16 << 20
"""A request is kept for a repetition up to this size; gRPC's own 256 KiB is less than one group."""

KEEPALIVE_S = 20
"""Both sides ping this often; a dead peer is found within KEEPALIVE_S + 10 s."""

IDEMPOTENT = (
    "headrace.v1.PolicyService/ReportServing",
    "headrace.v1.StatusService/GetStatus",
    "headrace.v1.ScorerService/Score",
)
"""Calls that gRPC itself may repeat. PushDeltas is not here: the recorder repeats it under its
sequence number."""

DOMAIN = "headrace"
"""Of ErrorInfo."""


class PortTaken(UserError):
    """A port to listen on is in use; the message says which."""


def _limits(network: Network) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", network.max_message_bytes),
        ("grpc.max_receive_message_length", network.max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _channel_options(network: Network) -> list[tuple[str, Any]]:
    names = [dict(zip(("service", "method"), name.split("/"), strict=True)) for name in IDEMPOTENT]
    retry = {
        "maxAttempts": 4,
        "initialBackoff": "0.2s",
        "maxBackoff": "3s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "methodConfig": [{"name": names, "retryPolicy": retry}],
    }
    return [
        *_limits(network),
        ("grpc.service_config", json.dumps(config)),
        ("grpc.enable_retries", 1),
        ("grpc.per_rpc_retry_buffer_size", RETRY_BUFFER_BYTES),
        # Services speak to each other directly: a proxy of the user's environment knows none.
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]


def read_token(network: Network) -> str | None:
    """The bearer token, or None where no `network.token_file` is configured. Raises UserError
    when it is unusable."""
    if network.token_file is None:
        return None
    try:
        token = Path(network.token_file).read_text().strip()
    except OSError as error:
        raise UserError(f"network.token_file: cannot be read: {error}") from error
    if not token:
        raise UserError(f"network.token_file: {network.token_file} is empty")
    return token


def channel(address: str, network: Network) -> grpc.aio.Channel:
    """An aio channel to `host:port` or `dns:///name:port`; it connects on first use and again by
    itself."""
    token = read_token(network)
    interceptors: list[Any] = (
        [] if token is None else [_AioUnaryToken(token), _AioStreamToken(token)]
    )
    return grpc.aio.insecure_channel(
        address, options=_channel_options(network), interceptors=interceptors
    )


def sync_channel(address: str, network: Network) -> grpc.Channel:
    """A blocking channel, for threads that have no event loop."""
    token = read_token(network)
    plain = grpc.insecure_channel(address, options=_channel_options(network))
    return plain if token is None else grpc.intercept_channel(plain, _SyncToken(token))


def _authorised(metadata: Any, token: str) -> tuple[tuple[str, Any], ...]:
    return (*(metadata or ()), ("authorization", f"Bearer {token}"))


# Requests are one message in all our services, so only calls of that kind carry the token.


class _AioUnaryToken(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*_authorised(details.metadata, self._token))
        return await continuation(details._replace(metadata=metadata), request)


class _AioStreamToken(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*_authorised(details.metadata, self._token))
        return await continuation(details._replace(metadata=metadata), request)


class _SyncToken(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
):
    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_CallDetails(details, self._token), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_CallDetails(details, self._token), request)


class _CallDetails(grpc.ClientCallDetails):
    """A call's details with the token added."""

    def __init__(self, details: Any, token: str) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = _authorised(details.metadata, token)
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


class _RequireToken(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses every call that does not carry the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        given = next((v for k, v in details.invocation_metadata if k == "authorization"), "")
        if hmac.compare_digest(given.encode(), self._expected):
            return await continuation(details)

        async def refuse(_request: Any, context: Any) -> NoReturn:
            await abort(
                context,
                grpc.StatusCode.UNAUTHENTICATED,
                "UNAUTHENTICATED",
                "a bearer token is needed: set network.token_file to the file that the server uses",
            )

        handler = await continuation(details)
        match handler and (handler.request_streaming, handler.response_streaming):
            case (True, True):
                return grpc.stream_stream_rpc_method_handler(refuse)
            case (True, False):
                return grpc.stream_unary_rpc_method_handler(refuse)
            case (False, True):
                return grpc.unary_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


async def abort(
    context: Any, code: grpc.StatusCode, reason: str, message: str, **metadata: str
) -> NoReturn:
    """End a call with a google.rpc.Status that carries ErrorInfo(reason, metadata)."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    number = code_pb2.Code.Value(code.name)
    status = rpc_status.to_status(status_pb2.Status(code=number, message=message, details=[info]))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort raises")


class _Status(status_pb2_grpc.StatusServiceServicer):  # type: ignore[misc]
    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def GetStatus(self, request: Any, context: Any) -> wire_status.GetStatusResponse:
        seen = self._lifecycle.snapshot()
        return wire_status.GetStatusResponse(
            service=seen.service,
            producer=seen.producer,
            ready=seen.ready,
            phase=seen.phase,
            phase_s=seen.phase_s,
            uptime_s=seen.uptime_s,
            details=seen.details,
        )


@dataclass(frozen=True)
class Served:
    """Running servers and the ports that they got."""

    port: int
    health_port: int
    _servers: tuple[Any, ...]

    async def stop(self, grace_s: float = 5.0) -> None:
        """Take no new calls, let running ones end within `grace_s`."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))


def check_port_free(host: str, port: int) -> None:
    """Raise PortTaken when `port` is in use (0 never is): gRPC itself would share a port with
    SO_REUSEPORT."""
    if port == 0:
        return
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UserError(f"network.host: {host!r} is no address: {error.strerror}") from None
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise PortTaken(
                f"port {port} on {host} is taken ({error.strerror}); choose another"
            ) from None


def _listen(server: Any, host: str, port: int) -> int:
    """Have the server listen; the port that it got. Raises PortTaken."""
    shown = f"[{host}]" if ":" in host else host
    try:
        taken: int = server.add_insecure_port(f"{shown}:{port}")
    except RuntimeError as error:
        raise PortTaken(
            f"cannot listen on {shown}:{port} ({error}); choose another port or network.host"
        ) from error
    return taken


async def serve(
    network: Network,
    lifecycle: Lifecycle,
    register: Sequence[tuple[Callable[[Any, Any], None], Any, str]] = (),
) -> Served:
    """Start the gRPC server and the health server of a service.

    `register` holds (`add_XServicer_to_server`, servicer, full service name). Health follows
    `lifecycle.ready`. Raises PortTaken, and UserError for an unusable host or token file.
    """
    for port in (network.grpc_port, network.health_port):
        check_port_free(network.host, port)
    options = [
        *_limits(network),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_connection_age_ms", 600_000),
        ("grpc.max_connection_age_grace_ms", 600_000),
        ("grpc.so_reuseport", 0),
    ]
    token = read_token(network)
    server = grpc.aio.server(
        options=options, interceptors=[] if token is None else [_RequireToken(token)]
    )
    names = [reflection.SERVICE_NAME, "headrace.v1.StatusService"]
    status_pb2_grpc.add_StatusServiceServicer_to_server(_Status(lifecycle), server)
    for add, servicer, name in register:
        add(servicer, server)
        names.append(name)
    reflection.enable_server_reflection(names, server)
    port = _listen(server, network.host, network.grpc_port)

    health_server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, health_server)
    health_port = _listen(health_server, network.host, network.health_port)

    async def follow(ready: bool) -> None:
        state = health_pb2.HealthCheckResponse.ServingStatus
        await servicer.set("", state.SERVING if ready else state.NOT_SERVING)
        await servicer.set("liveness", state.SERVING)

    lifecycle.on_ready_change(follow)
    await follow(lifecycle.ready)
    await server.start()
    await health_server.start()
    return Served(port=port, health_port=health_port, _servers=(server, health_server))
