"""Which prompt is due next, and what became of each group. Pure: knows no queue and no clock.

Identity is given here: `group_id = epoch.ordinal.attempt.try`, where the ordinal is a prompt's
place in its epoch's order. A dropped group makes its prompt due again, within limits by reason;
beyond them the prompt is given up. So in one lineage of weights every prompt of every epoch is
trained once, or listed as given up.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

STALE_REASONS = frozenset({"stale"})
"""Drops that count against max_stale_tries."""

FAILED_REASONS = frozenset({"failed", "unscored", "poison", "oversize", "no_trained_tokens"})
"""Drops that count against max_tries."""

FREE_REASONS = frozenset({"lost", "dead_lineage", "attempt_ended", "requeued"})
"""Drops that are nobody's fault: the prompt is due again without limit."""

FINAL_REASONS = frozenset({"duplicate", "run_ended"})
"""Drops after which the prompt is not due."""

REASONS = STALE_REASONS | FAILED_REASONS | FREE_REASONS | FINAL_REASONS
"""All that may be said of a drop."""

Prompt = tuple[int, int]
"""(epoch, ordinal)."""


@dataclass(frozen=True)
class Ticket:
    """One dispatch of one prompt."""

    group_id: str
    prompt: Prompt
    row: int
    """Position in the training rows."""


class Dispatcher:
    """The book of prompts of one attempt.

    `order(epoch)` is the permutation of rows of an epoch. The run ends after `epochs` passes
    (fractions in distinct prompts, rounded up) or when the trainer has made `max_groups` groups'
    worth of steps, whichever comes first.

    Example: 7 rows, 1.5 epochs: prompts (0, 0) to (0, 6), then (1, 0) to (1, 3): 11 in all.
    """

    def __init__(
        self,
        *,
        order: Callable[[int], Sequence[int]],
        num_rows: int,
        attempt: int,
        epochs: float | None,
        max_groups: int | None,
        max_tries: int,
        max_stale_tries: int,
    ) -> None:
        self._order = lru_cache(maxsize=4)(order)
        self._num_rows, self._attempt = num_rows, attempt
        # 1.1 epochs of 10 rows are 11 prompts: floating point must not make them 12.
        self._num_prompts = None if epochs is None else math.ceil(round(epochs * num_rows, 9))
        self._max_groups = max_groups
        self._limit = {"failed": max_tries, "stale": max_stale_tries}
        self._next = 0
        self._due: deque[Prompt] = deque()
        self._dispatches: Counter[Prompt] = Counter()
        self._drops: Counter[tuple[Prompt, str]] = Counter()
        self._trained_times: Counter[Prompt] = Counter()
        self.outstanding: dict[str, Ticket] = {}
        self.dispatched = 0
        self.trained = 0
        self.given_up = 0
        self.dropped: Counter[str] = Counter()

    @property
    def remaining(self) -> int | None:
        """Groups that training still needs; None without an end in sight (never: a recipe names
        one)."""
        by_groups = None if self._max_groups is None else self._max_groups - self.trained
        if self._num_prompts is None:
            return by_groups
        by_prompts = self._num_prompts - len(self._trained_times) - self.given_up
        return by_prompts if by_groups is None else min(by_groups, by_prompts)

    @property
    def trained_twice(self) -> int:
        """Prompts trained more than once in this lineage: always 0, and counted to show it."""
        return sum(times > 1 for times in self._trained_times.values())

    def next_ticket(self) -> Ticket | None:
        """Dispatch the next due prompt: retried ones first. None when enough is under way or
        nothing is left."""
        remaining = self.remaining
        if remaining is not None and len(self.outstanding) >= remaining:
            return None
        if self._due:
            prompt = self._due.popleft()
        elif self._num_prompts is None or self._next < self._num_prompts:
            prompt = divmod(self._next, self._num_rows)
            self._next += 1
        else:
            return None
        epoch, ordinal = prompt
        group_id = f"{epoch}.{ordinal}.{self._attempt}.{self._dispatches[prompt]}"
        ticket = Ticket(group_id, prompt, self._order(epoch)[ordinal])
        self._dispatches[prompt] += 1
        self.outstanding[group_id] = ticket
        self.dispatched += 1
        return ticket

    def train(self, group_id: str) -> Ticket:
        """The group's step is done."""
        ticket = self.outstanding.pop(group_id)
        self._trained_times[ticket.prompt] += 1
        self.trained += 1
        return ticket

    def drop(self, group_id: str, reason: str) -> bool:
        """The group is not used. True when its prompt is given up with it, else it is due again
        (or needs no other)."""
        ticket = self.outstanding.pop(group_id)
        kind = "stale" if reason in STALE_REASONS else "failed" if reason in FAILED_REASONS else ""
        assert reason in REASONS, f"unknown drop reason {reason}"
        if kind:
            self._drops[ticket.prompt, kind] += 1
            if self._drops[ticket.prompt, kind] >= self._limit[kind]:
                self.given_up += 1
                return True
        self.dropped[reason] += 1
        if reason not in FINAL_REASONS:
            self._due.append(ticket.prompt)
        return False

    def balances(self) -> bool:
        """dispatched = trained + dropped + given up + in flight."""
        settled = self.trained + self.dropped.total() + self.given_up
        return self.dispatched == settled + len(self.outstanding)
