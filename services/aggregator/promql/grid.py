"""The times that a query is evaluated at."""

from dataclasses import dataclass, replace

import numpy as np

from services.aggregator.promql.errors import QueryError
from services.aggregator.promql.samples import LOOKBACK_S, Floats

MAX_STEPS = 11_000
"""Points of one series, as in Prometheus."""

WIDTHS_S = (3600, 300, 60, 10)
"""Buckets that can be read; the last are the finest."""

INSTANT_PARTS = 60
"""A query for one moment reads its range in buckets of at most this part."""


@dataclass(frozen=True, slots=True)
class Grid:
    """start, start + step, … up to end, in seconds since 1970.

    Raises QueryError for a step that is not above 0, an end before the start, or too many steps.
    """

    start_s: float
    end_s: float
    step_s: float

    def __post_init__(self) -> None:
        if not self.step_s >= 0.001:
            raise QueryError("step: must be above 0, a millisecond at least")
        if self.end_s < self.start_s:
            raise QueryError("end: is before start")
        if (self.end_s - self.start_s) / self.step_s >= MAX_STEPS:
            raise QueryError(
                f"step: more than {MAX_STEPS:,} points of one series; choose a longer step"
            )

    @classmethod
    def moment(cls, at_s: float) -> "Grid":
        """One time."""
        return cls(at_s, at_s, 1.0)

    @property
    def times(self) -> Floats:
        """All of them, to the millisecond."""
        start, end, step = (round(1000 * at) for at in (self.start_s, self.end_s, self.step_s))
        return np.arange(start, end + 1, step, dtype=np.float64) / 1000

    def shifted(self, by_s: float) -> "Grid":
        """All times moved."""
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)

    def width_s(self, range_s: float | None) -> int:
        """Seconds of the buckets to read for windows of `range_s` (None: the newest sample).

        The widest that is at most a step, and of which each window holds whole ones, or else at
        least four: what it cuts counts by its share. A sample must not be too old for the next
        one's time.
        """
        if self.start_s == self.end_s:
            step_s = WIDTHS_S[-1] if range_s is None else range_s / INSTANT_PARTS
        else:
            step_s = self.step_s
        window_s = step_s if range_s is None else range_s
        for width_s in WIDTHS_S[:-1]:
            whole = all(each % width_s == 0 for each in (self.start_s, self.step_s, window_s))
            fresh = range_s is not None or width_s <= LOOKBACK_S
            if width_s <= step_s and (whole or (fresh and 4 * width_s <= window_s)):
                return width_s
        return WIDTHS_S[-1]
