"""What was said of one group: its states with their times and workers, merged in any order.

States rise: one that was said implies all lower ones, and the highest is the group's. Of each state
the first and the last statement are kept, so that repetition (a restarted trainer says again what
its checkpoint holds) and order change nothing.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.v1 import metrics_pb2 as wire

STATES: dict[int, str] = {
    number: name.removeprefix("GROUP_STATE_").lower()
    for name, number in wire.GroupState.items()
    if number
}
"""Names of the states of a group, in rising order."""

TRAINED, DROPPED = int(wire.GROUP_STATE_TRAINED), int(wire.GROUP_STATE_DROPPED)
GIVEN_UP, ROLLED_BACK = int(wire.GROUP_STATE_GIVEN_UP), int(wire.GROUP_STATE_ROLLED_BACK)

FIRST_TERMINAL = TRAINED
"""From this state on a group is in flight no more; only the trainer says so."""

TERMINAL = tuple(name for number, name in STATES.items() if number >= FIRST_TERMINAL)

TIME_DIGITS = 3
"""Of seconds: a statement's time is not known better than that."""


JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Said:
    """What was said of one state of a group. Times are seconds since 1970."""

    first_s: float
    first_worker: str
    last_s: float
    last_worker: str
    reason: str = ""
    step: int | None = None
    """Reason and step are those of the last statement."""

    @classmethod
    def once(cls, at_s: float, worker: str, *, reason: str = "", step: int | None = None) -> "Said":
        """One statement."""
        at_s = round(at_s, TIME_DIGITS)
        return cls(at_s, worker, at_s, worker, reason, step)

    def merged(self, other: "Said") -> "Said":
        """Both. Commutative, associative and idempotent.

        Example: said at 10 s by a and at 7 s by b is first said at 7 s by b, last at 10 s by a.
        """
        first = min((self.first_s, self.first_worker), (other.first_s, other.first_worker))
        last = max(self, other, key=_last)
        return Said(*first, last.last_s, last.last_worker, last.reason, last.step)


def _last(said: Said) -> tuple[float, str, str, int]:
    """By which the later of two statements is told; total, so that order does not show."""
    return (said.last_s, said.last_worker, said.reason, -1 if said.step is None else said.step)


History = Mapping[int, Said]
"""By state."""


def merge(history: History, others: Iterable[tuple[int, Said]]) -> dict[int, Said]:
    """A history with more that was said."""
    merged = dict(history)
    for state, said in others:
        known = merged.get(state)
        merged[state] = said if known is None else known.merged(said)
    return merged


def highest(history: History) -> tuple[int, str]:
    """The state of a group, with its reason."""
    state = max(history)
    return state, history[state].reason


def trained_step(history: History) -> int | None:
    """The optimizer step that trained a group, also where that was rolled back."""
    for state in (TRAINED, ROLLED_BACK):
        if state in history and history[state].step is not None:
            return history[state].step
    return None


def encode(history: History) -> str:
    """A history as it is stored: JSON, the workers' names and then, by state,
    [state, first_s, first worker's index, last_s, last worker's index, reason, step], without what
    is at the end and says nothing new.
    """
    names: dict[str, int] = {}
    entries = []
    for state, said in sorted(history.items()):
        first = names.setdefault(said.first_worker, len(names))
        last = names.setdefault(said.last_worker, len(names))
        entry: list[object] = [state, said.first_s, first, said.last_s, last]
        entry += [said.reason, said.step]
        keep = 7 if said.step is not None else 6 if said.reason else 5
        if keep == 5 and (said.last_s, last) == (said.first_s, first):
            keep = 3
        entries.append(entry[:keep])
    return JSON.encode([[*names], entries])


def decode(text: str) -> dict[int, Said]:
    """The history that encode() stored."""
    names, entries = json.loads(text)
    history = {}
    for state, first_s, first, *rest in entries:
        last_s, last = rest[:2] or (first_s, first)
        reason = rest[2] if len(rest) > 2 else ""
        step = rest[3] if len(rest) > 3 else None
        history[state] = Said(first_s, names[first], last_s, names[last], reason, step)
    return history
