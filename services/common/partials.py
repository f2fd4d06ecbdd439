"""The three instruments' mergeable partials: what a producer adds up before it sends.

Merging is associative and commutative: exact for integers, to 1e-12 relative for floats (sums are
compensated), so that the order and the split of what was measured do not show.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

LOG_GAMMA = math.log(1.02)
"""Histogram buckets are powers of 1.02: a percentile is at most 1 % off."""


def bucket_of(value: float) -> int:
    """The histogram bucket of a finite value that is not 0; of a negative one, of its absolute
    value.
    """
    return math.ceil(math.log(abs(value)) / LOG_GAMMA)


@dataclass(slots=True)
class Sum:
    """A sum of floats and what their additions have rounded away so far (Knuth's two-sum)."""

    high: float = 0.0
    low: float = 0.0

    def add(self, value: float) -> None:
        """Add a finite value."""
        before = self.high
        self.high = before + value
        added = self.high - before
        self.low += (before - (self.high - added)) + (value - added)

    def add_many(self, values: list[float]) -> None:
        """Add several finite values."""
        try:
            self.add(math.fsum(values))
        except OverflowError:  # beyond a double, perhaps on the way only
            for value in values:
                self.add(value)

    def merge(self, other: "Sum") -> None:
        """Add the other's values."""
        self.add(other.high)
        self.low += other.low

    @property
    def value(self) -> float:
        """The sum; infinite when it does not fit a double."""
        return self.high + self.low if math.isfinite(self.high) else self.high


@dataclass(slots=True)
class Count:
    """A sum of events."""

    total: Sum = field(default_factory=Sum)

    @property
    def sum(self) -> float:
        """What was counted."""
        return self.total.value

    def merge(self, other: "Count") -> None:
        """Add the other's events."""
        self.total.merge(other.total)


@dataclass(slots=True)
class Ratio:
    """A ratio of sums."""

    over: Sum = field(default_factory=Sum)
    under: Sum = field(default_factory=Sum)

    @property
    def numerator(self) -> float:
        """Sum of numerators."""
        return self.over.value

    @property
    def denominator(self) -> float:
        """Sum of denominators."""
        return self.under.value

    def merge(self, other: "Ratio") -> None:
        """Add numerators and denominators."""
        self.over.merge(other.over)
        self.under.merge(other.under)


@dataclass(slots=True)
class Observation:
    """Values observed one by one: n, sum, min, max, last, and a sparse log-bucket histogram."""

    n: int = 0
    total: Sum = field(default_factory=Sum)
    min: float = math.inf
    max: float = -math.inf
    last: float = 0.0
    last_s: float = -math.inf
    """Producer's monotonic time of `last`."""
    positive: dict[int, int] = field(default_factory=dict)
    negative: dict[int, int] = field(default_factory=dict)
    """Bucket i holds absolute values in (1.02^(i-1), 1.02^i]."""
    zeros: int = 0
    num_nan: int = 0
    num_pos_inf: int = 0
    num_neg_inf: int = 0

    @property
    def sum(self) -> float:
        """Of the finite values."""
        return self.total.value

    def add(self, value: float, now_s: float, times: int = 1) -> None:
        """Take one value, `times` times; NaN and infinities are counted and enter no sum."""
        if value - value != 0.0:
            if value != value:
                self.num_nan += times
            elif value > 0:
                self.num_pos_inf += times
            else:
                self.num_neg_inf += times
            return
        self.n += times
        total = value * times
        if total - total == 0.0:
            self.total.add(total)
        else:  # each of them is finite, their product is not
            for _ in range(times):
                self.total.add(value)
        if value < self.min:
            self.min = value
        if value > self.max:
            self.max = value
        self.last, self.last_s = value, now_s
        if value == 0.0:
            self.zeros += times
            return
        buckets = self.positive if value > 0 else self.negative
        index = bucket_of(value)
        buckets[index] = buckets.get(index, 0) + times

    def add_many(self, values: list[float], now_s: float) -> None:
        """Take several values, at least one; the last finite one is the last.

        Lengths, turns and rewards are mostly equal: their bucket is looked for once for each value.
        """
        try:
            total = math.fsum(values)
        except (OverflowError, ValueError):  # beyond a double; infinities of both signs
            total = math.nan
        if not math.isfinite(total):
            for value in values:
                self.add(value, now_s)
            return
        self.n += len(values)
        self.total.add(total)
        self.min, self.max = min(self.min, *values), max(self.max, *values)
        self.last, self.last_s = values[-1], now_s
        positive, negative, log, ceil = self.positive, self.negative, math.log, math.ceil
        for value, times in Counter(values).items():
            if value > 0.0:  # bucket_of(), whose call would take half of the time
                index = ceil(log(value) / LOG_GAMMA)
                positive[index] = positive.get(index, 0) + times
            elif value:
                index = ceil(log(-value) / LOG_GAMMA)
                negative[index] = negative.get(index, 0) + times
            else:
                self.zeros += times

    def merge(self, other: "Observation") -> None:
        """Take all values that the other took."""
        self.total.merge(other.total)
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)
        # Of two lasts at the same time the larger: the order of merging must not show.
        if other.n and (other.last_s, other.last) > (
            self.last_s,
            self.last if self.n else -math.inf,
        ):
            self.last, self.last_s = other.last, other.last_s
        self.n += other.n
        for mine, theirs in ((self.positive, other.positive), (self.negative, other.negative)):
            for index, number in theirs.items():
                mine[index] = mine.get(index, 0) + number
        self.zeros += other.zeros
        self.num_nan += other.num_nan
        self.num_pos_inf += other.num_pos_inf
        self.num_neg_inf += other.num_neg_inf


Partial = Count | Ratio | Observation
