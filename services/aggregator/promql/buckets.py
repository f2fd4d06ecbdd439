"""Points of the store as samples that Prometheus might have scraped at the end of every bucket.

The bucket that is still filling ends when its producer was last heard of.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from services.aggregator.history import Point
from services.aggregator.promql.samples import Counter, Samples
from services.aggregator.series import RunRow


def begin_of(point: Point, width_s: int) -> int:
    """Begin of a point's bucket: the first point's may lie within it."""
    return point.x // width_s * width_s


def gauge(
    labels: Mapping[str, str], points: Iterable[Point], width_s: int, *, end_s: float
) -> Samples:
    """A gauge's value at the end of every bucket that has one."""
    held = [(begin_of(point, width_s), point.value) for point in points if point.value is not None]
    begins, values = np.array(held, np.float64).reshape(-1, 2).T
    return Samples(labels, np.minimum(begins + width_s, np.maximum(begins, end_s)), values)


def counter(
    labels: Mapping[str, str],
    events: Mapping[int, float],
    width_s: int,
    *,
    before: float,
    since_s: int,
    until_s: int,
    seen_s: float,
    run: RunRow,
) -> Samples:
    """A counter's total at the end of every bucket from its first event until its producer was last
    heard of, also where nothing happened.
    """
    begin_s = since_s if before else min(events, default=until_s)
    end_s = min(until_s, math.floor(seen_s / width_s) * width_s + width_s)
    begins = np.arange(begin_s, end_s, width_s, dtype=np.float64)
    times = np.minimum(begins + width_s, np.maximum(begins, seen_s))
    totals = before + np.cumsum(
        [events.get(begin, 0.0) for begin in range(begin_s, end_s, width_s)]
    )
    known = Counter(
        begin_s=begin_s,
        before=before,
        born_s=-math.inf if before else begin_s,
        seen_s=seen_s,
        run_s=(run.first_s, run.last_s),
    )
    return Samples(labels, times, np.asarray(totals, np.float64), known)
