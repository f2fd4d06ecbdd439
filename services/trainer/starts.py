"""Assignments that the planner's search starts from: groups kept whole where they fit a row. Pure
numpy, deterministic.
"""

from collections.abc import Iterator

import numpy as np

from services.trainer.assignment import Budgets
from services.trainer.prefix_costs import KINDS, LOAD, SAMPLES, TOKENS, PrefixCosts
from services.trainer.trie import Ints

NO_ROW = -1
"""Of a sample that has none yet."""

SHARED_BEYOND_COMMON = 0.02
"""Part of the tokens that groups share with some others, and not with all: from here on rows of
neighbours are tried, too."""


def starts(costs: PrefixCosts, num_rows: int, budgets: Budgets) -> Iterator[tuple[Ints, float]]:
    """[S] rows of all samples (at least `num_rows`), none empty; they may be beyond the budgets.
    And the tokens that have to be forwarded with so many rows: `needed_tokens`, and the prefixes of
    groups that have to be cut since there are fewer of them than rows."""
    start, stop = units(costs, budgets)
    guesses = [_spread(costs, start, stop, num_rows, budgets)]
    beyond = costs.order.shared[start].sum() - (start.size - 1) * costs.common_tokens
    if beyond > SHARED_BEYOND_COMMON * costs.unique_tokens:
        guesses.append(_neighbours(costs, start, stop, num_rows))
    for row_of in guesses:
        before = costs.of_rows(row_of, num_rows)[TOKENS].sum()
        _fill_empty(costs, row_of, num_rows)
        added = costs.of_rows(row_of, num_rows)[TOKENS].sum() - before
        yield row_of, needed_tokens(costs, start, num_rows) + float(added)


def needed_tokens(costs: PrefixCosts, start: Ints, num_rows: int) -> int:
    """That so many rows have to forward, for units that start there: the unique ones, what all
    samples share in every row, and the prefixes of groups that no row could hold."""
    common, at = costs.common_tokens, start[1:]
    cut = np.array([costs.groups[i] == costs.groups[i - 1] for i in at.tolist()], np.bool_)
    again = int((costs.order.shared[at] - common)[cut].sum())
    once = int((costs.order.lengths - costs.order.shared).sum())
    return once + (num_rows - 1) * common + again


def units(costs: PrefixCosts, budgets: Budgets) -> tuple[Ints, Ints]:
    """[U], [U] where each unit starts and stops: groups, or several that have the same prompt;
    those beyond a budget in parts within it."""
    _, group = np.unique(costs.groups, return_inverse=True)
    last = np.zeros(group.max(initial=0) + 1, np.int64)
    places = np.arange(costs.num_samples)
    np.maximum.at(last, group, places)
    reach = np.maximum.accumulate(last[group])
    edges = np.flatnonzero(np.concatenate([[True], reach[:-1] < places[1:], [True]]))
    found = []
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        while start < stop:
            ends = np.arange(start + 1, stop + 1)
            amounts = costs.spans(np.full(ends.size, start), ends)[:LOAD]
            within = int((amounts <= budgets.amounts).all(axis=0).sum())
            assert within, "every sample is within the budgets"
            found.append((start, start + within))
            start += within
    start_of, stop_of = np.array(found, np.int64).reshape(-1, 2).T
    return start_of, stop_of


def _spread(costs: PrefixCosts, start: Ints, stop: Ints, num_rows: int, budgets: Budgets) -> Ints:
    """[S] rows: the heaviest unit first, each to the row that is the lightest with it; one that
    fits no row is cut, and its first samples fill the row that takes most of them."""
    order = np.argsort(costs.spans(start, stop)[LOAD], kind="stable")
    waiting = list(zip(start[order].tolist(), stop[order].tolist(), strict=True))
    row_of = np.full(costs.num_samples, NO_ROW, np.int64)
    amounts = np.zeros((len(KINDS), num_rows))
    while waiting:
        first, last = waiting.pop()
        ends = np.arange(first + 1, last + 1)
        alone = costs.spans(np.full(ends.size, first), ends)[:, None, :]  # of the first few
        shared = _shared_with_rows(costs, row_of, first, last, num_rows)
        after = amounts[:, :, None] + alone
        after[TOKENS] -= shared[:, None]
        after[LOAD] -= costs.path(shared)[:, None]
        fill = (after[:LOAD] / budgets.amounts[:, :, None]).max(axis=0)
        fits = np.flatnonzero(fill[:, -1] <= 1)
        num_fitting = (fill <= 1).sum(axis=1)
        if fits.size:
            row = int(fits[after[LOAD, fits, -1].argmin()])
        elif num_fitting.any():
            row = int(num_fitting.argmax())
            waiting.append((first + int(num_fitting[row]), last))
            last = first + int(num_fitting[row])
        else:
            row = int(fill[:, -1].argmin())
        row_of[first:last] = row
        amounts[:, row] = costs.of_places(np.flatnonzero(row_of == row))
    return row_of


def _shared_with_rows(
    costs: PrefixCosts, row_of: Ints, first: int, last: int, num_rows: int
) -> Ints:
    """[R] tokens that the places from `first` up to `last` share with what is in each row."""
    shared, others = costs.order.shared, np.zeros(costs.num_samples, np.int64)
    others[last:] = np.minimum.accumulate(shared[last:])
    others[:first] = np.minimum.accumulate(shared[first:0:-1])[::-1]
    found, taken = np.zeros(num_rows, np.int64), row_of != NO_ROW
    np.maximum.at(found, row_of[taken], others[taken])
    return found


def _neighbours(costs: PrefixCosts, start: Ints, stop: Ints, num_rows: int) -> Ints:
    """[S] rows of equal numbers of unique tokens, units as they come: few prefixes are cut."""
    tokens = costs.spans(start, stop)[TOKENS] - costs.order.shared[start]
    middle = (tokens.cumsum() - tokens / 2) / max(tokens.sum(), 1)
    row = np.minimum((middle * num_rows).astype(np.int64), num_rows - 1)
    return np.repeat(row, stop - start)


def _fill_empty(costs: PrefixCosts, row_of: Ints, num_rows: int) -> None:
    """Give every empty row half of what is the heaviest run then."""
    while (empty := np.flatnonzero(np.bincount(row_of, minlength=num_rows) == 0)).size:
        start = np.flatnonzero(np.diff(row_of, prepend=NO_ROW))
        stop = np.append(start[1:], row_of.size)
        amounts = costs.spans(start, stop)
        alone = np.bincount(row_of, minlength=num_rows)[row_of[start]] == 1
        cuttable = np.where(amounts[SAMPLES] > 1, amounts[LOAD], np.where(alone, -2, -1))
        run = int(cuttable.argmax())
        first, last = int(start[run]), int(stop[run])
        if last - first > 1:
            first += _halves(costs, first, last)
        row_of[first:last] = empty[0]


def _halves(costs: PrefixCosts, start: int, stop: int) -> int:
    """How many of the first places make one half, by load."""
    cuts = np.arange(start + 1, stop)
    first = costs.spans(np.full(cuts.size, start), cuts)[LOAD]
    second = costs.spans(cuts, np.full(cuts.size, stop))[LOAD]
    return 1 + int(np.maximum(first, second).argmin())
