"""Batches as producers make them: the recorder's partials in the wire's messages."""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

from headrace.v1 import metrics_pb2 as wire

from services.aggregator.batch import decode
from services.aggregator.ingest import Ingest, Receipt
from services.common.partials import Count, Observation, Ratio

NOW_S = 1_800_000_000.0
"""The aggregator's clock in these tests, on a 10 s boundary."""

Build = Callable[[wire.Delta], None]


def count(value: float) -> Build:
    partial = Count()
    partial.total.add(value)
    return partial.write


def ratio(numerator: float, denominator: float) -> Build:
    partial = Ratio()
    partial.over.add(numerator)
    partial.under.add(denominator)
    return partial.write


def observed(values: Iterable[float], *, at_s: float = 0.0) -> Build:
    """As the recorder sends it; `at_s` is the producer's time of the last value."""
    partial = Observation()
    for value in values:
        partial.add(value, at_s)
    return partial.write


class Producer:
    """One boot of one process, on a monotonic clock of its own that stands at 1,000 s."""

    def __init__(
        self, name: str, *, run: str = "demo", service: str = "trainer", boot_id: str = "boot-1"
    ) -> None:
        self._named: dict[str, Any] = {
            "run": run,
            "producer": name,
            "service": service,
            "boot_id": boot_id,
        }
        self._sequences = itertools.count(1)

    def request(
        self,
        deltas: Iterable[tuple[str, Build]] = (),
        *,
        step: int = 0,
        attempt: int = 1,
        age_s: float = 0.0,
        duration_s: float = 1.0,
        events: Iterable[wire.GroupEvent] = (),
        sequence: int | None = None,
    ) -> wire.PushDeltasRequest:
        """A batch whose deltas lasted `duration_s` and ended `age_s` before it is sent."""
        request = wire.PushDeltasRequest(
            **self._named,
            sequence=next(self._sequences) if sequence is None else sequence,
            now_s=1000.0,
            events=events,
        )
        end_s = 1000.0 - age_s
        for key, build in deltas:
            delta = request.deltas.add(
                key=key, attempt=attempt, step=step, begin_s=end_s - duration_s, end_s=end_s
            )
            build(delta)
            if delta.HasField("observation"):
                delta.observation.last_s = end_s
        return request

    def send(
        self,
        ingest: Ingest,
        deltas: Iterable[tuple[str, Build]] = (),
        *,
        now_s: float = NOW_S,
        **placed: Any,
    ) -> Receipt:
        """Make a batch and let the aggregator take it at `now_s`."""
        return ingest.take(decode(self.request(deltas, **placed)), now_s=now_s)


def event(group_id: str, state: str, **fields: Any) -> wire.GroupEvent:
    number = wire.GroupState.Value(f"GROUP_STATE_{state.upper()}")
    return wire.GroupEvent(group_id=group_id, state=number, at_s=999.0, **fields)


NAN, INF = math.nan, math.inf
