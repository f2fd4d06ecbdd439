"""Samples of series, and what a query reads of them at given times."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.aggregator.lengths import MIN_RATE_S
from services.aggregator.promql.errors import QueryError

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]

LOOKBACK_S = 300.0
"""How old the newest sample may be, as in Prometheus."""


@dataclass(frozen=True, slots=True)
class Values:
    """One series at the times of a query; a value counts only where it is `present`."""

    labels: Mapping[str, str]
    values: Floats
    present: Booleans


@dataclass(frozen=True, slots=True)
class Samples:
    """A series as Prometheus would have scraped it at the end of every bucket.

    `times` ascend, in seconds since 1970; of a counter the `values` are running totals.
    """

    labels: Mapping[str, str]
    times: Floats
    values: Floats
    counter: "Counter | None" = None

    def at(self, times: Floats) -> Values:
        """The newest sample at each time, unless it is too old."""
        index = np.searchsorted(self.times, times, side="right") - 1
        held = np.maximum(index, 0)
        if not len(self.times):
            return Values(self.labels, np.zeros_like(times), np.zeros_like(times, dtype=bool))
        present = (index >= 0) & (times - self.times[held] < LOOKBACK_S)
        return Values(self.labels, self.values[held], present)

    def over(self, function: str, times: Floats, range_s: float) -> Values:
        """A function of the samples in (t - range, t] at each time t.

        Raises QueryError for rate and increase of what is no counter.
        """
        if function in ("rate", "increase"):
            if self.counter is None:
                name = self.labels.get("__name__", "")
                raise QueryError(
                    f"{function}: {name} is a gauge; a counter's name ends in _total. Ask for "
                    "avg_over_time, or its value",
                    error_type="execution",
                )
            return self.counter.over(self, function, times, range_s)
        begins = np.searchsorted(self.times, times - range_s, side="right")
        ends = np.searchsorted(self.times, times, side="right")
        labels = self.labels
        if function != "last_over_time":
            labels = {label: value for label, value in labels.items() if label != "__name__"}
        return Values(labels, _reduced(function, self.values, begins, ends), ends > begins)


@dataclass(frozen=True, slots=True)
class Counter:
    """What a rate needs to know of a counter beside its samples."""

    begin_s: float
    """Begin of the first bucket that was read."""
    before: float
    """The total up to then."""
    born_s: float
    """When it is known to have begun, at the latest."""
    seen_s: float
    """When its producer was last heard of."""
    run_s: tuple[float, float] = field(default=(-np.inf, np.inf))
    """When the run was first and last heard of."""

    def over(self, samples: Samples, function: str, times: Floats, range_s: float) -> Values:
        """rate or increase in (t - range, t]: events are spread evenly over their bucket.

        A rate is per second of the window within the run: the REST API's, for the same window.
        """
        knots = np.concatenate(([self.begin_s], samples.times))
        totals = np.concatenate(([self.before], samples.values))
        begins = times - range_s
        values = np.interp(times, knots, totals) - np.interp(begins, knots, totals)
        present = (times > self.born_s) & (begins < self.seen_s)
        if function == "rate":
            first_s, last_s = self.run_s
            lengths = np.minimum(times, last_s) - np.maximum(begins, first_s)
            present &= lengths >= MIN_RATE_S
            values = values / np.where(present, lengths, 1.0)
        labels = {label: value for label, value in samples.labels.items() if label != "__name__"}
        return Values(labels, values, present)


def _reduced(
    function: str, values: Floats, begins: NDArray[np.intp], ends: NDArray[np.intp]
) -> Floats:
    """A function of values[begin:end] for each pair; anything where the slice is empty."""
    counts = (ends - begins).astype(np.float64)
    if function == "count_over_time":
        return counts
    if function == "last_over_time":
        return values[np.maximum(ends - 1, 0)] if len(values) else np.zeros_like(counts)
    ufunc = {"min_over_time": np.minimum, "max_over_time": np.maximum}.get(function, np.add)
    # reduceat takes every second slice of (begin, end, begin, end, ...), and no end past the last.
    padded = np.append(values, 0.0)
    pairs = np.stack((begins, ends), axis=1).ravel()
    reduced: Floats = ufunc.reduceat(padded, pairs)[::2]
    return reduced / np.maximum(counts, 1.0) if function == "avg_over_time" else reduced
