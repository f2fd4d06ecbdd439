"""Partials of one instrument, as columns: read from the wire, checked, and made into rows.

All checks are of whole columns; only what breaks a rule is looked at alone, to say why.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from headrace.v1 import metrics_pb2 as wire

from services.aggregator.reduce import Instrument
from services.aggregator.rows import BUCKET, MAX_COUNT, NOT_A_RATIO, NOT_OBSERVED, Row
from services.common.columns import DOUBLE, INT32, UINT32, UINT64

MAX_INTEGER = 2**62
"""Steps, attempts and sequences above this are nonsense, and would not fit the database's
integers.
"""

MAX_N = 2**53
"""Values of one observation; a double still holds them exactly."""

MAX_AGE_S = 1e8
"""Three years; what was measured longer ago than this was not."""

Says = Callable[[int], str]
"""Why the partial of an index breaks a rule."""


class BadColumns(ValueError):
    """Columns that do not belong together; nothing of their batch is taken."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why some partials are not taken."""

    broken: np.ndarray[Any, Any]
    """By partial, whether it breaks the rule."""
    reason: str
    says: Says


@dataclass(slots=True)
class Table:
    """Partials of one instrument. All arrays have one element for each."""

    instrument: Instrument
    key: np.ndarray[Any, Any]
    """The position of the key among the batch's."""
    attempt: np.ndarray[Any, Any]
    step: np.ndarray[Any, Any]
    begin_s: np.ndarray[Any, Any]
    end_s: np.ndarray[Any, Any]
    """Producer's monotonic time of the first and the last value."""
    columns: dict[str, np.ndarray[Any, Any]]
    """The instrument's own, by their names on the wire."""
    histograms: Sequence[bytes | None] = ()

    def __len__(self) -> int:
        return len(self.key)

    def kept(self, keep: np.ndarray[Any, Any]) -> "Table":
        """Only the partials of a mask."""
        if keep.all():
            return self
        histograms = [each for each, kept in zip(self.histograms, keep, strict=False) if kept]
        return Table(
            self.instrument,
            self.key[keep],
            self.attempt[keep],
            self.step[keep],
            self.begin_s[keep],
            self.end_s[keep],
            {name: column[keep] for name, column in self.columns.items()},
            histograms,
        )

    def rows(self, shift_s: float) -> list[Row]:
        """Rows in the order of rows.COLUMN_NAMES, their times `shift_s` later."""
        zeros = [0.0] * len(self)
        if self.instrument == "count":
            return [(each, 0.0, *NOT_A_RATIO, *NOT_OBSERVED) for each in self._list("sum")]
        if self.instrument == "ratio":
            pairs = zip(
                self._list("numerator"), zeros, self._list("denominator"), zeros, strict=True
            )
            return [(*pair, *NOT_OBSERVED) for pair in pairs]
        none: list[None] = [None] * len(self)
        found: list[list[Any]] = [
            self._list("sum"),
            zeros,
            none,
            none,
            self._list("n"),
            self._list("min"),
            self._list("max"),
            self._list("last"),
            (self.columns["last_s"] + shift_s).tolist(),
            self._list("num_nan"),
            self._list("num_pos_inf"),
            self._list("num_neg_inf"),
            list(self.histograms),
        ]
        for index in np.flatnonzero(self.columns["n"] == 0).tolist():
            for column in found[5:9]:
                column[index] = None
        return list(zip(*found, strict=True))

    def _list(self, name: str) -> list[Any]:
        found: list[Any] = self.columns[name].tolist()
        return found


def counts(message: wire.CountColumns) -> Table:
    """Raises BadColumns."""
    table = _table("count", message.places)
    table.columns = {"sum": _column(message.sum, DOUBLE, len(table), "counts.sum")}
    return table


def ratios(message: wire.RatioColumns) -> Table:
    """Raises BadColumns."""
    table = _table("ratio", message.places)
    table.columns = {
        name: _column(getattr(message, name), DOUBLE, len(table), f"ratios.{name}")
        for name in ("numerator", "denominator")
    }
    return table


def observations(message: wire.ObservationColumns) -> Table:
    """Raises BadColumns."""
    table = _table("observation", message.places)
    number = len(table)
    for name in ("n", "num_nan", "num_pos_inf", "num_neg_inf"):
        table.columns[name] = _column(
            getattr(message, name), UINT64, number, f"observations.{name}"
        )
    for name in ("sum", "min", "max", "last", "last_s"):
        table.columns[name] = _column(
            getattr(message, name), DOUBLE, number, f"observations.{name}"
        )
    sizes = _column(message.num_buckets, UINT32, number, "observations.num_buckets").astype(
        np.int64
    )
    num_buckets = int(sizes.sum())
    packed = np.empty(num_buckets, BUCKET)
    packed["bucket"] = _column(message.buckets, INT32, num_buckets, "observations.buckets")
    in_bucket = _column(message.bucket_counts, UINT64, num_buckets, "observations.bucket_counts")
    if num_buckets and int(in_bucket.max()) > MAX_COUNT:
        raise BadColumns(f"observations.bucket_counts: {in_bucket.max()} values in one bucket")
    packed["count"] = in_bucket
    ends = np.cumsum(sizes)
    held = np.concatenate(([0.0], np.cumsum(packed["count"], dtype=np.float64)))
    table.columns["held"] = held[ends] - held[ends - sizes]
    encoded, width = packed.tobytes(), BUCKET.itemsize
    table.histograms = [
        encoded[begin * width : end * width] if end > begin else None
        for begin, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)
    ]
    return table


