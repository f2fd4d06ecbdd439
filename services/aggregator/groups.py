"""Rows of a series column by column, in groups that are reduced all at once: to the same as pool()
and reduce() of each group's rows.

What is absent is NaN here: no sum, extreme or last that is stored is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from services.aggregator.fine import KEY_COLUMNS
from services.aggregator.percentiles import entries, percentiles
from services.aggregator.reduce import PERCENTILES, Instrument, Reduction
from services.aggregator.rows import BUCKET, Row, pack

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BAD_NAMES = ("num_nan", "num_pos_inf", "num_neg_inf")
"""Counts of what is in no sum."""

INTEGER_NAMES = ("n", *BAD_NAMES)

_DTYPES: dict[str, type] = {**dict.fromkeys(INTEGER_NAMES, np.int64), "histogram": object}

SUM_NAMES = ("sum_high", "sum_low")

MEAN_NAMES = (*SUM_NAMES, "n")

_NEEDED: dict[Reduction, tuple[str, ...]] = {
    "sum": SUM_NAMES,
    "rate": SUM_NAMES,
    "ratio": (*SUM_NAMES, "denominator_high", "denominator_low"),
    "mean": MEAN_NAMES,
    "min": ("minimum",),
    "max": ("maximum",),
    "last": ("last", "last_at_s"),
    "sum_last": ("last", "last_at_s"),
    **dict.fromkeys(PERCENTILES, ("n", "minimum", "maximum", "histogram")),
}


def needed(instrument: Instrument, reduction: Reduction) -> tuple[str, ...]:
    """The columns that a reduction is made of, and the counts of what is in no sum."""
    return _NEEDED[reduction] + (BAD_NAMES if instrument == "observation" else ())


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one series: each array has one entry a row."""

    position: Ints
    source: Ints
    columns: dict[str, NDArray[Any]]
    """By name: integers of INTEGER_NAMES, bytes or None of the histogram, else doubles."""

    @classmethod
    def of(cls, rows: Sequence[Row], names: Sequence[str]) -> Self:
        """From tuples (position, source, *columns of these names)."""
        none: tuple[tuple[Any, ...], ...] = ((),) * (KEY_COLUMNS + len(names))
        position, source, *values = zip(*rows, strict=True) if rows else none
        columns: dict[str, NDArray[Any]] = {
            name: np.array(column, _DTYPES.get(name, np.float64))
            for name, column in zip(names, values, strict=True)
        }
        return cls(np.array(position, np.int64), np.array(source, np.int64), columns)

    def __len__(self) -> int:
        return len(self.position)

    def take(self, which: NDArray[Any]) -> Self:
        """Some of the rows, by a mask or by their indexes."""
        return type(self)(
            self.position[which],
            self.source[which],
            {name: column[which] for name, column in self.columns.items()},
        )


