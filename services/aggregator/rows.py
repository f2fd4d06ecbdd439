"""Partials as rows of the tables, and back; and many rows pooled at once.

A row is a tuple in the order of COLUMNS. What producers sent is added up in the mutable partials of
services.common; what is read and reduced is in the frozen ones of reduce.py.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.v1 import metrics_pb2 as wire

from services.aggregator import reduce, schema
from services.aggregator.histogram import Histogram
from services.aggregator.reduce import Instrument, Sum
from services.common import partials

COLUMN_NAMES = tuple(c.name for c in schema.partials.columns if not c.primary_key)
"""What holds a partial; the others say where it belongs."""

SCALAR_NAMES = COLUMN_NAMES[:-1]
"""Enough for every reduction but percentiles: without the histogram."""

Row = Sequence[Any]

SUM_HIGH, SUM_LOW, DENOMINATOR_HIGH, DENOMINATOR_LOW, N, MINIMUM, MAXIMUM = range(7)
LAST, LAST_AT_S, NUM_NAN, NUM_POS_INF, NUM_NEG_INF, HISTOGRAM = range(7, 13)

NO_OBSERVATION = (None,) * 9


def encode(partial: partials.Partial) -> tuple[Any, ...]:
    """The row of what producers sent."""
    if isinstance(partial, partials.Count):
        return (*_doubles(partial.total), None, None, *NO_OBSERVATION)
    if isinstance(partial, partials.Ratio):
        return (*_doubles(partial.over), *_doubles(partial.under), *NO_OBSERVATION)
    bad = (partial.num_nan, partial.num_pos_inf, partial.num_neg_inf)
    n = partial.n
    if n == 0:
        return (0.0, 0.0, None, None, 0, None, None, None, None, *bad, None)
    low, high = partial.min, partial.max
    histogram = None
    if low != high:
        message = wire.Histogram()
        partial.write_histogram(message)
        histogram = message.SerializeToString()
    total = _doubles(partial.total)
    return (*total, None, None, n, low, high, partial.last, partial.last_s, *bad, histogram)


def _doubles(total: partials.Sum) -> tuple[float, float]:
    high, low = total.high, total.low
    # What an overflowing sum has rounded away is NaN, which SQLite takes for NULL.
    return (high, low) if low - low == 0.0 and high - high == 0.0 else (high, 0.0)


def thaw(partial: reduce.Partial) -> partials.Partial:
    """A partial that can be added to, of one that was read."""
    if isinstance(partial, reduce.Count):
        return partials.Count(_sum(partial.sum))
    if isinstance(partial, reduce.Ratio):
        return partials.Ratio(_sum(partial.numerator), _sum(partial.denominator))
    thawed = partials.Observation(
        n=partial.n,
        total=_sum(partial.sum),
        positive=dict(partial.histogram.positive),
        negative=dict(partial.histogram.negative),
        zeros=partial.histogram.zeros,
        num_nan=partial.num_nan,
        num_pos_inf=partial.num_pos_inf,
        num_neg_inf=partial.num_neg_inf,
    )
    if partial.minimum is not None and partial.maximum is not None and partial.last is not None:
        thawed.min, thawed.max = partial.minimum, partial.maximum
        thawed.last, thawed.last_s = partial.last, partial.last_at_s
    return thawed


def _sum(total: Sum) -> partials.Sum:
    return partials.Sum(total.high, total.low)


def to_row(partial: reduce.Partial) -> tuple[Any, ...]:
    """The row of a partial that was pooled."""
    return encode(thaw(partial))


def pool(instrument: Instrument, rows: Sequence[Row]) -> reduce.Partial:
    """All of some rows (at least one) as one partial; the same as merging them one by one.

    Rows without the histogram's column give an observation without a histogram.
    """
    columns = tuple(zip(*rows, strict=True))
    total = _total(columns[SUM_HIGH], columns[SUM_LOW])
    if instrument == "count":
        return reduce.Count(total)
    if instrument == "ratio":
        under = _total(columns[DENOMINATOR_HIGH], columns[DENOMINATOR_LOW])
        return reduce.Ratio(total, under)
    n = sum(columns[N])
    bad = tuple(sum(columns[column]) for column in (NUM_NAN, NUM_POS_INF, NUM_NEG_INF))
    if n == 0:
        return reduce.Observation(0, Sum(), None, None, None, -math.inf, Histogram(), *bad)
    last_at_s, last = max(
        (at_s, last)
        for at_s, last in zip(columns[LAST_AT_S], columns[LAST], strict=True)
        if last is not None
    )
    return reduce.Observation(
        n,
        total,
        min(value for value in columns[MINIMUM] if value is not None),
        max(value for value in columns[MAXIMUM] if value is not None),
        last,
        last_at_s,
        _histogram(rows) if len(columns) > HISTOGRAM else Histogram(),
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
    positive: dict[int, int] = {}
    negative: dict[int, int] = {}
    zeros = 0
    for row in rows:
        if row[HISTOGRAM] is None:  # of equal values, or of none
            value, n = row[MINIMUM], row[N]
            if not n:
                continue
            if value == 0:
                zeros += n
            else:
                _add(positive if value > 0 else negative, (partials.bucket_of(value),), (n,))
            continue
        found = wire.Histogram.FromString(row[HISTOGRAM])
        zeros += found.zeros
        _add(positive, found.positive_buckets, found.positive_counts)
        _add(negative, found.negative_buckets, found.negative_counts)
    return Histogram(positive, negative, zeros)


def _add(mine: dict[int, int], buckets: Iterable[int], counts: Iterable[int]) -> None:
    for bucket, n in zip(buckets, counts, strict=True):
        mine[bucket] = mine.get(bucket, 0) + n