def _table(instrument: Instrument, places: wire.Places) -> Table:
    number = len(places.key) // UINT32.itemsize
    return Table(
        instrument,
        _column(places.key, UINT32, number, "key"),
        _column(places.attempt, UINT64, number, "attempt"),
        _column(places.step, UINT64, number, "step"),
        _column(places.begin_s, DOUBLE, number, "begin_s"),
        _column(places.end_s, DOUBLE, number, "end_s"),
        {},
    )


def _column(data: bytes, dtype: "np.dtype[Any]", number: int, name: str) -> np.ndarray[Any, Any]:
    if len(data) != number * dtype.itemsize:
        raise BadColumns(
            f"{name}: {len(data)} bytes are not {number} elements of {dtype.itemsize} bytes each"
        )
    return np.frombuffer(data, dtype)


def faults(table: Table, *, now_s: float) -> list[Fault]:
    """The rules that some partials break: of where they belong, and of what they say."""
    begin_s, end_s = table.begin_s, table.end_s
    found = [
        Fault(
            (table.attempt > MAX_INTEGER) | (table.step > MAX_INTEGER),
            "bad_clock",
            lambda i: f"attempt {table.attempt[i]}, step {table.step[i]}",
        ),
        Fault(
            ~((now_s - MAX_AGE_S <= begin_s) & (begin_s <= end_s) & (end_s <= now_s)),
            "bad_time",
            lambda i: (
                f"begin_s {begin_s[i]} <= end_s {end_s[i]} <= now_s {now_s} must hold, in recent "
                "years"
            ),
        ),
    ]
    if table.instrument == "count":
        total = table.columns["sum"]
        found.append(
            Fault(
                ~((total >= 0) & (total < math.inf)),
                "bad_value",
                lambda i: f"a count's sum must be finite and not negative, not {total[i]}",
            )
        )
    elif table.instrument == "ratio":
        found += _ratio_faults(table)
    else:
        found += _observation_faults(table, now_s)
    return [fault for fault in found if fault.broken.any()]


def _ratio_faults(table: Table) -> list[Fault]:
    over, under = table.columns["numerator"], table.columns["denominator"]
    return [
        Fault(
            ~(np.isfinite(over) & (under >= 0) & (under < math.inf)),
            "bad_value",
            lambda i: (
                f"a ratio needs finite numbers and no negative denominator: {over[i]}/{under[i]}"
            ),
        ),
        Fault(
            (under == 0) & (over != 0),
            "bad_value",
            lambda i: f"numerator {over[i]} without a denominator: events need their exposure",
        ),
    ]


def _observation_faults(table: Table, now_s: float) -> list[Fault]:
    column = table.columns
    n, total, last_s, held = column["n"], column["sum"], column["last_s"], column["held"]
    low, high, last = column["min"], column["max"], column["last"]
    some = n > 0
    finite = np.isfinite(total) & np.isfinite(low) & np.isfinite(high) & np.isfinite(last)
    ordered = (low <= last) & (last <= high)
    timely = (now_s - MAX_AGE_S <= last_s) & (last_s <= now_s)
    most = np.maximum.reduce([n, column["num_nan"], column["num_pos_inf"], column["num_neg_inf"]])
    return [
        Fault(most > MAX_N, "bad_value", lambda _: "an observation of more values than can be"),
        Fault(
            ~some & (total != 0),
            "bad_value",
            lambda i: f"a sum of {total[i]} over no value",
        ),
        Fault(
            some & ~finite,
            "bad_value",
            lambda _: (
                "sum, min, max and last must be finite where n > 0; NaN and infinities are "
                "counted apart"
            ),
        ),
        Fault(
            some & finite & ~(ordered & timely),
            "bad_value",
            lambda _: "min <= last <= max and last_s <= now_s must hold",
        ),
        Fault(
            some & finite & (low != high) & (held != n),
            "bad_value",
            lambda i: f"the histogram holds {held[i]:.0f} values, n says {n[i]}",
        ),
        Fault(
            (~some | (low == high)) & (held != 0),
            "bad_value",
            lambda _: "a histogram where min equals max, or where n is 0",
        ),
    ]
