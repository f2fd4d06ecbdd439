"""Partials as they are read, and the reductions that answer a query: what each of them means.
groups.py does the same for many windows at once.

Three instruments. A count is a sum of events; an observation holds n, sum, min, max, last and a
histogram; a ratio is a sum of numerators over a sum of denominators. A window's value is
reduce(pool of its partials, rows.pool): a rate is never stored as a rate, a mean never as a mean.
Pooling does not depend on order or split: exactly for integers, to 1e-12 relative for sums of
doubles (they are kept in two doubles each).

No observation and no denominator reduce to None, never to 0 and never to NaN. NaN and infinities
are in no sum; the partial counts them, so that "absent", "NaN" and "infinite" can be told apart.
"""

import math
from dataclasses import dataclass, field

from services.aggregator.histogram import Histogram
from services.common.instruments import REDUCTIONS as REDUCTIONS
from services.common.instruments import Instrument as Instrument
from services.common.instruments import Reduction as Reduction

PERCENTILES: dict[Reduction, float] = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of doubles held as an unevaluated sum of two, so that order and split do not show."""

    high: float = 0.0
    low: float = 0.0

    @property
    def value(self) -> float:
        """The sum, rounded once."""
        return self.high + self.low


@dataclass(frozen=True, slots=True)
class Count:
    """A sum of events."""

    sum: Sum = Sum()


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of sums. Example: 3/12 and 3/4 merge to 6/16 = 0.375, not to (0.25 + 0.75) / 2."""

    numerator: Sum = Sum()
    denominator: Sum = Sum()


@dataclass(frozen=True, slots=True)
class Observation:
    """Values observed one by one. `minimum`, `maximum` and `last` are None exactly when n is 0."""

    n: int = 0
    sum: Sum = Sum()
    minimum: float | None = None
    maximum: float | None = None
    last: float | None = None
    last_at_s: float = -math.inf
    """When `last` was observed, on the aggregator's clock; what makes two producers' lasts
    comparable.
    """
    histogram: Histogram = field(default_factory=Histogram)
    num_nan: int = 0
    num_pos_inf: int = 0
    num_neg_inf: int = 0


Partial = Count | Observation | Ratio

INSTRUMENT_OF: dict[type, Instrument] = {Count: "count", Observation: "observation", Ratio: "ratio"}


def reduce(partial: Partial, reduction: Reduction, *, seconds: float | None = None) -> float | None:
    """The value of a window; None when it is absent.

    `seconds` is the window's wall time, for `rate`; without it a rate is absent. `sum_last` of one
    producer's partial is its last: adding up over producers is the query's. Raises ValueError for a
    reduction that the instrument has not.
    """
    instrument = INSTRUMENT_OF[type(partial)]
    if reduction not in REDUCTIONS[instrument]:
        allowed = ", ".join(REDUCTIONS[instrument])
        raise ValueError(f"{reduction} is not for {instrument}: choose one of {allowed}")
    if isinstance(partial, Count):
        value = _count(partial, reduction, seconds)
    elif isinstance(partial, Ratio):
        denominator = partial.denominator.value
        value = partial.numerator.value / denominator if denominator != 0 else None
    else:
        value = _observation(partial, reduction)
    # Only an overflowing sum can be infinite here; JSON has no word for it and neither has a chart.
    return value if value is not None and math.isfinite(value) else None


def _count(partial: Count, reduction: Reduction, seconds: float | None) -> float | None:
    if reduction == "sum":
        return partial.sum.value
    return partial.sum.value / seconds if seconds else None


def _observation(partial: Observation, reduction: Reduction) -> float | None:
    if partial.n == 0:
        return None
    if reduction == "mean":
        return partial.sum.value / partial.n
    if reduction == "min":
        return partial.minimum
    if reduction == "max":
        return partial.maximum
    if reduction in PERCENTILES:
        value = partial.histogram.percentile(PERCENTILES[reduction])
        assert value is not None
        assert partial.minimum is not None
        assert partial.maximum is not None
        return min(max(value, partial.minimum), partial.maximum)
    return partial.last
