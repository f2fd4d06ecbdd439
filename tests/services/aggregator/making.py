"""Batches as producers make them: the recorder's partials in the wire's messages."""

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from headrace.v1 import metrics_pb2 as wire

from services.aggregator import reduce
from services.aggregator.batch import Batch, decode
from services.aggregator.ingest import Ingest, Receipt
from services.aggregator.reduce import Instrument
from services.aggregator.rows import NOT_A_RATIO, NOT_OBSERVED, Row, encode
from services.common.columns import DOUBLE, INT32, UINT32, UINT64, Item, write
from services.common.partials import Count, Observation, Partial, Ratio

NOW_S = 1_800_000_000.0
"""The aggregator's clock in these tests, on a 10 s boundary."""

Build = Partial


def count(value: float) -> Build:
    partial = Count()
    partial.total.add(value)
    return partial


def ratio(numerator: float, denominator: float) -> Build:
    partial = Ratio()
    partial.over.add(numerator)
    partial.under.add(denominator)
    return partial


def observed(values: Iterable[float], *, at_s: float | None = None) -> Build:
    """As the recorder sends it; `at_s` is the producer's time of the last value, else the end."""
    partial = Observation()
    for value in values:
        partial.add(value, math.nan if at_s is None else at_s)
    return partial


def placed(
    deltas: Iterable[tuple[str, Build]],
    *,
    step: int = 0,
    attempt: int = 1,
    age_s: float = 0.0,
    duration_s: float = 1.0,
) -> list[Item]:
    """Partials that lasted `duration_s` and ended `age_s` before 1,000 s."""
    end_s = 1000.0 - age_s
    items = []
    for key, partial in deltas:
        if isinstance(partial, Observation) and math.isnan(partial.last_s):
            partial.last_s = end_s
        items.append(Item(key, attempt, step, end_s - duration_s, end_s, partial))
    return items


def change(request: wire.PushDeltasRequest, column: str, *values: float) -> None:
    """Put other values into a column: `change(request, "observations.n", 7)`; names of places
    alone ("step") are of the instrument that there is.
    """
    instrument, _, name = column.rpartition(".")
    sent = instrument or next(
        n for n in ("counts", "ratios", "observations") if request.HasField(n)
    )
    columns = getattr(request, sent)
    target = columns if instrument else columns.places
    dtype = {"key": UINT32, "num_buckets": UINT32, "buckets": INT32}.get(name, DOUBLE)
    if name in ("attempt", "step", "n", "num_nan", "num_pos_inf", "num_neg_inf", "bucket_counts"):
        dtype = UINT64
    setattr(target, name, np.array(values, dtype).tobytes())


class Delta(NamedTuple):
    """One partial of a batch, with what is said of it."""

    key: str
    attempt: int
    step: int
    begin_s: float
    end_s: float
    instrument: Instrument
    row: Row


def deltas(batch: Batch) -> list[Delta]:
    """The partials of a batch, one by one."""
    return [
        Delta(batch.keys[key], attempt, step, begin_s, end_s, table.instrument, row)
        for table in batch.tables
        for key, attempt, step, begin_s, end_s, row in zip(
            table.key.tolist(),
            table.attempt.tolist(),
            table.step.tolist(),
            table.begin_s.tolist(),
            table.end_s.tolist(),
            table.rows(0.0),
            strict=True,
        )
    ]


def to_row(partial: reduce.Partial) -> Row:
    """The row of a partial that was pooled: what a writer would have stored."""
    if isinstance(partial, reduce.Count):
        return (partial.sum.high, partial.sum.low, *NOT_A_RATIO, *NOT_OBSERVED)
    if isinstance(partial, reduce.Ratio):
        over, under = partial.numerator, partial.denominator
        return (over.high, over.low, under.high, under.low, *NOT_OBSERVED)
    equal = partial.minimum == partial.maximum
    return (
        partial.sum.high,
        partial.sum.low,
        *NOT_A_RATIO,
        partial.n,
        partial.minimum,
        partial.maximum,
        partial.last,
        partial.last_at_s if partial.n else None,
        partial.num_nan,
        partial.num_pos_inf,
        partial.num_neg_inf,
        None if equal else encode(partial.histogram),
    )


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
        items = placed(deltas, step=step, attempt=attempt, age_s=age_s, duration_s=duration_s)
        return self.batch(items, events=events, sequence=sequence)

    def batch(
        self,
        items: Iterable[Item],
        *,
        events: Iterable[wire.GroupEvent] = (),
        sequence: int | None = None,
    ) -> wire.PushDeltasRequest:
        """A batch of any items, such as those of several steps."""
        request = wire.PushDeltasRequest(
            **self._named,
            sequence=next(self._sequences) if sequence is None else sequence,
            now_s=1000.0,
            events=events,
        )
        write(request, items)
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


def event(group_id: str, state: str, *, age_s: float = 1.0, **fields: Any) -> wire.GroupEvent:
    """What happened `age_s` before it is sent."""
    number = wire.GroupState.Value(f"GROUP_STATE_{state.upper()}")
    return wire.GroupEvent(group_id=group_id, state=number, at_s=1000.0 - age_s, **fields)


NAN, INF = math.nan, math.inf
