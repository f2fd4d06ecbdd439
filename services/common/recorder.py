"""The metrics client: count(), observe(), ratio(); microseconds each, no I/O, never raises into the
work it measures.

A producer knows what it measured, not how it will be reduced: it sends mergeable partials, one per
(key, attempt, step), and the aggregator alone reduces. A call only notes its numbers; they are
added up together (open_partials.py). Every flush interval a thread closes the open partials into a
batch, names it by (producer, boot id, sequence) and sends it until the aggregator acknowledges it.
While the aggregator is away, waiting batches are merged once the buffer is full, then the oldest
partials are dropped and counted. Mistakes of a caller (a numerator without a denominator, a key
used with two instruments, a value that is no number) are counted in `recorder/refused_total` and
logged once per key.
"""

import math
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import grpc
import numpy as np
import structlog
from headrace.v1 import metrics_pb2 as wire
from headrace.v1 import metrics_pb2_grpc, trace_pb2

from services.common import columns
from services.common.config import Recorder as Settings
from services.common.grpc_errors import retry_after_s
from services.common.open_partials import NOTES_AT_MOST, Open, OpenPartials, SeriesKey
from services.common.partials import Count, Observation, Partial, Ratio

PUSH_DEADLINE_S = 10.0
"""Of one PushDeltas call; a call cut off is sent again under the same sequence."""

CLOSING_RETRY_S = 0.1
"""Pause between two attempts to send while closing; before, one flush interval."""

EVENTS_KEPT = 50_000
"""Group events buffered while the aggregator is away; beyond that they are compacted to the newest
per group, and never dropped: the ledger must balance."""

HOPELESS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""Answers that the same batch would get again: it breaks a rule, or is larger than
`network.max_message_bytes`. It is dropped and counted; all others wait behind it otherwise. Not so
where the server says when to try again: then it was asked too often (RetryInfo)."""

TRACES_KEPT_BYTES = 16 << 20
"""Traces buffered; beyond that a new one is dropped and counted."""

TRACES_AT_ONCE_BYTES = 512 << 10
"""Of one batch, and at least one trace: metrics must not wait long behind them, and a batch must
stay below `network.max_message_bytes` (Traces.mistakes)."""

REFUSED, MERGED, DROPPED = (f"recorder/{what}_total" for what in ("refused", "merged", "dropped"))
"""The recorder's own counts, in calls and partials; these partials are never dropped."""

STEPS_END = 2**63
"""Steps and attempts are below it."""


@dataclass
class _Batch:
    sequence: int
    partials: dict[SeriesKey, Open]
    events: list[wire.GroupEvent]
    request: wire.PushDeltasRequest | None = None
    """Made at the first send. A batch that was sent may have been taken: from then on it is only
    ever repeated as it is."""


