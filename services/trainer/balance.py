"""A search for rows that fit the budgets, cut few prefixes and keep ranks from waiting for each
other. Pure numpy, deterministic.

Rows sorted by load form the micro-batches, `ranks` in each. The search takes a row (one beyond a
budget; else the heaviest or lightest of a micro-batch) and looks at every exchange of one of its
pieces, or none, for one of another row, or none. It takes the best, until all is good or no
exchange is better.
"""

import numpy as np

from services.trainer.assignment import Assignment, Budgets, Pieces
from services.trainer.prefix_costs import LOAD, SAMPLES, TOKENS, Floats
from services.trainer.trie import Ints

GOOD_BALANCE = 0.95
"""Load over `ranks` x the heaviest row's load, summed over micro-batches: the search ends there."""

MAX_PARTNERS = 64
"""Rows that a row exchanges pieces with."""

MAX_EXCHANGES = 300
"""Of one search."""

SOURCES_BEYOND = 3
"""Rows beyond a budget that are looked at for an exchange before the search gives up."""

EXCESS_WEIGHT = 5.0
"""What a whole budget, or a budget of repeated tokens, beyond what is allowed counts against the
load: in rows of mean load."""

FORBIDDEN_WEIGHT = 1e9
"""The same where all is within what is allowed: it stays so."""

LEAST_GAIN = 1e-4
"""Of an exchange, in rows of mean load: smaller ones are not worth the search."""

TRIES = 4
"""The best exchanges by the estimate, looked at exactly."""


