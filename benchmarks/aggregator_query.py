"""The queries of benchmarks/aggregator.py: a series of many steps, asked for at 1,000 points.

The series is what a trainer would have sent in many days: `perf/step_s`, one observation a step,
one step a second. It goes in by PushDeltas, with the age that each step would have.
"""

import math
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from headrace.v1 import metrics_pb2 as wire
from headrace.v1 import metrics_pb2_grpc

from services.common import columns, grpc_kit
from services.common.config import Network
from services.common.partials import Observation

RUN = "long"
KEY = "perf/step_s"

MAX_POINTS = 1000

QUERIES = 100
"""Of each kind."""

BATCH_STEPS = 2000
"""Steps of one batch while the series is filled."""

STEP_S = 1.0

DEADLINE_S = 120.0

IDLE_CORES = 0.1
"""A server that uses less, while nobody asks, has rolled everything up."""

IDLE_SECONDS = 3
"""In a row."""

SETTLE_S = 600.0
"""Most seconds that the server gets for it."""

Ask = Callable[[dict[str, Any]], httpx.Response]


@dataclass(frozen=True)
class Asked:
    """Queries of one kind."""

    ms: list[float]
    """Milliseconds of each, from the request to the last byte of the answer."""
    server_cpu_ms: float
    """CPU time that one cost the server, on average: steadier where others use the machine."""


def step_value(step: int) -> float:
    """What is observed in a step: 1 to 1.75 s, in eighths."""
    return 1 + step % 7 / 8


def fill(address: str, *, steps: int) -> float:
    """Send the whole series; deltas acknowledged per second.

    Raises RuntimeError when a batch is not taken whole, and once.
    """
    boot_id, begun_s = uuid.uuid4().hex, time.monotonic()
    with grpc_kit.sync_channel(address, Network()) as channel:
        push = metrics_pb2_grpc.MetricsServiceStub(channel).PushDeltas
        for sequence, first in enumerate(range(0, steps, BATCH_STEPS), start=1):
            request = wire.PushDeltasRequest(
                run=RUN, producer="trainer-0", service="trainer", boot_id=boot_id, sequence=sequence
            )
            now_s = time.monotonic()
            last = min(first + BATCH_STEPS, steps)
            columns.write(
                request,
                (_item(step, now_s - (steps - step) * STEP_S) for step in range(first, last)),
            )
            request.now_s = now_s
            answer = push(request, timeout=DEADLINE_S)
            if answer.duplicate or answer.accepted != last - first:
                raise RuntimeError(f"a batch of {last - first} steps was not taken: {answer}")
    return steps / (time.monotonic() - begun_s)


def _item(step: int, end_s: float) -> columns.Item:
    """One step as the recorder has it."""
    partial = Observation()
    partial.add(step_value(step), end_s)
    return columns.Item(KEY, 1, step, end_s - STEP_S, end_s, partial)


def measure(page: str, *, steps: int, times: int, server_pid: int) -> dict[str, Asked]:
    """`times` queries of each kind, over HTTP with one connection kept open.

    Raises AssertionError when an answer is wrong.
    """
    path = f"/api/v1/runs/{RUN}/metrics/{KEY}"
    with httpx.Client(base_url=page, trust_env=False, timeout=DEADLINE_S) as client:

        def ask(parameters: dict[str, Any]) -> httpx.Response:
            answer = client.get(path, params=parameters | {"max_points": MAX_POINTS})
            return answer.raise_for_status()

        server = psutil.Process(server_pid)
        _settle(server)
        _check(ask({}).json(), steps=steps)
        by_time = ask({"axis": "time"}).json()
        begin_s = by_time["points"][0]["x"]
        end_s = by_time["points"][-1]["x"] + by_time["width"]
        chance = random.Random(0)
        kinds: dict[str, Callable[[], dict[str, Any]]] = {
            "all steps": dict,
            "steps of a random range": lambda: _range(chance, 0, steps),
            "all of the time": lambda: {"axis": "time"},
            "time of a random range": lambda: {"axis": "time", **_range(chance, begin_s, end_s)},
            "all steps, p95": lambda: {"reduce": "p95"},
        }
        found = {}
        for kind, make in kinds.items():
            before_s = sum(server.cpu_times()[:2])
            took_ms = [_ms(ask, make()) for _ in range(times)]
            spent_s = sum(server.cpu_times()[:2]) - before_s
            found[kind] = Asked(took_ms, spent_s / times * 1e3)
        return found


def _range(chance: random.Random, first: int, end: int) -> dict[str, int]:
    """A range of two uniform ends: short and long ones, anywhere."""
    since, until = sorted(chance.sample(range(first, end), 2))
    return {"since": since, "until": until}


def _ms(ask: Ask, parameters: dict[str, Any]) -> float:
    begun_s = time.perf_counter()
    ask(parameters)
    return (time.perf_counter() - begun_s) * 1e3


def _settle(server: psutil.Process) -> None:
    """Wait until the server does nothing more. Raises RuntimeError when it never does."""
    begun_s, idle = time.monotonic(), 0
    server.cpu_percent()
    while idle < IDLE_SECONDS:
        if time.monotonic() > begun_s + SETTLE_S:
            raise RuntimeError(f"the server is still busy after {SETTLE_S:.0f} s")
        idle = idle + 1 if server.cpu_percent(interval=1) / 100 < IDLE_CORES else 0
    print(f"settled after {time.monotonic() - begun_s:.0f} s", flush=True)


def _check(answer: dict[str, Any], *, steps: int) -> None:
    """Every window's mean is that of its steps, and no step is missing."""
    width, points = answer["width"], answer["points"]
    assert len(points) == -(-steps // width), f"{len(points)} points of {width} steps"
    assert len(points) <= MAX_POINTS, f"{len(points)} points"
    for point in points:
        inside = range(point["x"], min(point["x"] + width, steps))
        mean = sum(map(step_value, inside)) / len(inside)
        assert math.isclose(point["value"], mean, rel_tol=1e-12), f"{point}, not {mean}"
