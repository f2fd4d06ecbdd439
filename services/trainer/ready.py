"""Rows that are full with the samples at hand, while more are to come. Pure numpy."""

from collections.abc import Sequence

import numpy as np

from services.trainer.assignment import Budgets
from services.trainer.prefix_costs import LOAD, TOKENS, Floats, PrefixCosts
from services.trainer.starts import needed_tokens, units
from services.trainer.trie import Ints
from services.trainer.types import TrainSample

READY_FILL = 0.9
"""Part of a budget from which on a row is full."""

CUT_TOKENS = 0.05
"""Of the token budget: the longest prefix forwarded twice to fill a row."""


def fill_at_most(
    samples: Sequence[TrainSample], budgets: Budgets, *, share_prefixes: bool = True
) -> float:
    """Rows that the samples of one group fill, at most: the sum over all budgets. Cheap: while this
    is below READY_FILL x ranks over all groups at hand, no micro-batch is ready.

    Example: budgets of 100 tokens and 20 trained ones, and two samples of 51 tokens that share 45
    and train 5 each. The last tokens are not forwarded: (45 + 5 + 5) / 100 + 10 / 20 = 1.05.
    """
    contexts = [sample.context for sample in samples]
    first = contexts[0]
    common = first.size if share_prefixes else 0
    for context in contexts[1:]:
        common = min(common, context.size)
        differs = np.flatnonzero(context[:common] != first[:common])
        common = int(differs[0]) if differs.size else common
    tokens = common + sum(context.size - common for context in contexts)
    trained = sum(sample.num_trained for sample in samples)
    amounts = np.array([[tokens], [trained], [len(samples)]], np.float64)
    return float((amounts / budgets.amounts).sum())


def full_rows(costs: PrefixCosts, budgets: Budgets, *, at_least: int) -> list[Ints]:
    """Places of the samples of every row that can be filled, rising; no sample is in two of them.
    None where there are clearly too few samples for `at_least` rows.

    A row has the heaviest unit that is left and the heaviest ones that fit beside it. If it is not
    full then, it takes the first few samples of another unit, whose prefix must be short; with a
    number of samples a row, any.
    """
    start, stop = units(costs, budgets)
    whole = costs.spans(np.array([0]), np.array([costs.num_samples]))
    whole[TOKENS] = needed_tokens(costs, start, at_least)
    if (whole[:LOAD] / budgets.amounts).sum() < READY_FILL * at_least:
        return []
    order = np.argsort(-costs.spans(start, stop)[LOAD], kind="stable")
    start, stop = start[order], stop[order]
    found: list[Ints] = []
    for head in range(start.size):
        if start[head] == stop[head]:
            continue  # taken
        taken = _row(costs, start, stop, head, budgets)
        places = np.sort(np.concatenate([np.arange(first, last) for _, first, last in taken]))
        fill = float((costs.of_places(places)[:LOAD] / budgets.amounts[:, 0]).max())
        # A cut unit may share less with the row than all of it would: then the row is too full.
        if READY_FILL <= fill <= 1:
            found.append(places)
            for unit, _, last in taken:
                start[unit] = last
    return found


def _row(
    costs: PrefixCosts, start: Ints, stop: Ints, head: int, budgets: Budgets
) -> list[tuple[int, int, int]]:
    """Unit, first place and end of what one row takes: `head`, and what fits beside it."""
    free = start < stop
    # Of units that are taken already any place will do: they are never looked at.
    begin = np.where(free, start, 0)
    last = np.where(free, stop, 1)
    whole = costs.spans(begin, last)
    shared, used = np.zeros(start.size, np.int64), np.zeros(LOAD)
    limits, taken, unit = budgets.amounts, [], head
    while True:
        taken.append((unit, int(start[unit]), int(stop[unit])))
        free[unit] = False
        used += _less(whole[:, unit], shared[unit])
        between = _shared_with(costs, begin, last, int(start[unit]), int(stop[unit]))
        shared = np.maximum(shared, between)
        fits = free & (used[:, None] + _less(whole, shared) <= limits).all(axis=0)
        if not fits.any():
            break
        unit = int(fits.argmax())
    if (used / limits[:, 0]).max() < READY_FILL and free.any():
        unit, end = _piece(costs, start, stop, np.flatnonzero(free), shared, used, budgets)
        if end > start[unit]:
            taken.append((unit, int(start[unit]), end))
    return taken


def _piece(
    costs: PrefixCosts,
    start: Ints,
    stop: Ints,
    free: Ints,
    shared: Ints,
    used: Floats,
    budgets: Budgets,
) -> tuple[int, int]:
    """The unit whose first few samples fill best what is left, and where they end; at its start if
    none has any that fit."""
    sizes = stop[free] - start[free]
    unit = np.repeat(free, sizes)
    first = start[unit]
    end = first + 1 + np.arange(unit.size) - np.repeat(sizes.cumsum() - sizes, sizes)
    amounts = _less(costs.spans(first, end), shared[unit])
    again = costs.order.shared[np.minimum(end, costs.num_samples - 1)]
    short = np.where(end < stop[unit], again, 0) <= CUT_TOKENS * budgets.tokens
    fits = (used[:, None] + amounts <= budgets.amounts).all(axis=0)
    fits &= short | (budgets.samples is not None)
    filled = np.where(fits, (used[:, None] + amounts)[:LOAD] / budgets.amounts, 0).max(axis=0)
    best = int(filled.argmax())
    return int(unit[best]), int(end[best] if fits[best] else first[best])


def _less(amounts: Floats, shared: Ints) -> Floats:
    """The amounts without load, and without the tokens shared."""
    rest: Floats = amounts[:LOAD].copy()
    rest[TOKENS] -= shared
    return rest


def _shared_with(costs: PrefixCosts, start: Ints, last: Ints, first: int, end: int) -> Ints:
    """[U] tokens that each unit from `start` up to `last` shares with the places from `first` up to
    `end`; 0 for those places themselves."""
    found = np.zeros(start.size, np.int64)
    after, before = start >= end, last <= first
    found[after] = costs.between(np.full(int(after.sum()), end - 1), start[after])
    found[before] = costs.between(last[before] - 1, np.full(int(before.sum()), first))
    return found
