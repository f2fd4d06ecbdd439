"""Partials as rows of the table, and back."""

import math
from typing import Any

from sqlalchemy import RowMapping

from services.aggregator.histogram import Histogram
from services.aggregator.reduce import Count, Instrument, Observation, Partial, Ratio, Sum
from services.aggregator.schema import partials

COLUMNS = tuple(c for c in partials.columns if not c.primary_key)
"""What holds a partial; the others say where it belongs."""

SCALARS = tuple(column for column in COLUMNS if column.name != "histogram")
"""Enough for every reduction but percentiles."""


def to_row(partial: Partial) -> dict[str, Any]:
    """All columns of a partial; None in those that its instrument does not use."""
    row: dict[str, Any] = dict.fromkeys(column.name for column in COLUMNS)
    if isinstance(partial, Ratio):
        row["sum_high"], row["sum_low"] = partial.numerator.high, partial.numerator.low
        row["denominator_high"] = partial.denominator.high
        row["denominator_low"] = partial.denominator.low
        return row
    row["sum_high"], row["sum_low"] = partial.sum.high, partial.sum.low
    if isinstance(partial, Observation):
        row["n"] = partial.n
        row["minimum"], row["maximum"] = partial.minimum, partial.maximum
        row["last"] = partial.last
        row["last_at_s"] = partial.last_at_s if partial.last is not None else None
        row["num_nan"] = partial.num_nan
        row["num_pos_inf"], row["num_neg_inf"] = partial.num_pos_inf, partial.num_neg_inf
        row["histogram"] = partial.histogram.to_bytes()
    return row


def from_row(instrument: Instrument, row: RowMapping) -> Partial:
    """The partial of a row; without a histogram where that column was not selected."""
    total = Sum(row["sum_high"], row["sum_low"])
    if instrument == "count":
        return Count(total)
    if instrument == "ratio":
        return Ratio(total, Sum(row["denominator_high"], row["denominator_low"]))
    encoded = row.get("histogram")
    return Observation(
        n=row["n"],
        sum=total,
        minimum=row["minimum"],
        maximum=row["maximum"],
        last=row["last"],
        last_at_s=row["last_at_s"] if row["last_at_s"] is not None else -math.inf,
        histogram=Histogram.from_bytes(encoded) if encoded is not None else Histogram(),
        num_nan=row["num_nan"],
        num_pos_inf=row["num_pos_inf"],
        num_neg_inf=row["num_neg_inf"],
    )
