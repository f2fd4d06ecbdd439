"""Partials as rows of the tables: added up where they are written, pooled where they are read.

A row has the order of COLUMN_NAMES. A writer adds one to another (added()); the latest values pool
theirs into the partials of reduce.py (pool()), and a history reduces whole columns of them
(groups.py). A histogram is an array of BUCKET, in which a
bucket may come several times: two of them, one behind the other, are the histogram of both.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.aggregator import reduce, schema
from services.aggregator.histogram import Histogram
from services.aggregator.reduce import Instrument, Sum
from services.common import columns
from services.common.columns import ZERO_BUCKET, bucket_number

COLUMN_NAMES = tuple(c.name for c in schema.partials.columns if not c.primary_key)
"""What holds a partial; the others say where it belongs."""

SCALAR_NAMES = COLUMN_NAMES[:-1]
"""Enough for every reduction but percentiles: without the histogram."""

Row = tuple[Any, ...]

SUM_HIGH, SUM_LOW, DENOMINATOR_HIGH, DENOMINATOR_LOW, N, MINIMUM, MAXIMUM = range(7)
LAST, LAST_AT_S, NUM_NAN, NUM_POS_INF, NUM_NEG_INF, HISTOGRAM = range(7, 13)

COLUMNS_OF: dict[Instrument, tuple[str, ...]] = {
    "count": COLUMN_NAMES[:DENOMINATOR_HIGH],
    "ratio": COLUMN_NAMES[:N],
    "observation": (*COLUMN_NAMES[:DENOMINATOR_HIGH], *COLUMN_NAMES[N:]),
}
"""What an instrument fills."""

NOT_A_RATIO = (None, None)
NOT_OBSERVED = (None,) * 9
"""Columns that other instruments leave empty."""

BUCKET = np.dtype([("bucket", "<i4"), ("count", "<u4")])
"""A bucket of a histogram, by its number on the wire (metrics.proto), and its number of values."""

MAX_COUNT = 2**32 - 1
"""Of one entry; a bucket of more values has several."""

COMPACT_BYTES = 2048
"""A histogram that has grown beyond this is made anew, with each bucket once."""


def added(row: Row, other: Row) -> tuple[Any, ...]:
    """The row of both, which are of the same instrument. Commutative and associative: exactly for
    integers, to 1e-12 relative for sums, which are kept in two doubles.
    """
    mine = list(row)
    _add_sum(mine, other, SUM_HIGH)
    if mine[DENOMINATOR_HIGH] is not None:
        _add_sum(mine, other, DENOMINATOR_HIGH)
    elif mine[N] is not None:
        _add_observation(mine, other)
    return tuple(mine)


def _add_sum(mine: list[Any], other: Row, column: int) -> None:
    """Knuth's two-sum; what an overflowing sum has rounded away is nothing."""
    high, more = mine[column], other[column]
    total = high + more
    shift = total - high
    mine[column] = total
    low = mine[column + 1] + other[column + 1] + ((high - (total - shift)) + (more - shift))
    mine[column + 1] = low if low - low == 0.0 else 0.0


def _add_observation(mine: list[Any], other: Row) -> None:
    for column in (NUM_NAN, NUM_POS_INF, NUM_NEG_INF):
        mine[column] += other[column]
    if not other[N]:
        return
    if not mine[N]:
        mine[N : LAST_AT_S + 1] = other[N : LAST_AT_S + 1]
        mine[HISTOGRAM] = other[HISTOGRAM]
        return
    low, high = min(mine[MINIMUM], other[MINIMUM]), max(mine[MAXIMUM], other[MAXIMUM])
    if low != high:
        histogram = (mine[HISTOGRAM] or _of_equal(mine)) + (other[HISTOGRAM] or _of_equal(other))
        mine[HISTOGRAM] = histogram if len(histogram) <= COMPACT_BYTES else _compact(histogram)
    mine[N] += other[N]
    mine[MINIMUM], mine[MAXIMUM] = low, high
    # Of two lasts at the same time the larger: the order of adding must not show.
    if (other[LAST_AT_S], other[LAST]) > (mine[LAST_AT_S], mine[LAST]):
        mine[LAST], mine[LAST_AT_S] = other[LAST], other[LAST_AT_S]


