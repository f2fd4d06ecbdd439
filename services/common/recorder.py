"""The metrics client: count(), observe(), ratio(); microseconds each, no I/O, never raises into the work it measures.

A producer knows what it measured, not how it will be reduced: it sends mergeable partials, one per (key, attempt, step),
and the aggregator alone reduces. Every flush interval a thread closes the open partials into a batch, names it by
(producer, boot id, sequence) and sends it until the aggregator acknowledges it. While the aggregator is away, waiting
batches are merged once the buffer is full, then the oldest partials are dropped and counted. Mistakes of a caller (a
numerator without a denominator, a key used with two instruments) are counted in `recorder/refused_total` and logged
once per key.
"""

import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import structlog

from headrace.v1 import metrics_pb2 as wire
from headrace.v1 import metrics_pb2_grpc
from services.common.config import Recorder as Settings

LOG_GAMMA = math.log(1.02)
"""Histogram buckets are powers of 1.02: a percentile is at most 1 % off."""

PUSH_DEADLINE_S = 10.0
"""Of one PushDeltas call; a call cut off is sent again under the same sequence."""

MAX_BACKOFF_S = 5.0
"""Longest pause between two attempts to send."""

EVENTS_KEPT = 50_000
"""Group events buffered while the aggregator is away; beyond that they are compacted to the newest per group."""


@dataclass(slots=True)
class Count:
    """A sum of events."""

    sum: float = 0.0

    def merge(self, other: "Count") -> None:
        """Add the other's events."""
        self.sum += other.sum

    def write(self, delta: wire.Delta) -> None:
        """Put it on the wire."""
        delta.count.sum = self.sum


@dataclass(slots=True)
class Ratio:
    """A ratio of sums."""

    numerator: float = 0.0
    denominator: float = 0.0

    def merge(self, other: "Ratio") -> None:
        """Add numerators and denominators."""
        self.numerator += other.numerator
        self.denominator += other.denominator

    def write(self, delta: wire.Delta) -> None:
        """Put it on the wire."""
        delta.ratio.numerator, delta.ratio.denominator = self.numerator, self.denominator


@dataclass(slots=True)
class Observation:
    """Values observed one by one: n, sum, min, max, last, and a sparse log-bucket histogram."""

    n: int = 0
    sum: float = 0.0
    min: float = math.inf
    max: float = -math.inf
    last: float = 0.0
    last_s: float = 0.0
    positive: dict[int, int] = field(default_factory=dict)
    negative: dict[int, int] = field(default_factory=dict)
    zeros: int = 0
    num_nan: int = 0
    num_pos_inf: int = 0
    num_neg_inf: int = 0

    def add(self, value: float, now_s: float) -> None:
        """Take one value; NaN and infinities are counted and enter no sum."""
        if value - value != 0.0:
            if value != value:
                self.num_nan += 1
            elif value > 0:
                self.num_pos_inf += 1
            else:
                self.num_neg_inf += 1
            return
        self.n += 1
        self.sum += value
        if value < self.min:
            self.min = value
        if value > self.max:
            self.max = value
        self.last, self.last_s = value, now_s
        if value == 0.0:
            self.zeros += 1
            return
        buckets = self.positive if value > 0 else self.negative
        index = math.ceil(math.log(abs(value)) / LOG_GAMMA)
        buckets[index] = buckets.get(index, 0) + 1

    def merge(self, other: "Observation") -> None:
        """Take all values that the other took."""
        self.n += other.n
        self.sum += other.sum
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)
        if other.n and other.last_s >= self.last_s:
            self.last, self.last_s = other.last, other.last_s
        for mine, theirs in ((self.positive, other.positive), (self.negative, other.negative)):
            for index, number in theirs.items():
                mine[index] = mine.get(index, 0) + number
        self.zeros += other.zeros
        self.num_nan += other.num_nan
        self.num_pos_inf += other.num_pos_inf
        self.num_neg_inf += other.num_neg_inf

    def write(self, delta: wire.Delta) -> None:
        """Put it on the wire."""
        target = delta.observation
        target.n, target.sum, target.zeros = self.n, self.sum, self.zeros
        if self.n:
            target.min, target.max, target.last, target.last_s = (
                self.min,
                self.max,
                self.last,
                self.last_s,
            )
        target.positive.update(self.positive)
        target.negative.update(self.negative)
        target.num_nan, target.num_pos_inf, target.num_neg_inf = (
            self.num_nan,
            self.num_pos_inf,
            self.num_neg_inf,
        )


