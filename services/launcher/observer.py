"""Looks at a run: asks every process what it is doing and the aggregator what was measured.

A process or an aggregator that does not answer changes nothing but its own part of the picture.
"""

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from headrace.v1 import status_pb2, status_pb2_grpc

from services.common.config import Recipe
from services.common.grpc_kit import channel
from services.launcher.children import Child
from services.launcher.metrics_client import MetricsClient, Point
from services.launcher.picture import Picture, Process

STATUS_TIMEOUT_S = 2.0
"""A process whose event loop is held for longer keeps its last phase."""

RECENT_STEPS = 20
"""Steps whose median is "seconds a step"."""

LATEST = (
    "reward|kl|entropy|grad_norm|rollout/inflight|rollout/generated_tok_s|rollout/scorer_busy_frac"
    "|queue/waiting/(requests|groups|samples)|sample/staleness_mean|sample/staleness_max"
)
"""Keys of which the view shows the newest value."""


@dataclass
class _Watched:
    """What is known of one child."""

    channel: grpc.aio.Channel | None = None
    port: int = 0
    starts: int = 0
    status: Any = None
    """Its last GetStatusResponse, or None."""
    seen_s: float = 0.0


@dataclass
class Observer:
    """`look()` gives the next picture. Use within one event loop; `close()` at the end."""

    recipe: Recipe
    children: Mapping[str, Child]
    """The supervisor's, read at each look."""
    metrics: MetricsClient
    page: str
    host: str
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _trainer: dict[str, str] = field(default_factory=dict)
    """Details of the trainer's last status; they outlive it."""
    _latest: dict[str, float] = field(default_factory=dict)
    _rewards: list[Point] = field(default_factory=list)
    _steps_s: list[Point] = field(default_factory=list)

    async def look(self) -> Picture:
        """One look; it takes at most a few seconds, also when nobody answers."""
        names = [name for name, child in self.children.items() if child.spec.announce is not None]
        await asyncio.gather(self._ask_metrics(), *(self._ask(name) for name in names))
        return self._picture(names)

    async def close(self) -> None:
        """Close all channels."""
        for watched in self._watched.values():
            if watched.channel is not None:
                await watched.channel.close(None)

    async def _ask(self, name: str) -> None:
        child = self.children[name]
        watched = self._watched.setdefault(name, _Watched())
        if watched.starts != child.starts or child.process is None:
            watched.starts, watched.status, watched.port = child.starts, None, 0
        assert child.spec.announce is not None
        port = _announced_port(child.spec.announce)
        if port is None or child.process is None:
            return
        if port != watched.port:
            if watched.channel is not None:
                await watched.channel.close(None)
            watched.channel = channel(f"{self.host}:{port}", self.recipe.network)
            watched.port = port
        stub = status_pb2_grpc.StatusServiceStub(watched.channel)
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = status_pb2.GetStatusRequest()
            watched.status = await stub.GetStatus(request, timeout=STATUS_TIMEOUT_S)
            watched.seen_s = time.monotonic()
            child.ready = child.ready or watched.status.ready

    async def _ask_metrics(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self._latest = await self.metrics.latest(f"^({LATEST})$")
            self._rewards = await self.metrics.history("reward", reduce="mean")
            self._steps_s = await self.metrics.history("perf/step_s")

    def _picture(self, names: list[str]) -> Picture:
        for name in names:
            status = self._watched[name].status
            if status is not None and status.service == "trainer":
                self._trainer = dict(status.details)
        details = self._trainer
        steps_s = [point.value for point in self._steps_s if point.value is not None]
        latest = self._latest.get
        return Picture(
            run=self.recipe.run,
            page=self.page,
            processes=tuple(self._process(name) for name in names),
            attempt=_int(details, "attempt"),
            step=_int(details, "step"),
            max_steps=_int(details, "max_steps"),
            version=_int(details, "version"),
            eval_before=_float(details, "eval_before"),
            eval_after=_float(details, "eval_after"),
            reward=latest("reward"),
            rewards=tuple(point.value for point in self._rewards if point.value is not None),
            kl=latest("kl"),
            entropy=latest("entropy"),
            grad_norm=latest("grad_norm"),
            staleness_mean=latest("sample/staleness_mean"),
            staleness_max=latest("sample/staleness_max"),
            step_s=statistics.median(steps_s[-RECENT_STEPS:]) if steps_s else None,
            inflight=latest("rollout/inflight"),
            generated_tok_s=latest("rollout/generated_tok_s"),
            scorer_busy_frac=latest("rollout/scorer_busy_frac"),
            requests_waiting=latest("queue/waiting/requests"),
            groups_waiting=latest("queue/waiting/groups"),
            samples_waiting=latest("queue/waiting/samples"),
            groups_capacity=self.recipe.queue.groups_capacity,
            samples_capacity=self.recipe.samples_capacity,
        )

    def _process(self, name: str) -> Process:
        child, watched = self.children[name], self._watched[name]
        service, now = name.partition("-")[0], time.monotonic()
        if child.process is None:
            phase, ready = child.last_death or "starting", False
            phase_s = now - child.ended_s if child.last_death else 0.0
        elif watched.status is None:
            phase, phase_s, ready = "starting", now - child.started_s, False
        else:
            status = watched.status
            phase, ready = status.phase, status.ready
            phase_s = status.phase_s + now - watched.seen_s
        return Process(
            name=name,
            service=service,
            phase=phase,
            phase_s=phase_s,
            ready=ready,
            restarts=child.restarts,
            last_death=child.last_death,
        )


def _announced_port(path: Path) -> int | None:
    """The gRPC port that a process wrote, or None before it has."""
    try:
        return int(json.loads(path.read_text())["grpc_port"])
    except FileNotFoundError:
        return None


def _int(details: Mapping[str, str], name: str) -> int | None:
    text = details.get(name)
    return int(text) if text else None


def _float(details: Mapping[str, str], name: str) -> float | None:
    text = details.get(name)
    return float(text) if text else None