def joined(parts: Sequence[Rows], names: Sequence[str]) -> Rows:
    """All rows of the parts, with the columns of `names`, by position."""
    parts = [part for part in parts if len(part)] or [Rows.of((), names)]
    first = parts[0]
    if len(parts) > 1:
        first = Rows(
            np.concatenate([part.position for part in parts]),
            np.concatenate([part.source for part in parts]),
            {name: np.concatenate([part.columns[name] for part in parts]) for name in names},
        )
    if np.all(first.position[1:] >= first.position[:-1]):
        return first
    return first.take(np.argsort(first.position, kind="stable"))


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows in groups: those of each window, say. Each answer has one number a group, NaN (of a
    count 0) for a group that has none.
    """

    rows: Rows
    at: Ints
    """The group of each row, ascending."""
    num: int

    def values(self, reduction: Reduction, *, seconds: Floats | None = None) -> Floats:
        """Each group reduced, NaN where it is absent; `seconds` of each is for `rate`."""
        with np.errstate(all="ignore"):  # what overflows, and 0/0, is absent
            if reduction in PERCENTILES:
                found = self._percentile(PERCENTILES[reduction])
            elif reduction == "sum":
                found = self.totals()
            elif reduction == "rate":
                found = self.totals() / (np.nan if seconds is None else seconds)
            elif reduction == "ratio":
                found = self.totals() / self.totals("denominator")
            elif reduction == "mean":
                found = self.totals() / self.counts("n")
            elif reduction == "min":
                found = self.least("minimum")
            elif reduction == "max":
                found = self.greatest("maximum")
            else:
                found = np.full(self.num, np.nan)
                lasts = self.lasts()
                found[lasts.at] = lasts.rows.columns["last"]
            found[~np.isfinite(found)] = np.nan
        return found

    def totals(self, name: str = "sum") -> Floats:
        """The sums of the doubles `name`_high and `name`_low, to 1e-15 of their largest part."""
        high, low = self.sums(name)
        return high + low

    def sums(self, name: str = "sum") -> tuple[Floats, Floats]:
        """The same as two doubles, as rows keep them."""
        columns = self.rows.columns
        high, low = np.full((2, self.num), np.nan)
        if len(self.at):
            begins = _begins(self.at)
            groups = self.at[begins]
            high[groups], low[groups] = _sums(
                columns[f"{name}_high"], columns[f"{name}_low"], begins
            )
        return high, low

    def histograms(self) -> list[bytes | None]:
        """The histogram of each group, each bucket once; None where its values are equal."""
        columns = self.rows.columns
        groups, buckets, counts = entries(
            self.at, columns["n"], columns["minimum"], columns["histogram"].tolist()
        )
        order = np.lexsort((buckets, groups))
        groups, buckets, counts = groups[order], buckets[order], counts[order]
        new = (np.diff(groups, prepend=-1) != 0) | (np.diff(buckets, prepend=0) != 0)
        new[:1] = True
        begins = np.flatnonzero(new)
        packed, num_entries = pack(
            buckets[begins], np.add.reduceat(counts, begins) if len(begins) else counts
        )
        of_entries = np.repeat(groups[begins], num_entries)
        ends = np.searchsorted(of_entries, np.arange(self.num + 1)).tolist()
        encoded, width = packed.tobytes(), BUCKET.itemsize
        equal = self.least("minimum") == self.greatest("maximum")
        return [
            None if end == begin or same else encoded[begin * width : end * width]
            for begin, end, same in zip(ends[:-1], ends[1:], equal.tolist(), strict=True)
        ]

    def counts(self, name: str) -> Ints:
        """The exact sums of an integer column; 0 of a group without rows, or of another
        instrument.
        """
        found = np.zeros(self.num, np.int64)
        if len(self.at) and name in self.rows.columns:
            begins = _begins(self.at)
            found[self.at[begins]] = np.add.reduceat(self.rows.columns[name], begins)
        return found

    def least(self, name: str) -> Floats:
        """The smallest of a column."""
        return self._extreme(np.fmin, self.rows.columns[name])

    def greatest(self, name: str) -> Floats:
        """The largest of a column."""
        return self._extreme(np.fmax, self.rows.columns[name])

    def lasts(self) -> "Groups":
        """Of each group that has one, the row that was observed last; of two at the same time that
        of the larger value.
        """
        columns = self.rows.columns
        observed = np.flatnonzero(~np.isnan(columns["last"]))
        order = observed[
            np.lexsort(
                (columns["last"][observed], columns["last_at_s"][observed], self.at[observed])
            )
        ]
        at = self.at[order]
        final = np.flatnonzero(np.diff(at, append=self.num))
        return Groups(self.rows.take(order[final]), at[final], self.num)

    def _extreme(self, choose: np.ufunc, column: Floats) -> Floats:
        found = np.full(self.num, np.nan)
        if len(self.at):
            begins = _begins(self.at)
            found[self.at[begins]] = choose.reduceat(column, begins)
        return found

    def _percentile(self, share: float) -> Floats:
        columns = self.rows.columns
        found = percentiles(
            share,
            at=self.at,
            num=self.num,
            n=columns["n"],
            minimum=columns["minimum"],
            histograms=columns["histogram"].tolist(),
        )
        return np.clip(found, self.least("minimum"), self.greatest("maximum"))


def _begins(at: Ints) -> Ints:
    """Where each group begins: at least one row is needed."""
    return np.flatnonzero(np.diff(at, prepend=at[0] - 1))


def _sums(high: Floats, low: Floats, begins: Ints) -> tuple[Floats, Floats]:
    """The sum of each group: neighbours are added up by Knuth's two-sum until one is left."""
    sizes = np.diff(begins, append=len(high))
    while len(high) > len(sizes):
        rank = np.arange(len(high)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        left = np.flatnonzero(rank % 2 == 0)
        paired = left[rank[left] + 1 < np.repeat(sizes, sizes)[left]]
        mine, other = high[paired], high[paired + 1]
        total = mine + other
        shift = total - mine
        error = (mine - (total - shift)) + (other - shift)
        high, low = high.copy(), low.copy()
        low[paired] += low[paired + 1] + error
        high[paired] = total
        high, low = high[left], low[left]
        sizes = (sizes + 1) // 2
    return high, np.where(np.isfinite(low), low, 0.0)
