"""The load of benchmarks/aggregator.py: producers that report 1,000 series as fast as they are
acknowledged.

Each producer has one batch on its way, as the recorder works: the next is sent after the answer. A
batch holds each series once: 500 observations with 1 to 12 values, 333 ratios, 167 counts, about
the mix of a run with tools. The keys are the catalogue's, with its placeholders filled in (a run
takes 200 values of each). Steps advance with time, so that rows are new; within a step a producer
sends the same partials again, with a new sequence.

All values are multiples of 1/8: their sums are exact in doubles, in any order.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
from headrace.v1 import metrics_pb2 as wire

from services.common import columns, grpc_kit, partials
from services.common.config import Network

RUN = "load"

PRODUCERS = 16
"""Replicas of a fair-sized run. Batches share a commit: fewer producers get fewer deltas through,
each of them being one batch ahead at most.
"""

STEPS_PER_S = 4.0
"""More than a real run's: at least so many times a second each producer's rows are new ones."""

VARIANTS = 5
"""Batches of different values, one after the other with the steps."""

SERIES: dict[str, tuple[type[partials.Partial], int]] = {
    "rewards/{}": (partials.Observation, 200),
    "tools/{}/latency_s": (partials.Observation, 200),
    "eval/rewards/{}": (partials.Observation, 100),
    "kl/{}": (partials.Ratio, 111),
    "queue/fill_frac/{}": (partials.Ratio, 111),
    "policy/logprob_gap_mean/{}": (partials.Ratio, 111),
    "tools/{}/call_total": (partials.Count, 84),
    "tools/{}/failure_total": (partials.Count, 83),
}
"""Declared keys, their instrument, and how many values their placeholder takes."""

Call = Any
"""A grpc.aio method that takes bytes."""

METHOD = "/headrace.v1.MetricsService/PushDeltas"

DEADLINE_S = 60.0
"""Of one call: a benchmark waits where a recorder would send again."""

MOMENT = time.monotonic()
"""When the partials' last values were seen, until a batch is placed in time."""


@dataclass
class Loaded:
    """What the producers saw."""

    batches: Counter[int] = field(default_factory=Counter)
    """Acknowledged, by variant; those of the warm-up too."""
    timed_batches: int = 0
    elapsed_s: float = 0.0
    by_second: Counter[int] = field(default_factory=Counter)
    """Deltas acknowledged in each second."""
    ack_ms: list[float] = field(default_factory=list)
    client_cpu: float = 0.0
    """Cores that this process used, 1 at most."""
    server_cpu: float = 0.0
    """Cores that the server used."""
    wire_bytes_per_delta: float = 0.0

    @property
    def deltas_per_s(self) -> float:
        """Acknowledged, over all of the time."""
        return self.timed_batches * number_of_series() / self.elapsed_s


def number_of_series() -> int:
    """Series of a batch."""
    return sum(number for _, number in SERIES.values())


def contents(variant: int) -> dict[str, partials.Partial]:
    """The partials of a batch, by key; the same in every process.

    Example: of variant 0, `tools/v1/call_total` counts 2 events, `kl/v1` is 1/16.
    """
    found: dict[str, partials.Partial] = {}
    for pattern, (kind, number) in SERIES.items():
        for index in range(number):
            partial = kind()
            if isinstance(partial, partials.Observation):
                for nth in range(1 + (7 * index + 5 * variant) % 12):
                    partial.add((1 + (index + 3 * nth + variant) % 40) / 8, MOMENT)
            elif isinstance(partial, partials.Ratio):
                partial.over.add((index + variant) % 9)
                partial.under.add(16)
            else:
                partial.total.add(1 + (index + variant) % 5)
            found[pattern.format(f"v{index}")] = partial
    return found


def expected(batches: Counter[int]) -> dict[str, partials.Partial]:
    """What each series must hold after so many batches of each variant (an observation's histogram
    and last value apart).
    """
    totals: dict[str, partials.Partial] = {}
    for variant, times in batches.items():
        for key, partial in contents(variant).items():
            total = totals.setdefault(key, type(partial)())
            _add(total, partial, times=times)
    return totals


def _add(total: partials.Partial, partial: partials.Partial, *, times: int) -> None:
    match total, partial:
        case partials.Count(), partials.Count():
            total.total.add(times * partial.sum)
        case partials.Ratio(), partials.Ratio():
            total.over.add(times * partial.numerator)
            total.under.add(times * partial.denominator)
        case partials.Observation(), partials.Observation():
            total.n += times * partial.n
            total.total.add(times * partial.sum)
            total.min, total.max = min(total.min, partial.min), max(total.max, partial.max)