Partial = Count | Ratio | Observation
SeriesKey = tuple[str, int, int]
"""(key, attempt, step)."""


@dataclass(slots=True)
class _Open:
    partial: Any
    begin_s: float
    end_s: float


@dataclass
class _Batch:
    sequence: int
    partials: dict[SeriesKey, _Open]
    events: list[wire.GroupEvent]
    sent: bool = False
    """A batch that was sent may have been taken: it is only ever repeated as it is."""


class Recorder:
    """What one process measures. Thread-safe; one per process.

    `channel` is a blocking gRPC channel to the aggregator, or None to record without sending (tests).
    `set_clock()` stamps what follows with the run's attempt and step, as the queue or the trainer said.
    """

    def __init__(
        self,
        *,
        run: str,
        producer: str,
        service: str,
        settings: Settings,
        channel: grpc.Channel | None,
    ) -> None:
        self._run, self._producer, self._service = run, producer, service
        self._settings = settings
        self._boot_id = uuid.uuid4().hex
        self._stub = metrics_pb2_grpc.MetricsServiceStub(channel) if channel is not None else None
        self._lock = threading.Lock()
        self._open: dict[SeriesKey, _Open] = {}
        self._events: list[wire.GroupEvent] = []
        self._attempt, self._step, self._sequence = 0, 0, 0
        self._waiting: deque[_Batch] = deque()
        self._complained: set[str] = set()
        self._closing = threading.Event()
        self._samplers: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        if self._stub is not None:
            self._thread = threading.Thread(target=self._loop, name="recorder", daemon=True)
            self._thread.start()

    def set_clock(self, *, attempt: int, step: int) -> None:
        """What is recorded from now on belongs to this step of this attempt."""
        self._attempt, self._step = attempt, step

    def count(self, key: str, value: float = 1.0, *, step: int | None = None) -> None:
        """Add `value` events."""
        with self._lock:
            found = self._partial(key, Count, step)
            if found is not None:
                found.sum += value

    def observe(self, key: str, value: float, *, step: int | None = None) -> None:
        """Take one value."""
        with self._lock:
            found = self._partial(key, Observation, step)
            if found is not None:
                found.add(float(value), time.monotonic())

    def observe_many(
        self, key: str, values: "Iterable[float] | np.ndarray[Any, Any]", *, step: int | None = None
    ) -> None:
        """Take several values under one lock."""
        now = time.monotonic()
        with self._lock:
            found = self._partial(key, Observation, step)
            if found is not None:
                for value in values:
                    found.add(float(value), now)

    def ratio(
        self, key: str, numerator: float, denominator: float, *, step: int | None = None
    ) -> None:
        """Add to both sums; (0, 0) adds nothing, (x, 0) is refused: events without exposure are a caller's mistake."""
        if denominator == 0:
            if numerator != 0:
                self._refuse(key, f"numerator {numerator} without a denominator")
            return
        with self._lock:
            found = self._partial(key, Ratio, step)
            if found is not None:
                found.numerator += numerator
                found.denominator += denominator

    def event(self, event: wire.GroupEvent) -> None:
        """Say what happened to a group; it travels with the next batch."""
        event.worker = event.worker or self._producer
        event.at_s = time.monotonic()
        with self._lock:
            self._events.append(event)

    def before_flush(self, sampler: Callable[[], None]) -> None:
        """Call `sampler` (from the recorder's thread) before each batch is closed: for gauges and busy time."""
        self._samplers.append(sampler)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Send what is left; True when the aggregator has acknowledged everything within `timeout_s`."""
        self._closing.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._waiting

    def snapshot(self) -> dict[SeriesKey, Partial]:
        """The partials that are open now (tests and reports)."""
        with self._lock:
            return {key: item.partial for key, item in self._open.items()}

    def _partial(self, key: str, kind: type[Any], step: int | None) -> Any:
        now = time.monotonic()
        series = (key, self._attempt, self._step if step is None else step)
        found = self._open.get(series)
        if found is None:
            found = self._open[series] = _Open(kind(), now, now)
        elif type(found.partial) is not kind:
            self._refuse_locked(
                key, f"recorded as {kind.__name__} and as {type(found.partial).__name__}"
            )
            return None
        found.end_s = now
        return found.partial

    def _refuse(self, key: str, why: str) -> None:
        with self._lock:
            self._refuse_locked(key, why)

    def _refuse_locked(self, key: str, why: str) -> None:
        counter = self._partial("recorder/refused_total", Count, None)
        counter.sum += 1
        if key not in self._complained:
            self._complained.add(key)
            structlog.get_logger().error("metric refused", key=key, why=why)

    def _close_batch(self) -> None:
        with self._lock:
            partials, self._open = self._open, {}
            events, self._events = self._events, []
            if not partials and not events:
                return
            self._sequence += 1
            self._waiting.append(_Batch(self._sequence, partials, events))
        self._bound_buffer()

    def _bound_buffer(self) -> None:
        """Merge the unsent batches into one when the buffer is full; drop the oldest partials when that is not enough."""
        limit = self._settings.buffer_partials
        if sum(len(batch.partials) for batch in self._waiting) <= limit:
            return
        unsent = [batch for batch in self._waiting if not batch.sent]
        if not unsent:
            return
        first = unsent[0]
        merged = 0
        for batch in unsent[1:]:
            for series, item in batch.partials.items():
                mine = first.partials.get(series)
                if mine is None:
                    first.partials[series] = item
                elif type(mine.partial) is type(item.partial):
                    mine.partial.merge(item.partial)
                    mine.begin_s, mine.end_s = (
                        min(mine.begin_s, item.begin_s),
                        max(mine.end_s, item.end_s),
                    )
                    merged += 1
            first.events.extend(batch.events)
            self._waiting.remove(batch)
        # Sequences of merged batches must not read as gaps: the survivors are numbered anew.
        first.sequence = min(batch.sequence for batch in unsent)
        with self._lock:
            self._sequence = first.sequence
        if len(first.events) > EVENTS_KEPT:
            newest = {
                event.group_id: event for event in sorted(first.events, key=lambda e: e.state)
            }
            first.events = list(newest.values())
        dropped = 0
        while len(first.partials) > limit:
            first.partials.pop(next(iter(first.partials)))
            dropped += 1
        self.count("recorder/merged_total", merged)
        if dropped:
            self.count("recorder/dropped_total", dropped)

    def _loop(self) -> None:
        backoff_s = 0.1
        next_flush_s = time.monotonic() + self._settings.flush_s
        while True:
            closing = self._closing.wait(max(0.0, next_flush_s - time.monotonic()))
            for sampler in self._samplers:
                try:
                    sampler()
                except Exception:
                    structlog.get_logger().error("a metric sampler failed", exc_info=True)
            self._close_batch()
            next_flush_s = time.monotonic() + self._settings.flush_s
            while self._waiting:
                if self._send(self._waiting[0]):
                    self._waiting.popleft()
                    backoff_s = 0.1
                elif closing:
                    time.sleep(0.1)
                else:
                    next_flush_s = time.monotonic() + backoff_s
                    backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)
                    break
            if closing and not self._waiting:
                return

    def _send(self, batch: _Batch) -> bool:
        assert self._stub is not None
        request = wire.PushDeltasRequest(
            run=self._run,
            producer=self._producer,
            service=self._service,
            boot_id=self._boot_id,
            sequence=batch.sequence,
            events=batch.events,
        )
        for (key, attempt, step), item in batch.partials.items():
            delta = request.deltas.add(
                key=key, attempt=attempt, step=step, begin_s=item.begin_s, end_s=item.end_s
            )
            item.partial.write(delta)
        batch.sent = True
        request.now_s = time.monotonic()
        try:
            answer = self._stub.PushDeltas(request, timeout=PUSH_DEADLINE_S)
        except grpc.RpcError:
            return False
        for rejection in answer.rejected:
            if rejection.key not in self._complained:
                self._complained.add(rejection.key)
                structlog.get_logger().error(
                    "metric rejected", key=rejection.key, why=rejection.reason
                )
        return True
