"""Log-bucket histograms: what percentiles are computed from, mergeable and at most 1 % off.

Bucket i of one sign holds the absolute values in (1.02^(i-1), 1.02^i]; zeros are counted apart. Its
geometric middle, 1.02^(i-1/2), is within a factor of sqrt(1.02) of all of them: a relative error of
at most 0.995 %. The scheme is that of DDSketch (Masson, Rim, Lee, VLDB 2019) without its
collapsing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.partials import LOG_GAMMA

MAX_EXPONENT = 709.78
"""exp() of more is infinite in a double."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values by bucket index, sign-symmetric."""

    positive: Mapping[int, int] = field(default_factory=dict)
    negative: Mapping[int, int] = field(default_factory=dict)
    """By the absolute value's bucket."""
    zeros: int = 0

    @property
    def n(self) -> int:
        """Values held."""
        return self.zeros + sum(self.positive.values()) + sum(self.negative.values())

    def percentile(self, share: float) -> float | None:
        """The smallest value that at least `share` of all values do not exceed, to 1 %; None
        without values.

        Example: of 1, 2, 3, 4 the percentile(0.5) is 2 (the second of four).
        """
        number = self.n
        if number == 0:
            return None
        rank = max(1, math.ceil(share * number))
        seen = 0
        for index in sorted(self.negative, reverse=True):
            seen += self.negative[index]
            if seen >= rank:
                return -_middle(index)
        seen += self.zeros
        if seen >= rank:
            return 0.0
        for index in sorted(self.positive):
            seen += self.positive[index]
            if seen >= rank:
                return _middle(index)
        raise AssertionError("the rank is at most the number of values")


def _middle(index: int) -> float:
    """Geometric middle of a bucket; finite also for the bucket that holds the largest double."""
    return math.exp(min((index - 0.5) * LOG_GAMMA, MAX_EXPONENT))
