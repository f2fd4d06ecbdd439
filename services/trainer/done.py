"""Which prompts need no further group: trained, or given up."""

from collections.abc import Iterator, Mapping
from typing import Any

Prompt = tuple[int, int]
"""(epoch, ordinal)."""


class DoneSet:
    """By epoch a frontier, below which all are done, and the set of those done beyond it.

    It stays small: what is beyond the frontier is at most what was outstanding at once.

    Example: after ordinals 0, 1, 2 and 5 of epoch 0 its state is `{"0": [3, [5]]}`; 3 and 4 make it
    `{"0": [6, []]}`.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """Empty, or what `state()` gave."""
        self._frontier: dict[int, int] = {}
        self._beyond: dict[int, set[int]] = {}
        for epoch, (frontier, beyond) in (state or {}).items():
            self._frontier[int(epoch)] = frontier
            self._beyond[int(epoch)] = set(beyond)
        self._size = sum(self._frontier.values()) + sum(map(len, self._beyond.values()))

    def __len__(self) -> int:
        return self._size

    def __contains__(self, prompt: Prompt) -> bool:
        epoch, ordinal = prompt
        return ordinal < self.frontier(epoch) or ordinal in self._beyond.get(epoch, ())

    def frontier(self, epoch: int) -> int:
        """The first ordinal of an epoch that is not done."""
        return self._frontier.get(epoch, 0)

    def add(self, prompt: Prompt) -> bool:
        """Note a prompt as done; False when it was."""
        if prompt in self:
            return False
        epoch, ordinal = prompt
        beyond = self._beyond.setdefault(epoch, set())
        beyond.add(ordinal)
        frontier = self.frontier(epoch)
        while frontier in beyond:
            beyond.discard(frontier)
            frontier += 1
        self._frontier[epoch] = frontier
        self._size += 1
        return True

    def missing(self, *, first: int, num_rows: int) -> Iterator[Prompt]:
        """The prompts before number `first` (epochs of `num_rows` each) that are not done, in
        order."""
        for epoch in range(first // num_rows + 1):
            end = min(num_rows, first - epoch * num_rows)
            for ordinal in range(self.frontier(epoch), end):
                if (epoch, ordinal) not in self:
                    yield epoch, ordinal

    def state(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            str(epoch): [self._frontier[epoch], sorted(self._beyond[epoch])]
            for epoch in sorted(self._frontier)
        }