def _of_equal(row: Sequence[Any]) -> bytes:
    """The histogram of a row of equal values: stored without one, since it follows."""
    bucket, n = bucket_number(row[MINIMUM]), row[N]
    if n <= MAX_COUNT:
        return _ONE.pack(bucket, n)
    packed, _ = pack(np.array([bucket]), np.array([n]))
    return packed.tobytes()


_ONE = struct.Struct("<iI")


def pack(
    buckets: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Entries of BUCKET, and how many of them each bucket has: one, but for more than MAX_COUNT
    values.
    """
    entries = np.maximum(1, -(-counts // MAX_COUNT))
    packed = np.full(int(entries.sum()), MAX_COUNT, BUCKET)
    packed["bucket"] = np.repeat(buckets, entries)
    packed["count"][np.cumsum(entries) - 1] = counts - (entries - 1) * MAX_COUNT
    return packed, entries


def _compact(histogram: bytes) -> bytes:
    return encode(_decode((histogram,)))


def encode(histogram: Histogram) -> bytes:
    """The histogram as it is stored."""
    found = columns.histogram(histogram)
    buckets, counts = np.array([*found.items()], np.int64).reshape(-1, 2).T
    packed, _ = pack(buckets, counts)
    return packed.tobytes()


def _decode(encoded: Iterable[bytes]) -> Histogram:
    found = np.frombuffer(b"".join(encoded), BUCKET)
    positive: dict[int, int] = {}
    negative: dict[int, int] = {}
    zeros = 0
    for bucket, n in zip(found["bucket"].tolist(), found["count"].tolist(), strict=True):
        if bucket == ZERO_BUCKET:
            zeros += n
        else:
            buckets = negative if bucket & 1 else positive
            buckets[bucket >> 1] = buckets.get(bucket >> 1, 0) + n
    return Histogram(positive, negative, zeros)


def pool(instrument: Instrument, rows: Sequence[Row]) -> reduce.Partial:
    """All of some rows (at least one) as one partial; the same as merging them one by one.

    Rows without the histogram's column give an observation without a histogram.
    """
    held = tuple(zip(*rows, strict=True))
    total = _total(held[SUM_HIGH], held[SUM_LOW])
    if instrument == "count":
        return reduce.Count(total)
    if instrument == "ratio":
        return reduce.Ratio(total, _total(held[DENOMINATOR_HIGH], held[DENOMINATOR_LOW]))
    n = sum(held[N])
    bad = tuple(sum(held[column]) for column in (NUM_NAN, NUM_POS_INF, NUM_NEG_INF))
    if n == 0:
        return reduce.Observation(0, Sum(), None, None, None, -math.inf, Histogram(), *bad)
    last_at_s, last = max(
        (at_s, last)
        for at_s, last in zip(held[LAST_AT_S], held[LAST], strict=True)
        if last is not None
    )
    return reduce.Observation(
        n,
        total,
        min(value for value in held[MINIMUM] if value is not None),
        max(value for value in held[MAXIMUM] if value is not None),
        last,
        last_at_s,
        _histogram(rows) if len(held) > HISTOGRAM else Histogram(),
        *bad,
    )


def _total(high: Sequence[float], low: Sequence[float]) -> Sum:
    """The exact sum, rounded to two doubles; infinite where it overflows."""
    if len(high) == 1:
        return Sum(high[0], low[0])
    parts = [*high, *low]
    try:
        rounded = math.fsum(parts)
        parts.append(-rounded)
        return Sum(rounded, math.fsum(parts))
    except (OverflowError, ValueError):
        return Sum(math.inf)


def _histogram(rows: Sequence[Row]) -> Histogram:
    return _decode(row[HISTOGRAM] or _of_equal(row) for row in rows if row[N])
