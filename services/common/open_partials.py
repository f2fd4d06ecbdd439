"""What a process has measured since its last batch: calls noted as they come, added up together.

To note a call is to append it to a list, without a lock. To add up a few hundred notes at a time,
those of a series together, costs less than to do it one by one between the pieces of the work that
is measured, which has other things in the processor's caches. A note bears the clock and the moment
of its call, so the result is the same.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from services.common.partials import Count, Observation, Ratio

SeriesKey = tuple[str, int, int]
"""(key, attempt, step)."""

NOTES_AT_MOST = 512
"""When so many wait, whoever brings the last adds them up: in a fraction of a millisecond."""

Note = tuple[tuple[str | tuple[str, ...], int, int], type[Any], float, Any, float]
"""(series, kind, monotonic time, value, denominator): a count's and a ratio's numbers are finite;
an observation's is any number or a list of them, not empty. A series of several keys is several,
of the same observations."""


@dataclass(slots=True)
class Open:
    """A partial, and the monotonic times of its first and its last call."""

    partial: Any
    begin_s: float
    end_s: float

    def merge(self, later: "Open") -> None:
        """Add what another one of the same series has."""
        self.partial.merge(later.partial)
        self.begin_s = min(self.begin_s, later.begin_s)
        self.end_s = max(self.end_s, later.end_s)


class OpenPartials:
    """Any thread may append to `notes`; for all else the owner holds a lock.

    `kinds` are the instruments of keys that are known from the start. A key has one instrument for
    ever: `refuse(key, why)` is called, under the lock, for a note that has another.
    """

    def __init__(self, *, kinds: dict[str, type[Any]], refuse: Callable[[str, str], None]) -> None:
        self.notes: deque[Note] = deque()
        self._kinds, self._refuse = kinds, refuse
        self._items: dict[SeriesKey, Open] = {}

    def add_up(self) -> dict[SeriesKey, Open]:
        """All partials, with what has been noted so far."""
        grouped: dict[tuple[Any, type[Any]], list[Note]] = {}
        for _ in range(len(self.notes)):  # others go on noting
            note = self.notes.popleft()
            try:
                grouped.setdefault(note[:2], []).append(note)
            except TypeError:  # what cannot be hashed is neither a key nor a step
                self._refuse(str(note[0][0]), f"no series: {note[0]}")
        for (series, kind), notes in grouped.items():
            if isinstance(series[0], tuple):
                self._add_to_each(series, notes)
            else:
                self._add(series, kind, notes)
        return self._items

    def _add(self, series: SeriesKey, kind: type[Any], notes: list[Note]) -> None:
        # A moment was before the note was made: another thread's may come first and be later.
        moments = [note[2] for note in notes]
        found = self.partial(series, kind, min(moments), max(moments), len(notes))
        if found is None:
            return
        if kind is Count:
            found.total.add_many([note[3] for note in notes])
        elif kind is Ratio:
            found.over.add_many([note[3] for note in notes])
            found.under.add_many([note[4] for note in notes])
        else:
            for moment_s, values in _values(notes):
                found.add_many(values, moment_s)

    def _add_to_each(self, series: tuple[tuple[str, ...], int, int], notes: list[Note]) -> None:
        """Observations that several keys share: brought together once."""
        moments = [note[2] for note in notes]
        seen = Observation()
        for moment_s, values in _values(notes):
            seen.add_many(values, moment_s)
        keys, attempt, step = series
        for key in keys:
            place = (key, attempt, step)
            found = self.partial(place, Observation, min(moments), max(moments), len(notes))
            if found is not None:
                found.merge(seen)

    def take(self) -> dict[SeriesKey, Open]:
        """The same, and begin anew."""
        taken = self.add_up()
        self._items = {}
        return taken

    def partial(
        self, series: SeriesKey, kind: type[Any], begin_s: float, end_s: float, calls: int = 1
    ) -> Any:
        """The open partial of a series, or None when its key has another instrument."""
        found = self._items.get(series)
        known = self._kinds.setdefault(series[0], kind) if found is None else type(found.partial)
        if known is not kind:
            for _ in range(calls):
                self._refuse(series[0], f"recorded as {known.__name__} and as {kind.__name__}")
            return None
        if found is None:
            found = self._items[series] = Open(kind(), begin_s, end_s)
        else:
            found.begin_s, found.end_s = min(found.begin_s, begin_s), max(found.end_s, end_s)
        return found.partial

    @property
    def empty(self) -> bool:
        """Whether nothing has been recorded since the last `take()`."""
        return not self._items and not self.notes


def _values(notes: list[Note]) -> Iterator[tuple[float, list[float]]]:
    """The values of notes in their order, with their moment: all together with the last one's, but
    each note for itself where some are not finite, so that the last finite one keeps its moment.
    """
    lists = [value if isinstance(value, list) else [value] for *_, value, _ in notes]
    every = list(itertools.chain.from_iterable(lists))
    if all(map(math.isfinite, every)):
        yield notes[-1][2], every
    else:
        yield from zip([note[2] for note in notes], lists, strict=True)
