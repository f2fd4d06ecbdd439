"""Partials as the columns of a batch: what the recorder sends and the aggregator reads.

A batch of a thousand partials is a few arrays: both sides handle them as a whole. An array is the
little-endian bytes of one numpy dtype.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from headrace.v1 import metrics_pb2 as wire

from services.common.partials import Count, Observation, Partial, Ratio, bucket_of

UINT32, UINT64, INT32, DOUBLE = (np.dtype(each) for each in ("<u4", "<u8", "<i4", "<f8"))

ZERO_BUCKET = -(2**31)
"""The bucket of values equal to 0; see histogram() for the others."""


class Item(NamedTuple):
    """One partial, and where it belongs."""

    key: str
    attempt: int
    step: int
    begin_s: float
    """Producer's monotonic time of the first and the last value."""
    end_s: float
    partial: Partial


def write(request: wire.PushDeltasRequest, items: Iterable[Item]) -> None:
    """Put partials on the wire, in place of those that the request holds."""
    keys: dict[str, int] = {}
    counts: list[tuple[Item, Count]] = []
    ratios: list[tuple[Item, Ratio]] = []
    observations: list[tuple[Item, Observation]] = []
    for item in items:
        keys.setdefault(item.key, len(keys))
        if isinstance(item.partial, Count):
            counts.append((item, item.partial))
        elif isinstance(item.partial, Ratio):
            ratios.append((item, item.partial))
        else:
            observations.append((item, item.partial))
    for name in ("keys", "counts", "ratios", "observations"):
        request.ClearField(name)
    request.keys.extend(keys)
    if counts:
        _write_places(request.counts.places, [item for item, _ in counts], keys)
        request.counts.sum = _bytes(DOUBLE, [count.sum for _, count in counts])
    if ratios:
        _write_places(request.ratios.places, [item for item, _ in ratios], keys)
        request.ratios.numerator = _bytes(DOUBLE, [ratio.numerator for _, ratio in ratios])
        request.ratios.denominator = _bytes(DOUBLE, [ratio.denominator for _, ratio in ratios])
    if observations:
        _write_places(request.observations.places, [item for item, _ in observations], keys)
        _write_observations(request.observations, [each for _, each in observations])


def _write_places(target: wire.Places, items: Sequence[Item], keys: dict[str, int]) -> None:
    target.key = _bytes(UINT32, [keys[item.key] for item in items])
    target.attempt = _bytes(UINT64, [item.attempt for item in items])
    target.step = _bytes(UINT64, [item.step for item in items])
    target.begin_s = _bytes(DOUBLE, [item.begin_s for item in items])
    target.end_s = _bytes(DOUBLE, [item.end_s for item in items])


def _write_observations(target: wire.ObservationColumns, found: Sequence[Observation]) -> None:
    none = float("nan")
    target.n = _bytes(UINT64, [each.n for each in found])
    target.sum = _bytes(DOUBLE, [each.sum for each in found])
    target.min = _bytes(DOUBLE, [each.min if each.n else none for each in found])
    target.max = _bytes(DOUBLE, [each.max if each.n else none for each in found])
    target.last = _bytes(DOUBLE, [each.last if each.n else none for each in found])
    target.last_s = _bytes(DOUBLE, [each.last_s if each.n else none for each in found])
    target.num_nan = _bytes(UINT64, [each.num_nan for each in found])
    target.num_pos_inf = _bytes(UINT64, [each.num_pos_inf for each in found])
    target.num_neg_inf = _bytes(UINT64, [each.num_neg_inf for each in found])
    histograms = [histogram(each) if each.n and each.min != each.max else {} for each in found]
    target.num_buckets = _bytes(UINT32, [len(each) for each in histograms])
    target.buckets = _bytes(INT32, [bucket for each in histograms for bucket in each])
    target.bucket_counts = _bytes(UINT64, [n for each in histograms for n in each.values()])


class Buckets(Protocol):
    """How many values each bucket of a histogram holds."""

    @property
    def positive(self) -> Mapping[int, int]:
        """Of positive values, by index."""

    @property
    def negative(self) -> Mapping[int, int]:
        """Of negative values, by the absolute value's index."""

    @property
    def zeros(self) -> int:
        """Values equal to 0."""


def histogram(buckets: Buckets) -> dict[int, int]:
    """How many values each bucket holds, by the bucket's number on the wire."""
    found = {2 * index: n for index, n in buckets.positive.items()}
    found.update((2 * index + 1, n) for index, n in buckets.negative.items())
    if buckets.zeros:
        found[ZERO_BUCKET] = buckets.zeros
    return found


def bucket_number(value: float) -> int:
    """The number of the bucket that a finite value is in."""
    return ZERO_BUCKET if value == 0 else 2 * bucket_of(value) + (value < 0)


def _bytes(dtype: "np.dtype[Any]", values: Sequence[float]) -> bytes:
    return np.array(values, dtype).tobytes()
