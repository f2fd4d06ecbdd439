"""What sets of samples cost in one row, shared prefixes paid once: sums over places in
lexicographic order. Pure numpy.

In that order the prefix shared by two samples is the least of what all neighbours between them
share. So a run of places costs a difference of two running sums, and a run added to a row saves one
path: the longest prefix that its first sample shares with the row's sample before it, or its last
one with the row's sample after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from services.trainer.load import Load
from services.trainer.trie import Ints, PrefixOrder, prefix_order
from services.trainer.types import TrainSample

Floats = NDArray[np.float64]

KINDS = TOKENS, TRAINED, SAMPLES, LOAD = range(4)
"""What is counted, in the order of the first axis of every array of amounts: unique tokens, trained
tokens, samples, load."""


@dataclass(frozen=True, eq=False)
class PrefixCosts:
    """Costs of S samples; places are positions in lexicographic order of what is forwarded."""

    order: PrefixOrder
    groups: list[str]
    """[S] group of the sample at each place."""
    trained: Ints
    """[S] trained tokens of the sample at each place."""
    own_load: Floats
    """[S] the part of its load that no other sample shares."""
    load: Load
    unique_tokens: int
    """Of all samples, were they in one row and shared their prefixes."""

    @classmethod
    def of(
        cls, samples: Sequence[TrainSample], load: Load, *, share_prefixes: bool = True
    ) -> "PrefixCosts":
        """Sort the samples and keep what their costs need. Without `share_prefixes` every sample is
        forwarded whole, and no two cost less together."""
        order = prefix_order([sample.context for sample in samples])
        unique_tokens = int((order.lengths - order.shared).sum())
        if not share_prefixes:
            order = replace(order, shared=np.zeros_like(order.shared))
        placed = [samples[index] for index in order.order.tolist()]
        sizes = np.array([sample.token_ids.size for sample in placed], np.float64)
        trained = np.array([sample.num_trained for sample in placed], np.int64)
        return cls(
            order=order,
            groups=[sample.group_id for sample in placed],
            trained=trained,
            own_load=load.per_trained * trained + load.per_square * sizes**2,
            load=load,
            unique_tokens=unique_tokens,
        )

    def subset(self, places: Ints) -> "PrefixCosts":
        """Costs of only the samples at these places, rising; `order.order` still holds the indices
        of all."""
        shared = np.zeros(places.size, np.int64)
        shared[1:] = self.between(places[:-1], places[1:])
        lengths = self.order.lengths[places]
        return PrefixCosts(
            order=PrefixOrder(order=self.order.order[places], lengths=lengths, shared=shared),
            groups=[self.groups[place] for place in places.tolist()],
            trained=self.trained[places],
            own_load=self.own_load[places],
            load=self.load,
            unique_tokens=int((lengths - shared).sum()),
        )

    @property
    def num_samples(self) -> int:
        """S."""
        return len(self.groups)

    @cached_property
    def common_tokens(self) -> int:
        """That all samples share, so that every row pays them."""
        shared = self.order.shared[1:] if self.num_samples > 1 else self.order.lengths
        return int(shared.min())

    def path(self, tokens: Ints) -> Floats:
        """Load of paths of so many tokens from the root."""
        length = tokens.astype(np.float64)
        return self.load.per_token * length + self.load.per_pair * length * (length + 1) / 2

    def spans(self, start: Ints, stop: Ints) -> Floats:
        """[4, N] amounts (see KINDS) of the places from `start` up to `stop`, alone in a row."""
        found = self._running[:, stop] - self._running[:, start]
        # The first of them has nobody to share with.
        found[TOKENS] += self.order.shared[start]
        found[LOAD] += self._shared_paths[start]
        return found

    def of_places(self, places: Ints) -> Floats:
        """[4] amounts of a row with the samples at these places, at least one, rising."""
        return self.of_rows(np.zeros(places.size, np.int64), 1, places=places)[:, 0]

    def of_rows(self, row_of: Ints, num_rows: int, *, places: Ints | None = None) -> Floats:
        """[4, R] amounts of rows, given the row of every sample (of those at `places`, rising)."""
        places = np.arange(self.num_samples) if places is None else places
        order = np.argsort(row_of, kind="stable")
        rows, places = row_of[order], places[order]
        together = np.flatnonzero(rows[1:] == rows[:-1])
        shared = np.zeros(places.size, np.int64)
        shared[together + 1] = self.between(places[together], places[together + 1])
        lengths = self.order.lengths[places]
        load = self.path(lengths) - self.path(shared) + self.own_load[places]
        amounts = (lengths - shared, self.trained[places], np.ones(places.size), load)
        return np.array([np.bincount(rows, each, num_rows) for each in amounts])

    def between(self, first: Ints, second: Ints) -> Ints:
        """[N] tokens that the sample at `first` shares with the one at `second`; `first` is the
        smaller place."""
        # Two overlapping windows of 2^k neighbours cover any range (a sparse table).
        exponent = np.frexp(second - first)[1] - 1
        least: Ints = np.minimum(
            self._least[exponent, first + 1], self._least[exponent, second + 1 - (1 << exponent)]
        )
        return least

    @cached_property
    def _least(self) -> Ints:
        """[k, S] least of `shared` at 2^k places from this one on."""
        levels = [self.order.shared]
        width = 1
        while 2 * width <= self.num_samples:
            last, level = levels[-1], levels[-1].copy()
            level[: last.size - width] = np.minimum(last[:-width], last[width:])
            levels.append(level)
            width *= 2
        return np.stack(levels)

    @cached_property
    def _shared_paths(self) -> Floats:
        return self.path(self.order.shared)

    @cached_property
    def _running(self) -> Floats:
        """[4, S + 1] amounts of the places before this one, in a row of all."""
        lengths, shared = self.order.lengths, self.order.shared
        amounts = np.zeros((len(KINDS), self.num_samples + 1))
        amounts[TOKENS, 1:] = lengths - shared
        amounts[TRAINED, 1:] = self.trained
        amounts[SAMPLES, 1:] = 1
        amounts[LOAD, 1:] = self.path(lengths) - self._shared_paths + self.own_load
        return amounts.cumsum(axis=1)
