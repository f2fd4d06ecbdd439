"""Which prompt is due next, and what became of each group. Pure: knows no queue and no clock.

Identity is given here: `group_id = epoch.ordinal.attempt.try`, where the ordinal is a prompt's
place in its epoch's order. A dropped group makes its prompt due again, within limits by reason;
beyond them the prompt is given up. So in one lineage of weights every prompt of every epoch is
trained once, or listed as given up.

The book outlives its trainer: `state()` goes into checkpoints, the journal's records bring it up to
the end of the attempt that died, and `adopt()` takes over groups that are still under way.
"""

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from services.trainer.done import DoneSet, Prompt

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

GROUP_ID = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+)")
"""epoch.ordinal.attempt.try."""


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
    worth of steps, whichever comes first; groups that a step had beyond its seats do not count.
    `state` is that of an earlier attempt's checkpoint.

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
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._order = lru_cache(maxsize=4)(order)
        self.attempt = attempt
        """Of the groups dispatched from now on."""
        self._num_rows = num_rows
        # 1.1 epochs of 10 rows are 11 prompts: floating point must not make them 12.
        self._num_prompts = None if epochs is None else math.ceil(round(epochs * num_rows, 9))
        self._max_groups = max_groups
        self._limit = {"failed": max_tries, "stale": max_stale_tries}
        state = state or {}
        self._next: int = state.get("next", 0)
        self._due: deque[Prompt] = deque()
        self._dispatches: Counter[Prompt] = Counter()
        self._drops: Counter[tuple[Prompt, str]] = Counter(
            {((epoch, row), kind): count for epoch, row, kind, count in state.get("tries", ())}
        )
        self._done = DoneSet(state.get("done"))
        self._lost: dict[Prompt, Ticket] = {}
        """The group that was lost last of each due prompt."""
        self.open_before: set[str] = set(state.get("outstanding", ()))
        """Groups of earlier attempts of which nobody has said yet what becomes of them."""
        self.outstanding: dict[str, Ticket] = {}
        self.dispatched: int = state.get("dispatched", 0)
        self.trained: int = state.get("trained", 0)
        self.rolled_back: int = state.get("rolled_back", 0)
        self.given_up: int = state.get("given_up", 0)
        self.dropped: Counter[str] = Counter(state.get("dropped", {}))
        self.refilled: int = state.get("refilled", 0)
        """Of the trained groups, those beyond the seats of their steps (`trainer.refill`)."""
        self.refilling = 0
        """Of the open step, groups beyond its seats: it may have as many, and a run as many more
        groups."""
        self.trained_twice: int = state.get("trained_twice", 0)
        """Prompts trained more than once in this lineage: always 0, and counted to show it."""

    @property
    def remaining(self) -> int | None:
        """Groups that training still needs; None without an end in sight (never: a recipe names
        one)."""
        by_groups = None
        if self._max_groups is not None:
            by_groups = self._max_groups + self.refilled + self.refilling - self.trained
        if self._num_prompts is None:
            return None if by_groups is None else max(0, by_groups)
        by_prompts = self._num_prompts - len(self._done)
        return max(0, by_prompts if by_groups is None else min(by_groups, by_prompts))

    def next_ticket(self) -> Ticket | None:
        """Dispatch the next due prompt: retried ones first. None when enough is under way or
        nothing is left."""
        remaining = self.remaining
        if remaining is not None and len(self.outstanding) >= remaining:
            return None
        if self._due:
            prompt = self._due.popleft()
            self._lost.pop(prompt, None)
        elif self._num_prompts is None or self._next < self._num_prompts:
            prompt = divmod(self._next, self._num_rows)
            self._next += 1
        else:
            return None
        epoch, ordinal = prompt
        group_id = f"{epoch}.{ordinal}.{self.attempt}.{self._dispatches[prompt]}"
        ticket = self._ticket(group_id, prompt)
        self._dispatches[prompt] += 1
        self.outstanding[group_id] = ticket
        self.dispatched += 1
        return ticket

    def train(self, group_id: str) -> Ticket:
        """The group's step is done."""
        ticket = self.outstanding.pop(group_id)
        self.trained_twice += not self._done.add(ticket.prompt)
        self.trained += 1
        self._forget(ticket.prompt)
        return ticket

    def step_ended(self, num_groups: int, *, seats: int) -> None:
        """A step has used so many groups, instead of those for which it had seats."""
        self.refilled += max(0, num_groups - seats)
        self.refilling = 0

    def drop(self, group_id: str, reason: str) -> bool:
        """The group is not used. True when its prompt is given up with it, else it is due again
        (or needs no other)."""
        ticket = self.outstanding.pop(group_id)
        if self._count_drop(ticket.prompt, reason):
            return True
        if reason == "lost":
            self._lost[ticket.prompt] = ticket
        if reason not in FINAL_REASONS:
            self._due.append(ticket.prompt)
        return False

    def balances(self) -> bool:
        """dispatched = trained + rolled back + dropped + given up + in flight."""
        settled = self.trained + self.rolled_back + self.dropped.total() + self.given_up
        in_flight = len(self.outstanding) + len(self.open_before)
        return self.dispatched == settled + in_flight

    # -- over attempts

    def state(self) -> dict[str, Any]:
        """All that a later attempt needs, as JSON holds it."""
        return {
            "num_rows": self._num_rows,
            "next": self._next,
            "done": self._done.state(),
            "tries": [[*prompt, kind, count] for (prompt, kind), count in self._drops.items()],
            "outstanding": sorted(self.outstanding),
            "dispatched": self.dispatched,
            "trained": self.trained,
            "refilled": self.refilled,
            "rolled_back": self.rolled_back,
            "given_up": self.given_up,
            "dropped": dict(self.dropped),
            "trained_twice": self.trained_twice,
        }

    def replay(self, kind: str, group_id: str, reason: str = "") -> None:
        """Take one record that the journal has behind the restored checkpoint, in its order:
        "dispatched", "trained" (the step is lost with its weights), "dropped", "given_up" or
        "found"."""
        prompt = prompt_of(group_id)
        if kind == "dispatched":
            self.dispatched += 1
            self.open_before.add(group_id)
            self._next = max(self._next, prompt[0] * self._num_rows + prompt[1] + 1)
        elif kind == "found":
            self.dropped["lost"] -= 1
            self.open_before.add(group_id)
        else:
            self.open_before.discard(group_id)
            if kind == "trained":
                self.rolled_back += 1
            elif kind == "given_up":
                self.given_up += 1
                self._done.add(prompt)
                self._forget(prompt)
            else:
                # By whatever limit: the attempt that wrote it went on with this prompt.
                self.dropped[reason] += 1
                if limited := _limited(reason):
                    self._drops[prompt, limited] += 1

    def adopt(self, group_id: str) -> Literal["adopted", "duplicate", "settled"]:
        """Take over a group that the server holds for an earlier attempt, or say why not: its
        prompt is done or has another group.

        Of a group that was not open nothing more is said when its prompt is done: it was settled,
        and the server has gone back. Else a machine lost the line that told of it, and it counts as
        dispatched now.
        """
        known, prompt = group_id in self.open_before, prompt_of(group_id)
        self.open_before.discard(group_id)
        if prompt in self._done or any(t.prompt == prompt for t in self.outstanding.values()):
            self.dropped["duplicate"] += known
            return "duplicate" if known else "settled"
        self.dispatched += not known
        self.outstanding[group_id] = self._ticket(group_id, prompt)
        self._next = max(self._next, prompt[0] * self._num_rows + prompt[1] + 1)
        return "adopted"

    def close_before(self, group_id: str, reason: str) -> None:
        """A group of an earlier attempt is dropped, and not adopted; whose fault it was does not
        count."""
        self.open_before.discard(group_id)
        self.dropped[reason] += 1

    def make_due(self) -> None:
        """After the last adoption: all prompts that were reached and are neither done nor
        outstanding are due, in order."""
        under_way = {ticket.prompt for ticket in self.outstanding.values()}
        reached = self._next if self._num_prompts is None else min(self._next, self._num_prompts)
        missing = self._done.missing(first=reached, num_rows=self._num_rows)
        self._due = deque(prompt for prompt in missing if prompt not in under_way)

    def find_again(self, group_id: str) -> bool:
        """A group that was declared lost is on the server after all: it counts as never lost when
        its prompt still waits to be dispatched again, else it is not needed."""
        ticket = next((each for each in self._lost.values() if each.group_id == group_id), None)
        if ticket is None:
            return False
        self._due.remove(ticket.prompt)
        del self._lost[ticket.prompt]
        self.dropped["lost"] -= 1
        self.outstanding[group_id] = ticket
        return True

    def knows(self, group_id: str) -> bool:
        """Whether the id names a prompt of this run, and an attempt before this one."""
        found = GROUP_ID.fullmatch(group_id)
        if found is None or int(found[3]) >= self.attempt:
            return False
        number = int(found[1]) * self._num_rows + int(found[2])
        within = self._num_prompts is None or number < self._num_prompts
        return int(found[2]) < self._num_rows and within

    def _ticket(self, group_id: str, prompt: Prompt) -> Ticket:
        return Ticket(group_id, prompt, self._order(prompt[0])[prompt[1]])

    def _count_drop(self, prompt: Prompt, reason: str) -> bool:
        assert reason in REASONS, f"unknown drop reason {reason}"
        if limited := _limited(reason):
            self._drops[prompt, limited] += 1
            if self._drops[prompt, limited] >= self._limit[limited]:
                self.given_up += 1
                self._done.add(prompt)
                self._forget(prompt)
                return True
        self.dropped[reason] += 1
        return False

    def _forget(self, prompt: Prompt) -> None:
        """A prompt that is done needs no counts any more; a run of millions would keep them all."""
        for kind in self._limit:
            self._drops.pop((prompt, kind), None)
        self._dispatches.pop(prompt, None)


def prompt_of(group_id: str) -> Prompt:
    """(epoch, ordinal) of a group."""
    epoch, ordinal, _ = group_id.split(".", 2)
    return int(epoch), int(ordinal)


def _limited(reason: str) -> str:
    """Which limit of tries a reason counts against; "" for none."""
    return "stale" if reason in STALE_REASONS else "failed" if reason in FAILED_REASONS else ""
