"""What a node does with a container's probes: asks, counts, and says ready, or to be killed.

`Health` counts (pure); `watch()` asks a container again and again. Rules as in Kubernetes: nothing
but the startup probe is asked until it has succeeded; a probe that fails `failureThreshold` times
in a row has failed; a container whose startup or liveness probe has failed would be killed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Ask = Callable[["Probe"], Awaitable[bool]]
"""Whether a probe succeeds now; whatever it raises counts as a failure."""


@dataclass(frozen=True)
class Probe:
    """One probe as a manifest declares it, with Kubernetes' defaults."""

    kind: str
    """startupProbe, readinessProbe or livenessProbe."""
    period_s: int
    timeout_s: int
    num_failures: int
    """In a row: `failureThreshold`."""
    port: int | None = None
    service: str = ""
    """Of grpc.health.v1."""
    command: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: str, spec: dict[str, Any]) -> "Probe":
        """From a manifest. ValueError for what is not known here."""
        known = {"grpc", "exec", "periodSeconds", "timeoutSeconds", "failureThreshold"}
        if unknown := spec.keys() - known:
            raise ValueError(f"{kind}: {sorted(unknown)} are not known here; add them")
        return cls(
            kind=kind,
            period_s=spec.get("periodSeconds", 10),
            timeout_s=spec.get("timeoutSeconds", 1),
            num_failures=spec.get("failureThreshold", 3),
            port=spec["grpc"]["port"] if "grpc" in spec else None,
            service=spec.get("grpc", {}).get("service", ""),
            command=tuple(spec.get("exec", {}).get("command", ())),
        )


@dataclass
class Health:
    """What a node would think of a container."""

    started: bool = False
    ready: bool = False
    failing: dict[str, int] = field(default_factory=dict)
    """Failures in a row, by kind."""
    most_failing: dict[str, int] = field(default_factory=dict)
    """The longest such row: of the startup probe until it had started, of the others after that,
    and of the readiness probe since it has been ready."""
    killed_by: str | None = None
    """The probe that would have had the container killed."""
    times_unready: int = 0
    """How often it has gone from ready to not ready."""

    def due(self, probes: dict[str, Probe]) -> list[Probe]:
        """Which probes are asked in this state."""
        if not self.started and "startupProbe" in probes:
            return [probes["startupProbe"]]
        return [probe for kind, probe in probes.items() if kind != "startupProbe"]

    def told(self, probe: Probe, *, succeeded: bool) -> None:
        """Count one answer."""
        row = 0 if succeeded else self.failing.get(probe.kind, 0) + 1
        self.failing[probe.kind] = row
        # That it is not ready before it has ever been is no failure.
        if probe.kind != "readinessProbe" or self.ready or self.times_unready:
            self.most_failing[probe.kind] = max(row, self.most_failing.get(probe.kind, 0))
        failed = row >= probe.num_failures
        if probe.kind == "startupProbe":
            self.started = self.started or succeeded
        if probe.kind == "readinessProbe":
            if self.ready and failed:
                self.times_unready += 1
            self.ready = succeeded or (self.ready and not failed)
        elif failed and self.killed_by is None:
            self.killed_by = probe.kind


async def watch(health: Health, probes: dict[str, Probe], ask: Ask) -> None:
    """Ask each probe at its period, until cancelled, and tell `health`."""
    loop = asyncio.get_running_loop()
    due_s: dict[str, float] = {}
    while True:
        for probe in health.due(probes):
            if loop.time() >= due_s.get(probe.kind, 0.0):
                due_s[probe.kind] = loop.time() + probe.period_s
                health.told(probe, succeeded=await _succeeds(ask, probe))
        # The shortest period that a manifest can say is a second.
        await asyncio.sleep(0.2)


async def _succeeds(ask: Ask, probe: Probe) -> bool:
    try:
        async with asyncio.timeout(probe.timeout_s):
            return await ask(probe)
    except (TimeoutError, grpc.RpcError, OSError):
        return False


async def is_serving(host: str, probe: Probe) -> bool:
    """A gRPC probe of a container at `host`. Raises grpc.RpcError, and is cut off by the caller."""
    async with grpc.aio.insecure_channel(f"{host}:{probe.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=probe.service)
        answer = await stub.Check(request, timeout=probe.timeout_s)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
