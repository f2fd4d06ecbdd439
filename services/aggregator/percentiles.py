"""Percentiles of many groups of rows at once: of each, the same as Histogram.percentile() of its
rows' histograms, one behind the other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.aggregator.histogram import MAX_EXPONENT
from services.aggregator.rows import BUCKET
from services.common.columns import ZERO_BUCKET, bucket_number
from services.common.partials import LOG_GAMMA

OF_SIGN = 2**33
"""Added to the index of a bucket of positive values: all of them come after zero, and those of
negative values, in the opposite order, before it.
"""


def percentiles(
    share: float,
    *,
    at: NDArray[np.int64],
    num: int,
    n: NDArray[np.int64],
    minimum: NDArray[np.float64],
    histograms: Sequence[bytes | None],
) -> NDArray[np.float64]:
    """The smallest value that at least `share` of a group's values do not exceed, to 1 %; NaN
    without values. `at` is the group of each row, 0 to num - 1, ascending. A row of values without
    a histogram is of equal ones.
    """
    found = np.full(num, np.nan)
    groups, buckets, counts = entries(at, n, minimum, histograms)
    if not len(groups):
        return found
    places = np.where(buckets % 2 == 0, OF_SIGN + (buckets >> 1), -OF_SIGN - (buckets >> 1))
    places[buckets == ZERO_BUCKET] = 0
    order = np.lexsort((places, groups))
    groups, places, seen = groups[order], places[order], np.cumsum(counts[order])
    begins = np.flatnonzero(np.diff(groups, prepend=-1))
    before = seen[begins] - counts[order][begins]
    totals = np.append(before[1:], seen[-1]) - before
    ranks = np.maximum(1, np.ceil(share * totals).astype(np.int64))
    place = places[np.searchsorted(seen, before + ranks)]
    # The bucket's geometric middle, finite also for the one that holds the largest double.
    exponent = np.minimum((np.abs(place) - OF_SIGN - 0.5) * LOG_GAMMA, MAX_EXPONENT)
    found[groups[begins]] = np.where(place == 0, 0.0, np.sign(place) * np.exp(exponent))
    return found


def entries(
    at: NDArray[np.int64],
    n: NDArray[np.int64],
    minimum: NDArray[np.float64],
    histograms: Sequence[bytes | None],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Group, bucket (by its number on the wire) and number of values of all entries."""
    sizes = np.array([len(each) if each else 0 for each in histograms], np.int64)
    held: NDArray[Any] = np.frombuffer(b"".join(each for each in histograms if each), BUCKET)
    equal = np.flatnonzero((sizes == 0) & (n > 0))
    return (
        np.concatenate([np.repeat(at, sizes // BUCKET.itemsize), at[equal]]),
        np.concatenate(
            [
                held["bucket"].astype(np.int64),
                np.array([bucket_number(value) for value in minimum[equal].tolist()], np.int64),
            ]
        ),
        np.concatenate([held["count"].astype(np.int64), n[equal]]),
    )
