"""Which samples share a row, and which rows a micro-batch: pure functions of the samples at hand.

A row is filled by the tokens that it makes the model forward, each shared prefix once, and by its
trained tokens (which bound the logits). Ranks forward a row each and wait for the slowest at every
micro-batch, so its rows are of similar load. A group shares its prompt and stays together where
that costs little; it is cut along its trie where it exceeds a row, or where a cut saves more than
the prompt forwarded again.

Few full micro-batches, few tokens forwarded twice and balanced rows are at odds, so the planner
searches (balance.py): for the smallest number of micro-batches at which all three are good.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.trainer.assignment import Assignment, Budgets
from services.trainer.balance import Balance
from services.trainer.load import Load
from services.trainer.prefix_costs import LOAD, TOKENS, Floats, PrefixCosts
from services.trainer.ready import full_rows
from services.trainer.starts import needed_tokens, starts, units
from services.trainer.types import TrainSample

ALLOWED_DUPLICATION = 1.05
"""Forwarded over unique tokens that are good enough. Where samples fit their rows only with more,
or there would be more ranks than rows, it is more."""

ALLOWED_BALANCE = 0.9
"""Load over ranks x heaviest load that is good enough; with less, more micro-batches are tried."""

ALLOWED_MICROBATCHES = 1.15
"""Times the least possible number, rounded up: more are only taken if nothing less fits."""

NUMBERS_TRIED = 6
"""Numbers of micro-batches tried up to that one, at most."""

TOKENS_ONLY = Load(per_token=1.0)
"""Load of a row where nothing is said of the model."""


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

    def renumbered(self, indices: Sequence[int]) -> "Plan":
        """The same plan for another list of samples, in which sample i is at `indices[i]`.

        Example: a plan of samples 0 and 1 for `[4, 7]` is one of samples 4 and 7.
        """
        return replace(
            self,
            microbatches=[
                [replace(row, samples=[indices[i] for i in row.samples]) for row in microbatch]
                for microbatch in self.microbatches
            ],
            oversize=[indices[i] for i in self.oversize],
        )


def plan(
    samples: Sequence[TrainSample],
    *,
    token_budget: int,
    trained_token_budget: int,
    ranks: int = 1,
    load: Load = TOKENS_ONLY,
    share_prefixes: bool = True,
    samples_per_row: int | None = None,
) -> Plan:
    """Rows for all of the samples, `ranks` in every micro-batch, the heaviest micro-batch first.

    No row is empty, and all are within both budgets. Echoes are there only if the samples are fewer
    than the rows of as many micro-batches as the budgets make necessary: fewer than `ranks`, or so
    large that almost every one needs a row of its own. Without `share_prefixes` the model forwards
    every sample whole, and costs are counted so.

    With `samples_per_row` a row has at most so many samples, and micro-batches are as few as that
    makes them: the number of samples in a row is what is fixed. A row has fewer where the numbers
    do not divide, or where it would be beyond a budget: those bound memory, and hold here too.
    Example: 16 samples, 2 ranks, 4 samples a row: 2 micro-batches, every row with 4 samples. With
    15 samples one row has 3.

    Example: a prompt of 75 tokens with 16 completions of 3 tokens, all different from the first on,
    costs 75 + 16 x 2 = 107 tokens (the last token of a sample is a target only) and 48 trained
    tokens. For two ranks it is cut into two rows of 75 + 8 x 2 = 91 tokens.
    """
    budgets = Budgets(token_budget, trained_token_budget, samples_per_row)
    fitting, oversize = _fitting(samples, budgets)
    if not fitting:
        return Plan([], oversize, 0)
    chosen = [samples[index] for index in fitting]
    costs = PrefixCosts.of(chosen, load, share_prefixes=share_prefixes)
    return Plan(_microbatches(costs, fitting, budgets, ranks), oversize, costs.unique_tokens)


def plan_ready(
    samples: Sequence[TrainSample],
    *,
    token_budget: int,
    trained_token_budget: int,
    ranks: int = 1,
    load: Load = TOKENS_ONLY,
    share_prefixes: bool = True,
    samples_per_row: int | None = None,
) -> tuple[Plan, list[int]]:
    """While more samples are to come: micro-batches that are as good as they would be later, and
    the indices of the samples kept for later, rising.

    Every row of such a micro-batch is filled to READY_FILL of a budget, about, and they are
    balanced. With several ranks at least as many samples are kept: more may not come, or too few,
    and the last micro-batch of the step would need echoes. Once all are there, `plan` makes rows of
    the rest. Samples beyond a budget are in the plan's `oversize` at once and not kept. `merge`
    adds the plans of a step up.

    Example: one rank, budgets of 100, four samples of 45 tokens that share nothing: two of them
    make a row of 90 tokens, and the other two another one. With three samples one is kept.
    """
    budgets = Budgets(token_budget, trained_token_budget, samples_per_row)
    fitting, oversize = _fitting(samples, budgets)
    ready: list[list[PlannedRow]] = []
    if fitting:
        chosen = [samples[index] for index in fitting]
        costs = PrefixCosts.of(chosen, load, share_prefixes=share_prefixes)
        ready = _ready(costs, fitting, budgets, ranks)
    placed = {index for microbatch in ready for row in microbatch for index in row.samples}
    rest = [index for index in fitting if index not in placed]
    return merge(samples, [Plan(ready, oversize, 0)]), rest


def merge(samples: Sequence[TrainSample], plans: Sequence[Plan]) -> Plan:
    """One plan of several that are of different samples of one list: all micro-batches, and the
    unique tokens of all that is placed.

    Example: two plans of 60 unique tokens each, 20 of them the same prompt: 100 unique tokens and
    120 forwarded, a duplication of 1.2.
    """
    found = Plan(
        microbatches=[microbatch for plan in plans for microbatch in plan.microbatches],
        oversize=[index for plan in plans for index in plan.oversize],
        unique_tokens=0,
    )
    placed = sorted({index for row in found.rows for index in row.samples})
    costs = PrefixCosts.of([samples[index] for index in placed], TOKENS_ONLY)
    return replace(found, unique_tokens=costs.unique_tokens)


def _microbatches(
    costs: PrefixCosts, indices: Sequence[int], budgets: Budgets, ranks: int
) -> list[list[PlannedRow]]:
    """The fewest that are good; else, of those within ALLOWED_MICROBATCHES, the ones of least cost;
    else the first that fit."""
    found: Balance | None = None
    least = _least(costs, budgets, ranks)
    most = math.ceil(ALLOWED_MICROBATCHES * least)
    step = max(1, (most - least) // (NUMBERS_TRIED - 1))
    # From one sample a row on there is nothing to search for.
    for number in range(least, -(-costs.num_samples // ranks), step):
        other = _search(costs, number, budgets, ranks)
        if other is not None and (found is None or _is_good(other) or other.cost < found.cost):
            found = other
        if found is not None and (_is_good(found) or number >= most):
            return _planned(found, indices)
    return _planned(found, indices) if found is not None else _one_each(costs, indices, ranks)


def _least(costs: PrefixCosts, budgets: Budgets, ranks: int) -> int:
    """Micro-batches that there are at least, by the budgets."""
    start, _ = units(costs, budgets)
    common = costs.common_tokens
    own = (needed_tokens(costs, start, 1) - common) / max(1, budgets.tokens - common)
    trained = int(costs.trained.sum()) / budgets.trained_tokens
    samples = costs.num_samples / (budgets.samples or math.inf)
    return max(1, math.ceil(max(own, trained, samples) / ranks))


def _search(costs: PrefixCosts, number: int, budgets: Budgets, ranks: int) -> Balance | None:
    """So many micro-batches within the budgets; None where none was found."""
    num_rows = number * ranks
    found: Balance | None = None
    for row_of, needed in starts(costs, num_rows, budgets):
        other = Balance(
            Assignment(costs, row_of, num_rows),
            ranks=ranks,
            budgets=budgets,
            allowed_tokens=ALLOWED_DUPLICATION * needed,
        )
        other.improve()
        if other.fits and (found is None or other.cost < found.cost):
            found = other
    return found


def _is_good(found: Balance) -> bool:
    return found.repeats_little and found.balance >= ALLOWED_BALANCE


def _planned(found: Balance, indices: Sequence[int]) -> list[list[PlannedRow]]:
    """The micro-batches found, for samples that are at `indices` of another list."""
    rows = found.rows

    def planned(row: int) -> PlannedRow:
        return PlannedRow(
            samples=sorted(indices[at] for at in rows.costs.order.order[rows.places(row)].tolist()),
            tokens=int(rows.amounts[TOKENS, row]),
            load=float(rows.amounts[LOAD, row]),
        )

    return [[planned(row) for row in block] for block in found.by_load().tolist()]


def _one_each(costs: PrefixCosts, indices: Sequence[int], ranks: int) -> list[list[PlannedRow]]:
    """A row for every sample, and echoes of the cheapest one for the ranks left over."""
    amounts = costs.spans(np.arange(costs.num_samples), np.arange(1, costs.num_samples + 1))
    rows = [
        PlannedRow(
            samples=[indices[int(costs.order.order[place])]],
            tokens=int(amounts[TOKENS, place]),
            load=float(amounts[LOAD, place]),
        )
        for place in np.argsort(-amounts[LOAD], kind="stable").tolist()
    ]
    rows += [replace(rows[-1], echo=True)] * (-len(rows) % ranks)
    return [rows[first : first + ranks] for first in range(0, len(rows), ranks)]


def _fitting(samples: Sequence[TrainSample], budgets: Budgets) -> tuple[list[int], list[int]]:
    """Indices of those that fit a row, and of those that do not."""
    fits = [
        sample.num_context <= budgets.tokens and sample.num_trained <= budgets.trained_tokens
        for sample in samples
    ]
    fitting = [index for index, fit in enumerate(fits) if fit]
    return fitting, [index for index, fit in enumerate(fits) if not fit]


def _ready(
    costs: PrefixCosts, indices: Sequence[int], budgets: Budgets, ranks: int
) -> list[list[PlannedRow]]:
    """Micro-batches of full rows, balanced, for samples that are at `indices` of another list."""
    rows = full_rows(costs, budgets, at_least=ranks)
    loads = np.array([costs.of_places(places)[LOAD] for places in rows])
    heaviest = np.argsort(-loads, kind="stable")
    first = _first_of_balanced(loads[heaviest], ranks)
    chosen = [rows[at] for start in first for at in heaviest[start : start + ranks].tolist()]
    kept = ranks if ranks > 1 else 0
    while chosen and sum(places.size for places in chosen) > costs.num_samples - kept:
        chosen = chosen[:-ranks]
    if not chosen:
        return []
    row_of = np.full(costs.num_samples, -1)
    for row, places in enumerate(chosen):
        row_of[places] = row
    taken = np.flatnonzero(row_of >= 0)
    assignment = Assignment(costs.subset(taken), row_of[taken], len(chosen))
    tokens = float(assignment.amounts[TOKENS].sum())
    found = Balance(assignment, ranks=ranks, budgets=budgets, allowed_tokens=tokens)
    found.improve()
    assert found.fits, "rows that fit are only exchanged for such"
    return _planned(found, indices)


def _first_of_balanced(loads: Floats, ranks: int) -> list[int]:
    """Where micro-batches start in falling loads, so that each is balanced.

    Example: loads 9, 5, 5, 4 and two ranks: [1], since 9 and 5 would be half idle, and 4 is left.
    """
    found: list[int] = []
    first = 0
    while first + ranks <= loads.size:
        of_ranks = loads[first : first + ranks]
        balanced = bool(of_ranks.mean() >= ALLOWED_BALANCE * of_ranks[0])
        found += [first] * balanced
        first += ranks if balanced else 1
    return found