class Batches:
    """One producer's batches. A batch is the bytes of its deltas, made once a step, and those of
    its name, made at every send: protobuf messages can be joined.
    """

    def __init__(self, producer: str) -> None:
        self._name = wire.PushDeltasRequest(
            run=RUN, producer=producer, service="generator", boot_id=uuid.uuid4().hex
        )
        self._templates = [_template(variant) for variant in range(VARIANTS)]
        self._step = -1
        self._begin_s = time.monotonic()
        self._body = b""

    @property
    def body_bytes(self) -> int:
        """Of the present deltas."""
        return len(self._body)

    def next(self, step: int) -> tuple[int, bytes]:
        """The next batch and its variant."""
        variant = step % VARIANTS
        if step != self._step:
            self._body = self._placed(self._templates[variant], step)
            self._step = step
        self._name.sequence += 1
        self._name.now_s = time.monotonic()
        return variant, self._body + self._name.SerializeToString()

    def _placed(self, template: wire.PushDeltasRequest, step: int) -> bytes:
        begin_s, end_s = self._begin_s, time.monotonic()
        self._begin_s = end_s
        for part in (template.counts, template.ratios, template.observations):
            number = len(part.places.key) // columns.UINT32.itemsize
            part.places.step = np.full(number, step, columns.UINT64).tobytes()
            part.places.begin_s = np.full(number, begin_s, columns.DOUBLE).tobytes()
            part.places.end_s = np.full(number, end_s, columns.DOUBLE).tobytes()
        template.observations.last_s = template.observations.places.end_s
        encoded: bytes = template.SerializeToString()
        return encoded


def _template(variant: int) -> wire.PushDeltasRequest:
    request = wire.PushDeltasRequest()
    columns.write(
        request,
        [
            columns.Item(key, 1, 0, MOMENT, MOMENT, partial)
            for key, partial in contents(variant).items()
        ],
    )
    return request


def run(address: str, *, seconds: float, steps_per_s: float, server_pid: int) -> Loaded:
    """Load the server at `address` (this is the client process). Raises RuntimeError when a batch
    is not taken whole, and once.
    """
    return asyncio.run(
        _run(address, seconds=seconds, steps_per_s=steps_per_s, server_pid=server_pid)
    )


async def _run(address: str, *, seconds: float, steps_per_s: float, server_pid: int) -> Loaded:
    loaded = Loaded()
    producers = [Batches(f"generator-{number}") for number in range(PRODUCERS)]
    channels = [grpc_kit.channel(address, Network()) for _ in producers]
    calls = [
        channel.unary_unary(METHOD, None, response_deserializer=wire.PushDeltasResponse.FromString)
        for channel in channels
    ]
    server = psutil.Process(server_pid)
    # The first batch of each makes the series, and is not timed.
    for call, producer in zip(calls, producers, strict=True):
        await _push(call, producer, step=0, loaded=loaded)
    loaded.wire_bytes_per_delta = producers[0].body_bytes / number_of_series()
    begun_s, spent_s = time.monotonic(), time.process_time()
    server_spent_s = _cpu_s(server)

    async def send(call: Call, producer: Batches) -> None:
        while (now_s := time.monotonic()) < begun_s + seconds:
            step = 1 + int((now_s - begun_s) * steps_per_s)
            await _push(call, producer, step=step, loaded=loaded)
            acknowledged_s = time.monotonic()
            loaded.ack_ms.append((acknowledged_s - now_s) * 1e3)
            loaded.by_second[int(acknowledged_s - begun_s)] += number_of_series()
            loaded.timed_batches += 1

    async with asyncio.TaskGroup() as group:
        for call, producer in zip(calls, producers, strict=True):
            group.create_task(send(call, producer))
    loaded.elapsed_s = time.monotonic() - begun_s
    loaded.client_cpu = (time.process_time() - spent_s) / loaded.elapsed_s
    loaded.server_cpu = (_cpu_s(server) - server_spent_s) / loaded.elapsed_s
    for channel in channels:
        await channel.close(None)
    return loaded


async def _push(call: Call, producer: Batches, *, step: int, loaded: Loaded) -> None:
    variant, message = producer.next(step)
    answer = await call(message, timeout=DEADLINE_S)
    if answer.duplicate or answer.accepted != number_of_series():
        raise RuntimeError(f"a batch of {number_of_series()} deltas was not taken: {answer}")
    loaded.batches[variant] += 1


def _cpu_s(process: psutil.Process) -> float:
    spent: Sequence[float] = process.cpu_times()[:2]
    return sum(spent)
