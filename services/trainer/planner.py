"""Which samples share a row: prefix-aware first-fit decreasing under two budgets. Pure functions.

A row is filled by the tokens that it makes the model forward, each shared prefix once, and by its
trained tokens (which bound the logits). Samples of a group stay together, since they share their
prompt; a group that exceeds a row is cut along its trie.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.trainer.trie import Ints, PrefixOrder, prefix_order
from services.trainer.types import TrainSample


@dataclass(frozen=True)
class PlannedRow:
    """One forward of one rank."""

    samples: list[int]
    """Indices of samples, at least one."""
    tokens: int
    """That it forwards."""
    load: float = 0.0
    """What it costs, in the unit of the load that the plan was made with."""
    echo: bool = False
    """Its samples are in another row, too: forwarded without loss terms, so that a rank takes part
    in a micro-batch for which there are too few samples."""


@dataclass(frozen=True)
class Plan:
    """Micro-batches of one step. Every sample is in exactly one row that is no echo, or in
    `oversize`."""

    microbatches: list[list[PlannedRow]]
    """Micro-batch by micro-batch, a row for every rank."""
    oversize: list[int]
    """Indices of samples that fit no row, alone or not."""
    unique_tokens: int
    """Tokens that the step would forward in one row without budgets: the sum of the rows' over this
    is the duplication."""

    @property
    def rows(self) -> list[PlannedRow]:
        """All rows, micro-batch after micro-batch."""
        return [row for microbatch in self.microbatches for row in microbatch]


@dataclass
class _Row:
    """A set of samples by their places in lexicographic order, and what it costs."""

    places: list[int] = field(default_factory=list)
    tokens: int = 0
    trained_tokens: int = 0


def plan(samples: Sequence[TrainSample], *, token_budget: int, trained_token_budget: int) -> Plan:
    """Distribute samples over as few rows as first-fit decreasing finds.

    Example: a prompt of 75 tokens with 16 completions of 3 tokens, all different from the first on,
    costs 75 + 16 x 2 = 107 tokens (the last token of a sample is a target only) and 48 trained
    tokens.
    """
    fits = [
        sample.num_context <= token_budget and sample.num_trained <= trained_token_budget
        for sample in samples
    ]
    chosen = np.flatnonzero(fits)
    order = prefix_order([samples[index].context for index in chosen])
    trained = np.array([samples[index].num_trained for index in chosen], np.int64)[order.order]
    group_of = [samples[chosen[index]].group_id for index in order.order]

    rows: list[_Row] = []
    units = _units(order, trained, group_of, token_budget, trained_token_budget)
    for unit in sorted(units, key=lambda unit: (-unit.tokens, unit.places)):
        for row in rows:
            if row.trained_tokens + unit.trained_tokens > trained_token_budget:
                continue
            places = sorted(row.places + unit.places)
            tokens = trie_tokens(order, places)
            if tokens <= token_budget:
                row.places, row.tokens = places, tokens
                row.trained_tokens += unit.trained_tokens
                break
        else:
            rows.append(unit)
    return Plan(
        microbatches=[
            [PlannedRow([int(chosen[order.order[place]]) for place in row.places], row.tokens)]
            for row in rows
        ],
        oversize=np.flatnonzero(~np.array(fits, bool)).tolist(),
        unique_tokens=int((order.lengths - order.shared).sum()),
    )


def trie_tokens(order: PrefixOrder, places: Sequence[int]) -> int:
    """Tokens of the trie over the sequences at `places` (rising).

    Two sequences share the least of what all neighbours between them share.
    """
    if not len(places):
        return 0
    index = np.asarray(places, np.int64)
    total = int(order.lengths[index].sum())
    if index.size > 1:
        # reduceat gives the minimum over shared[a + 1 : b + 1] for neighbours a < b.
        between = np.minimum.reduceat(order.shared[: index[-1] + 1], index[:-1] + 1)
        total -= int(between.sum())
    return total


def _units(
    order: PrefixOrder,
    trained: Ints,
    group_of: Sequence[str],
    token_budget: int,
    trained_token_budget: int,
) -> list[_Row]:
    """Groups, those beyond a budget cut into parts of neighbours in lexicographic order."""
    by_group: dict[str, list[int]] = {}
    for place, group in enumerate(group_of):
        by_group.setdefault(group, []).append(place)
    units = []
    for places in by_group.values():
        unit = _Row()
        for place in places:
            tokens = int(order.lengths[place])
            if unit.places:
                tokens -= int(order.shared[unit.places[-1] + 1 : place + 1].min())
            count = int(trained[place])
            full = (
                unit.tokens + tokens > token_budget
                or unit.trained_tokens + count > trained_token_budget
            )
            if full:
                units.append(unit)
                unit, tokens = _Row(), int(order.lengths[place])
            unit.places.append(place)
            unit.tokens += tokens
            unit.trained_tokens += count
        units.append(unit)
    return units