class Recorder:
    """What one process measures. Thread-safe; one per process.

    `channel` is a blocking gRPC channel to the aggregator, or None to record without sending
    (tests). `set_clock()` stamps what follows with the run's attempt and step, as the queue or the
    trainer said.
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
        self._open = OpenPartials(
            kinds=dict.fromkeys((REFUSED, MERGED, DROPPED), Count), refuse=self._refuse_locked
        )
        self._events: list[wire.GroupEvent] = []
        self._traces: deque[trace_pb2.RolloutTrace] = deque()
        self._traces_bytes = 0
        """Of these."""
        self._clock, self._sequence = (0, 0), 0
        self._complained: set[str] = set()
        self._samplers: list[Callable[[], None]] = []
        # The thread's own; others look at _waiting only when it has ended.
        self._waiting: deque[_Batch] = deque()
        self._trouble: str | None = None
        self._closing = threading.Event()
        self._wake = threading.Event()
        """The thread has something to do before its interval is over."""
        self._flushed = threading.Condition()
        self._flushes, self._flushes_done = 0, 0
        self._give_up_s = math.inf
        self._thread: threading.Thread | None = None
        if self._stub is not None:
            self._thread = threading.Thread(target=self._loop, name="recorder", daemon=True)
            self._thread.start()

    def set_clock(self, *, attempt: int, step: int) -> None:
        """What is recorded from now on belongs to this step of this attempt."""
        self._clock = (attempt, step)

    def count(self, key: str, value: float = 1.0, *, step: int | None = None) -> None:
        """Add `value` events; what is no finite number is refused."""
        number = self._finite(key, value)
        if number is not None:
            self._note(Count, key, step, number)

    def observe(self, key: str, value: float, *, step: int | None = None) -> None:
        """Take one value; NaN and infinities are counted apart."""
        number = self._number(key, value)
        if number is not None:
            self._note(Observation, key, step, number)

    def observe_many(
        self,
        key: str | tuple[str, ...],
        values: "Iterable[float] | np.ndarray[Any, Any]",
        *,
        step: int | None = None,
    ) -> None:
        """Take several values in one call, or none of them when one is no number. Of several keys
        each takes them, which costs little more than one."""
        try:
            numbers = list(map(float, values))
        except Exception as error:  # of the caller's values: it must not reach the caller's work
            self._refuse(str(key), f"no numbers: {error}")
            return
        if numbers:
            self._note(Observation, key, step, numbers)

    def ratio(
        self, key: str, numerator: float, denominator: float, *, step: int | None = None
    ) -> None:
        """Add to both sums. (0, 0) adds nothing; (x, 0) is refused: events without exposure are a
        caller's mistake."""
        over, under = self._finite(key, numerator), self._finite(key, denominator)
        if over is None or under is None:
            return
        if under == 0:
            if over != 0:
                self._refuse(key, f"numerator {over} without a denominator")
            return
        self._note(Ratio, key, step, over, under)

    def event(self, event: wire.GroupEvent) -> None:
        """Say what happened to a group; it travels with the next batch."""
        kept = wire.GroupEvent()
        kept.CopyFrom(event)
        kept.worker = kept.worker or self._producer
        kept.at_s = time.monotonic()
        with self._lock:
            self._events.append(kept)

    def trace(self, trace: trace_pb2.RolloutTrace) -> bool:
        """Send a trace with one of the next batches; False where there is no room for it: then it
        is dropped and counted. It is the recorder's from now on.
        """
        trace.at_s = time.monotonic()
        size_bytes = trace.ByteSize()
        with self._lock:
            fits = self._traces_bytes + size_bytes <= TRACES_KEPT_BYTES
            if fits:
                self._traces.append(trace)
                self._traces_bytes += size_bytes
        if not fits:
            self._drop_traces("buffer_full", 1)
        return fits

    def before_flush(self, sampler: Callable[[], None]) -> None:
        """Call `sampler` (from the recorder's thread) before each batch is closed: for gauges and
        busy time."""
        self._samplers.append(sampler)

    def flush(self, timeout_s: float) -> bool:
        """Send what has been recorded so far now; True when the aggregator has acknowledged it
        within `timeout_s`, False at once while it is known to be away.
        """
        if self._thread is None:
            return True
        with self._flushed:
            self._flushes += 1
            mine = self._flushes
            self._wake.set()
            self._flushed.wait_for(
                lambda: self._flushes_done >= mine or self._trouble is not None, timeout_s
            )
            return self._flushes_done >= mine

    def close(self, timeout_s: float = 5.0) -> bool:
        """Send what is left; True when the aggregator has acknowledged everything within
        `timeout_s`."""
        self._give_up_s = time.monotonic() + timeout_s
        self._closing.set()
        self._wake.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._waiting

    def snapshot(self) -> dict[SeriesKey, Partial]:
        """The partials that are open now (tests and reports)."""
        with self._lock:
            return {key: item.partial for key, item in self._open.add_up().items()}

    def _number(self, key: str, value: float) -> float | None:
        """The value as a float, or None when it is no number and was refused."""
        try:
            return float(value)
        except Exception as error:  # of the caller's value: it must not reach the caller's work
            self._refuse(key, f"no number: {error}")
            return None

    def _finite(self, key: str, value: float) -> float | None:
        """The same, of what goes into a sum as it is."""
        number = self._number(key, value)
        if number is None or number - number == 0.0:
            return number
        self._refuse(key, f"{number} would make the whole sum {number}")
        return None

    def _note(
        self,
        kind: type[Any],
        key: str | tuple[str, ...],
        step: int | None,
        value: float | list[float],
        under: float = 0.0,
    ) -> None:
        notes, (attempt, current) = self._open.notes, self._clock
        series = (key, attempt, current if step is None else step)
        notes.append((series, kind, time.monotonic(), value, under))
        if len(notes) >= NOTES_AT_MOST:
            with self._lock:
                self._open.add_up()

    def _refuse(self, key: str, why: str) -> None:
        with self._lock:
            self._refuse_locked(key, why)

    def _refuse_locked(self, key: str, why: str) -> None:
        series, now_s = (REFUSED, *self._clock), time.monotonic()
        self._open.partial(series, Count, now_s, now_s).total.add(1)
        self._complain("metric refused", key, why)

    def _complain(self, what: str, key: str, why: str) -> None:
        """Log it, once a key."""
        if key not in self._complained:
            self._complained.add(key)
            structlog.get_logger().error(what, key=key, why=why)

    # The recorder's thread

    def _loop(self) -> None:
        closing = False
        while True:
            if not closing:  # samplers of a closing process may look at what is gone
                # Not all producers of a run at once, also when an aggregator comes back.
                self._wake.wait(self._settings.flush_s * random.uniform(0.8, 1.2))
                self._wake.clear()
                closing = self._closing.is_set()
                self._sample()
            wanted = self._flushes
            self._close_batch()
            while self._waiting and self._send(self._waiting[0]):
                self._waiting.popleft()
                if self._traces and not self._waiting:
                    self._add_batch({}, [])
            with self._flushed:
                if not self._waiting:
                    self._flushes_done = wanted
                self._flushed.notify_all()
            if closing:
                left = self._waiting or not self._open.empty or self._events or self._traces
                if not left or time.monotonic() >= self._give_up_s:
                    return
                if self._waiting:
                    time.sleep(CLOSING_RETRY_S)

    def _sample(self) -> None:
        for sampler in tuple(self._samplers):
            try:
                sampler()
            except Exception:
                structlog.get_logger().error("a metric sampler failed", exc_info=True)

    def _close_batch(self) -> None:
        with self._lock:
            partials = self._open.take()
            events, self._events = self._events, []
        if partials or events or (self._traces and not self._waiting):
            self._add_batch(partials, events)
            self._bound_buffer()

    def _add_batch(self, partials: dict[SeriesKey, Open], events: list[wire.GroupEvent]) -> None:
        self._sequence += 1
        self._waiting.append(_Batch(self._sequence, partials, events))

    def _bound_buffer(self) -> None:
        """Merge the unsent batches into one when the buffer is full; drop the oldest partials when
        that is not enough."""
        limit = self._settings.buffer_partials
        unsent = [batch for batch in self._waiting if batch.request is None]
        if (
            sum(len(batch.partials) for batch in unsent) <= limit
            and sum(len(batch.events) for batch in unsent) <= EVENTS_KEPT
        ):
            return
        first, merged = unsent[0], 0
        for batch in unsent[1:]:
            for series, item in batch.partials.items():
                mine = first.partials.get(series)
                if mine is None:
                    first.partials[series] = item
                else:
                    mine.merge(item)
                    merged += 1
            first.events.extend(batch.events)
            self._waiting.remove(batch)
        # Unsent batches are the last ones: without this, those merged would read as a gap.
        self._sequence = first.sequence
        if len(first.events) > EVENTS_KEPT:
            ranked = sorted(first.events, key=lambda event: event.state)
            first.events = list({event.group_id: event for event in ranked}.values())
        excess = max(0, len(first.partials) - limit)
        own = (REFUSED, MERGED, DROPPED)
        dropped = [series for series in first.partials if series[0] not in own][:excess]
        for series in dropped:
            del first.partials[series]
        for key, number in ((MERGED, merged), (DROPPED, len(dropped))):
            if number:
                self.count(key, number)

    def _send(self, batch: _Batch) -> bool:
        """Whether the batch is done with: acknowledged, or refused for good."""
        assert self._stub is not None
        if batch.request is None:
            batch.request = self._request(batch)
        now_s = time.monotonic()
        batch.request.now_s = now_s
        deadline_s = min(PUSH_DEADLINE_S, max(CLOSING_RETRY_S, self._give_up_s - now_s))
        try:
            answer = self._stub.PushDeltas(batch.request, timeout=deadline_s)
        except grpc.RpcError as error:
            call = cast(grpc.Call, error)
            if call.code() not in HOPELESS or retry_after_s(error) is not None:
                self._troubled(call.code().name, call.details())
                return False
            structlog.get_logger().error(
                "metrics dropped",
                partials=len(batch.partials),
                events=len(batch.events),
                size_bytes=batch.request.ByteSize(),
                why=f"{call.code().name}: {call.details()}",
            )
            self.count(DROPPED, len(batch.partials))
            self._drop_traces("refused", len(batch.request.traces))
            return True
        except ValueError as error:  # how gRPC says that the channel was closed
            self._troubled("CLOSED", str(error))
            return False
        self._troubled(None, "")
        for rejection in answer.rejected:
            self._complain("metric rejected", rejection.key, rejection.reason)
        return True

    def _request(self, batch: _Batch) -> wire.PushDeltasRequest:
        request = wire.PushDeltasRequest(
            run=self._run,
            producer=self._producer,
            service=self._service,
            boot_id=self._boot_id,
            sequence=batch.sequence,
            events=batch.events,
            traces=self._take_traces(),
        )
        items = []
        for (key, attempt, step), item in batch.partials.items():
            if not (_is_text(key) and _is_number(attempt) and _is_number(step)):
                self._refuse(key, f"attempt {attempt}, step {step}: no place for a partial")
                continue
            items.append(columns.Item(key, attempt, step, item.begin_s, item.end_s, item.partial))
        columns.write(request, items)
        return request

    def _take_traces(self) -> list[trace_pb2.RolloutTrace]:
        """The oldest traces that one batch takes."""
        taken: list[trace_pb2.RolloutTrace] = []
        left_bytes = TRACES_AT_ONCE_BYTES
        with self._lock:
            while self._traces:
                size_bytes = self._traces[0].ByteSize()
                if taken and size_bytes > left_bytes:
                    break
                taken.append(self._traces.popleft())
                self._traces_bytes -= size_bytes
                left_bytes -= size_bytes
        return taken

    def _drop_traces(self, reason: str, number: int) -> None:
        if number:
            self.count(f"recorder/trace_dropped/{reason}", number)

    def _troubled(self, code: str | None, why: str | None) -> None:
        """Log when the aggregator goes away, for another reason, and when it is back."""
        if code == self._trouble:
            return
        self._trouble = code
        if code is None:
            structlog.get_logger().info("metrics reach the aggregator again")
        else:
            structlog.get_logger().warning("metrics wait for the aggregator", code=code, why=why)


def _is_text(key: object) -> bool:
    """Whether it can be sent as a key."""
    try:
        return isinstance(key, str) and bool(key.encode())
    except UnicodeEncodeError:  # half a surrogate pair
        return False


def _is_number(value: object) -> bool:
    """Whether it can be sent as an attempt or a step."""
    return isinstance(value, (int, np.integer)) and 0 <= int(value) < STEPS_END
