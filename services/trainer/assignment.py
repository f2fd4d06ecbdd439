"""Which row each sample is in, while the planner searches; what every row holds, and what runs of
samples would cost in others. Pure numpy.

The samples of a row that are neighbours in lexicographic order form a run. What can be moved is a
piece: the first or last few samples of a run, or all of it, so that a group is cut along its trie.
"""

from dataclasses import dataclass

import numpy as np

from services.trainer.prefix_costs import KINDS, LOAD, TOKENS, Floats, PrefixCosts
from services.trainer.trie import Ints

MAX_PIECES = 48
"""Pieces of one row that are looked at; of more, evenly spaced ones by load."""


@dataclass(frozen=True)
class Budgets:
    """What one row may hold."""

    tokens: int
    """Unique ones."""
    trained_tokens: int
    samples: int | None = None
    """No bound if None."""

    @property
    def amounts(self) -> Floats:
        """[3, 1] by kind (the kinds but load)."""
        samples = np.inf if self.samples is None else self.samples
        return np.array([[self.tokens], [self.trained_tokens], [samples]], np.float64)


@dataclass(frozen=True, eq=False)
class Pieces:
    """N pieces of rows."""

    start: Ints
    """[N] first place."""
    stop: Ints
    """[N] one past the last."""
    row: Ints
    """[N] where it is."""
    alone: Floats
    """[4, N] amounts in a row of its own."""
    taken: Floats
    """[4, N] what its row loses without it."""

    def take(self, chosen: Ints) -> "Pieces":
        """Some of them."""
        return Pieces(
            start=self.start[chosen],
            stop=self.stop[chosen],
            row=self.row[chosen],
            alone=self.alone[:, chosen],
            taken=self.taken[:, chosen],
        )

    def after_none(self, rows: Ints) -> "Pieces":
        """An empty piece of each of these rows, then all of these."""
        zero, nothing = np.zeros(rows.size, np.int64), np.zeros((len(KINDS), rows.size))
        return Pieces(
            start=np.concatenate([zero, self.start]),
            stop=np.concatenate([zero, self.stop]),
            row=np.concatenate([rows, self.row]),
            alone=np.concatenate([nothing, self.alone], axis=1),
            taken=np.concatenate([nothing, self.taken], axis=1),
        )


class Assignment:
    """Samples in rows, every row with one or more."""

    def __init__(self, costs: PrefixCosts, row_of: Ints, num_rows: int) -> None:
        self.costs, self.row_of, self.num_rows = costs, row_of, num_rows
        self.amounts = costs.of_rows(row_of, num_rows)
        """[4, R] of every row."""
        self._keys = self._sorted()

    def places(self, row: int) -> Ints:
        """Of the row's samples, rising."""
        return np.flatnonzero(self.row_of == row)

    def pieces(self) -> Pieces:
        """Of all rows."""
        row_of = self.row_of
        begins = np.flatnonzero(np.diff(row_of, prepend=-1))
        ends = np.append(begins[1:], row_of.size)
        first, last = np.repeat(begins, ends - begins), np.repeat(ends, ends - begins)
        places = np.arange(row_of.size)
        inner = places != first
        # The first few of each run (all of it included), and the last few.
        start = np.concatenate([first, places[inner]])
        stop = np.concatenate([places + 1, last[inner]])
        start, stop, alone = self._thinned(start, stop, self.costs.spans(start, stop))
        row = row_of[start]
        taken = self.less_path(alone, self.shared(start, stop, row))
        return Pieces(start=start, stop=stop, row=row, alone=alone, taken=taken)

    def shared(self, start: Ints, stop: Ints, row: Ints) -> Ints:
        """Tokens that pieces share with other samples of rows, for arrays that broadcast to one
        shape; 0 for empty pieces."""
        size = self.row_of.size
        start, stop, row = np.broadcast_arrays(start, stop, row)
        found = np.zeros(start.shape, np.int64)
        for edge, outside, step in ((start, start, -1), (stop - 1, stop, 0)):
            at = np.searchsorted(self._keys, row * size + outside) + step
            # Keys of other rows are out of this one's range.
            place = self._keys[np.clip(at, 0, size - 1)] - row * size
            inside = (at >= 0) & (at < size) & (place >= 0) & (place < size) & (start < stop)
            places, edges = place[inside], edge[inside]
            shared = self.costs.between(np.minimum(places, edges), np.maximum(places, edges))
            found[inside] = np.maximum(found[inside], shared)
        return found

    def less_path(self, alone: Floats, shared: Ints) -> Floats:
        """Amounts [4, ...] without what is shared [...]."""
        amounts = np.broadcast_to(alone, (len(KINDS), *shared.shape)).copy()
        amounts[TOKENS] -= shared
        amounts[LOAD] -= self.costs.path(shared)
        return amounts

    def exchanged(self, piece: tuple[int, int, int], other: tuple[int, int, int]) -> Ints:
        """[S] the row of every sample once two pieces (start, stop, row) have changed places."""
        row_of = self.row_of.copy()
        (start, stop, row), (other_start, other_stop, other_row) = piece, other
        row_of[start:stop] = other_row
        row_of[other_start:other_stop] = row
        return row_of

    def accept(self, row_of: Ints, rows: tuple[int, int]) -> None:
        """Take over an assignment that differs in these rows."""
        self.row_of = row_of
        for row in rows:
            self.amounts[:, row] = self.costs.of_places(self.places(row))
        self._keys = self._sorted()

    def _sorted(self) -> Ints:
        """[S] row x S + place of every sample, rising."""
        return np.sort(self.row_of * self.row_of.size + np.arange(self.row_of.size))

    def _thinned(self, start: Ints, stop: Ints, alone: Floats) -> tuple[Ints, Ints, Floats]:
        """At most about MAX_PIECES a row."""
        row = self.row_of[start]
        counts = np.bincount(row, minlength=self.num_rows)
        if counts.max() <= MAX_PIECES:
            return start, stop, alone
        by_load = np.lexsort((alone[LOAD], row))
        rank = np.arange(row.size) - np.repeat(counts.cumsum() - counts, counts)
        spacing = -(-counts // MAX_PIECES)
        kept = np.sort(by_load[rank % spacing[row[by_load]] == 0])
        return start[kept], stop[kept], alone[:, kept]
