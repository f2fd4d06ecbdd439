"""Services of tests as a probe and `headrace run` see them: by the ports that they announced."""

import json
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import status_pb2, status_pb2_grpc

DEADLINE_S = 10.0
"""Of one question. A service under way answers within milliseconds, on a busy machine too."""


async def status_of(announced: Path, *, host: str = "127.0.0.1") -> status_pb2.GetStatusResponse:
    """What the service behind this file of ports says of itself."""
    port = read_ports(announced)["grpc_port"]
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        request = status_pb2.GetStatusRequest()
        answer: status_pb2.GetStatusResponse = await stub.GetStatus(request, timeout=DEADLINE_S)
        return answer


async def is_healthy(announced: Path, probe: str = "", *, host: str = "127.0.0.1") -> bool:
    """What its health port answers to a probe: readiness by default, or "liveness"."""
    port = read_ports(announced)["health_port"]
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=probe)
        answer = await stub.Check(request, timeout=DEADLINE_S)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def read_ports(announced: Path) -> dict[str, int]:
    """What a service has announced."""
    ports: dict[str, int] = json.loads(announced.read_text())
    return ports