class Balance:
    """One search, on an assignment that it changes."""

    def __init__(
        self, rows: Assignment, *, ranks: int, budgets: Budgets, allowed_tokens: float
    ) -> None:
        assert rows.num_rows % ranks == 0, "whole micro-batches only"
        self.rows, self._ranks, self._budgets = rows, ranks, budgets.amounts
        self._allowed_tokens = allowed_tokens

    def by_load(self) -> Ints:
        """[K, ranks] rows of every micro-batch, all from heaviest to lightest."""
        order: Ints = np.argsort(-self.rows.amounts[LOAD], kind="stable")
        blocks: Ints = order.reshape(-1, self._ranks)
        return blocks

    @property
    def cost(self) -> float:
        """The heaviest row's load, summed over micro-batches: what the step takes."""
        return float(self.rows.amounts[LOAD][self.by_load()[:, 0]].sum())

    @property
    def balance(self) -> float:
        """Part of the ranks' time in which they work, 1 at best."""
        return float(self.rows.amounts[LOAD].sum() / (self._ranks * self.cost))

    @property
    def fits(self) -> bool:
        """Whether every row is within the budgets."""
        return not self._beyond().size

    @property
    def repeats_little(self) -> bool:
        """Whether the rows forward no more tokens than allowed."""
        return bool(self.rows.amounts[TOKENS].sum() <= self._allowed_tokens)

    def improve(self) -> None:
        """Exchange pieces until all is good or nothing helps."""
        stuck: set[int] = set()
        for _ in range(MAX_EXCHANGES):
            beyond = self._beyond()
            good = self.repeats_little and self.balance >= GOOD_BALANCE
            if not beyond.size and good:
                return
            pieces = self.rows.pieces()
            # Rows for which nothing was found are looked at again when nothing else helps.
            for row in sorted(self._sources(beyond).tolist(), key=stuck.__contains__):
                if self._exchange(row, pieces):
                    stuck.discard(row)
                    break
                stuck.add(row)
            else:
                return

    def _beyond(self) -> Ints:
        """Rows beyond a budget, the worst first."""
        excess = (self.rows.amounts[:LOAD] / self._budgets).max(axis=0)
        worst: Ints = np.argsort(-excess, kind="stable")
        return worst[: int((excess > 1).sum())]

    def _sources(self, beyond: Ints) -> Ints:
        """Rows in the order in which to look for an exchange."""
        if beyond.size:
            return beyond[:SOURCES_BEYOND]
        blocks = self.by_load()
        if self._ranks == 1:
            return blocks[:, 0]
        loads = self.rows.amounts[LOAD][blocks]
        worst = np.argsort(loads.sum(axis=1) - self._ranks * loads[:, 0], kind="stable")
        return np.concatenate([blocks[worst, 0], blocks[worst, -1]])

    def _partners(self, source: int) -> Ints:
        """Other rows, at most MAX_PARTNERS: evenly spaced ones by load."""
        order = self.by_load().ravel()
        others = order[order != source]
        spaced: Ints = others[:: -(-others.size // MAX_PARTNERS) or 1]
        return spaced

    def _exchange(self, source: int, pieces: Pieces) -> bool:
        """Make the best exchange that this row can take part in; False if none is better."""
        rows, partners = self.rows, self._partners(source)
        own = pieces.take(np.flatnonzero(pieces.row == source)).after_none(np.array([source]))
        partner = np.zeros(rows.num_rows, np.bool_)
        partner[partners] = True
        others = pieces.take(np.flatnonzero(partner[pieces.row])).after_none(partners)
        if not others.row.size:
            return False
        gain, expected = self._gains(source, own, others, partners)
        # No row may be left empty.
        empties = own.alone[SAMPLES] == rows.amounts[SAMPLES, source]
        gain[empties, : partners.size] = -np.inf
        gain[0, others.alone[SAMPLES] == rows.amounts[SAMPLES, others.row]] = -np.inf
        for _ in range(TRIES):
            mine, theirs = divmod(int(gain.argmax()), gain.shape[1])
            if gain[mine, theirs] < LEAST_GAIN:
                return False
            row = int(others.row[theirs])
            row_of = rows.exchanged(
                (int(own.start[mine]), int(own.stop[mine]), source),
                (int(others.start[theirs]), int(others.stop[theirs]), row),
            )
            exact = sum(
                float(rows.costs.of_places(np.flatnonzero(row_of == each))[TOKENS])
                for each in (source, row)
            )
            if exact <= expected[mine, theirs]:
                rows.accept(row_of, (source, row))
                return True
            gain[mine, theirs] = -np.inf
        return False

    def _gains(
        self, source: int, own: Pieces, others: Pieces, partners: Ints
    ) -> tuple[Floats, Floats]:
        """[P, Q] by how much the objective falls with each exchange, and the tokens of both rows
        then. Estimates: what the two pieces share with each other counts as if both stayed.

        The objective is a smooth maximum of every micro-batch's loads, in mean rows, and what is
        beyond the budgets or the tokens allowed.
        """
        rows, amounts = self.rows, self.rows.amounts
        gained = rows.less_path(
            others.alone, rows.shared(others.start, others.stop, np.array(source))
        )
        shared = rows.shared(own.start[:, None], own.stop[:, None], partners)
        given_to = rows.less_path(own.alone[:, :, None], shared)
        column = np.empty(rows.num_rows, np.int64)
        column[partners] = np.arange(partners.size)
        column = column[others.row]

        def after(kind: int) -> tuple[Floats, Floats]:
            here = (amounts[kind, source] - own.taken[kind])[:, None] + gained[kind]
            there = (amounts[kind, others.row] - others.taken[kind]) + given_to[kind][:, column]
            return here, there

        change = self._load_change(source, others.row, *after(LOAD))
        here, there = after(TOKENS)
        tokens = here + there
        before = amounts[TOKENS, source] + amounts[TOKENS, others.row]
        spare = self._allowed_tokens - amounts[TOKENS].sum()
        repeated = np.maximum(tokens - (before + spare), 0) - max(0.0, -spare)
        weight = FORBIDDEN_WEIGHT if self.fits else EXCESS_WEIGHT
        change += repeated * ((weight if spare >= 0 else EXCESS_WEIGHT) / self._budgets[TOKENS, 0])
        for kind in range(LOAD):
            budget = self._budgets[kind, 0]
            if amounts[kind].max() + others.alone[kind].max() + own.alone[kind].max() <= budget:
                continue
            excess = np.maximum(amounts[kind] - budget, 0)
            here, there = (here, there) if kind == TOKENS else after(kind)
            beyond = np.maximum(here - budget, 0) + np.maximum(there - budget, 0)
            beyond -= excess[source] + excess[others.row]
            change += beyond * (weight / budget)
        return -change, tokens

    def _load_change(self, source: int, other: Ints, here: Floats, there: Floats) -> Floats:
        """[P, Q] of the smooth maxima, for loads of the two rows after an exchange."""
        load, blocks = self.rows.amounts[LOAD], self.by_load()
        block_of = np.empty(load.size, np.int64)
        block_of[blocks.ravel()] = np.arange(load.size) // self._ranks
        mean = load.mean()
        powers = _power8(load / mean)
        sums = powers[blocks].sum(axis=1)
        old = self._root8(sums)
        # Sums of the source's and of the other row's micro-batch without the two rows.
        same = block_of[other] == block_of[source]
        source_sum = sums[block_of[source]] - powers[source] - np.where(same, powers[other], 0)
        other_sum = sums[block_of[other]] - powers[other]
        here, there = _power8(here / mean), _power8(there / mean)
        change: Floats = (
            self._root8(source_sum + here + np.where(same, there, 0)) - old[block_of[source]]
        )
        apart = self._root8(other_sum + there) - old[block_of[other]]
        change += np.where(same, 0, apart)
        return change

    def _root8(self, power: Floats) -> Floats:
        """The smooth maximum of loads whose 8th powers sum to this: their 8-norm, by the mean."""
        root: Floats = np.sqrt(np.sqrt(np.sqrt(np.maximum(power, 0) / self._ranks)))
        return root


def _power8(load: Floats) -> Floats:
    square: Floats = load * load
    square *= square
    square *= square
    return square
