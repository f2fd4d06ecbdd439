"""gRPC as every service uses it: servers, channels, health, reflection, deadlines, retries,
authentication.

- `serve()` starts a grpc.aio server with reflection, the StatusService and limits. Where a token is
  configured, calls without it are refused, where certificates are, connections without one; both
  where both are. `grpc.health.v1` listens on a second, plaintext port that carries nothing else.
- `channel()` opens an aio channel and `sync_channel()` a blocking one, with the same keepalive,
  limits and retry rules.
- Unary calls need a deadline: pass `timeout=UNARY_DEADLINE_S` (or your own). Only calls in
  `IDEMPOTENT` are retried.
"""

import asyncio
import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from headrace.v1 import status_pb2 as wire_status
from headrace.v1 import status_pb2_grpc

from services.common import grpc_access, grpc_tls
from services.common.certificates import certificates_of
from services.common.config import Network
from services.common.errors import UserError
from services.common.grpc_errors import abort as abort
from services.common.lifecycle import Lifecycle
from services.common.tokens import tokens_of

UNARY_DEADLINE_S = 30.0
"""Of calls that have no reason to take longer."""

RETRY_BUFFER_BYTES = 16 << 20
"""A request is kept for a repetition up to this size; gRPC's own 256 KiB is less than one group."""

KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 20, 10
"""Both sides ping this often, also while a call has no data, and wait so long for the answer: a
dead peer is found within the sum of the two."""

IDEMPOTENT = (
    "headrace.v1.PolicyService/ReportServing",
    "headrace.v1.StatusService/GetStatus",
)
"""Calls that gRPC itself may repeat. PushDeltas is not here: the recorder repeats it under its
sequence number. Nor are Score and Generate: what users' functions do would be done twice."""

CONNECTION_AGE_S = 600
"""A server ends a connection after so long, so that new replicas get their share and new
certificates are used; calls under way get as long again."""

HANDSHAKE_S = 20
"""A connection that says nothing for so long is closed."""

MAX_STREAMS = 256
"""Calls of one connection at a time; further ones wait in the client."""

METADATA_BYTES = (8 << 10, 16 << 10)
"""Of a call, headers and token together: above the second it is refused, between the two more and
more often."""


class PortTaken(UserError):
    """A port to listen on is in use; the message says which."""


def _limits(network: Network) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", network.max_message_bytes),
        ("grpc.max_receive_message_length", network.max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        # Without it gRPC waits a minute for the answer to a ping, whatever keepalive_timeout says.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_metadata_size", METADATA_BYTES[0]),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES[1]),
    ]


def _channel_options(network: Network) -> list[tuple[str, Any]]:
    names = [dict(zip(("service", "method"), name.split("/"), strict=True)) for name in IDEMPOTENT]
    retry = {
        "maxAttempts": 4,
        "initialBackoff": "0.2s",
        "maxBackoff": "3s",
        "backoffMultiplier": 2,
        # CANCELLED is how a server that stops answers a call which it has just received; the
        # caller's own cancellation is not repeated.
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
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


def channel(
    address: str,
    network: Network,
    *,
    server_name: str | None = None,
    own_connection: bool = False,
) -> grpc.aio.Channel:
    """An aio channel to `host:port` or `dns:///name:port`; it connects on first use and again by
    itself. With TLS, the server's certificate must name that host, or `server_name` instead.
    Channels to one address share a connection, except with `own_connection`."""
    options = _channel_options(network)
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    if own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    interceptors = grpc_access.aio_interceptors(tokens_of(network))
    certificates = certificates_of(network)
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    return grpc_tls.AioChannel(
        certificates,
        lambda credentials: grpc.aio.secure_channel(
            address, credentials, options=options, interceptors=interceptors
        ),
    )


def sync_channel(address: str, network: Network) -> grpc.Channel:
    """A blocking channel, for threads that have no event loop."""
    options = _channel_options(network)
    certificates = certificates_of(network)
    if certificates is None:
        plain = grpc.insecure_channel(address, options=options)
    else:
        plain = grpc_tls.SyncChannel(
            certificates,
            lambda credentials: grpc.secure_channel(address, credentials, options=options),
        )
    return grpc_access.with_token(plain, tokens_of(network))


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


def _listen(
    server: Any, host: str, port: int, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Have the server listen; the port that it got. Raises PortTaken."""
    shown = f"[{host}]" if ":" in host else host
    address = f"{shown}:{port}"
    try:
        taken: int = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
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
    `lifecycle.ready`. Raises PortTaken, and UserError for an unusable host, token file or
    certificate.
    """
    for port in (network.grpc_port, network.health_port):
        check_port_free(network.host, port)
    options = [
        *_limits(network),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_connection_age_ms", CONNECTION_AGE_S * 1000),
        ("grpc.max_connection_age_grace_ms", CONNECTION_AGE_S * 1000),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", network.max_connections),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
    ]
    tokens, certificates = tokens_of(network), certificates_of(network)
    # The rate first: who guesses tokens is slowed down, too.
    interceptors: list[Any] = [grpc_access.LimitRate(network.max_requests_per_s)]
    if tokens is not None:
        interceptors.append(grpc_access.RequireToken(tokens))
    server = grpc.aio.server(options=options, interceptors=interceptors)
    names = [reflection.SERVICE_NAME, "headrace.v1.StatusService"]
    status_pb2_grpc.add_StatusServiceServicer_to_server(_Status(lifecycle), server)
    for add, servicer, name in register:
        add(servicer, server)
        names.append(name)
    reflection.enable_server_reflection(names, server)
    credentials = None if certificates is None else grpc_tls.server_credentials(certificates)
    port = _listen(server, network.host, network.grpc_port, credentials)

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
