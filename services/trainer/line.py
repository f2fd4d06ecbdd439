"""The policy versions that the present weights come from: the surviving line.

An attempt that restores a checkpoint leaves behind the versions that were published after it. Their
numbers are used, their weights are in no line that goes on, and groups made with them cannot be
trained on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Made:
    """One version of the line."""

    step: int
    """Optimizer steps applied."""
    publishes: int
    """Its place: publishes along the line up to it. Weights published again stay at theirs."""
    sha256: str
    """Of its file."""


class VersionLine:
    """The versions of the line by number, oldest first.

    Example: versions 9 and 10 of steps 8 and 9; 11 and 12 came after the checkpoint, so the
    restored weights of 10 are 13, and the next step's 14. A group of version 9 is two publishes
    behind 14, not five: 9 -> 10 = 13 -> 14.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """Empty, or what `state()` gave."""
        self._made = {int(version): Made(*made) for version, made in (state or {}).items()}
        self.step_of = {version: made.step for version, made in self._made.items()}
        """Optimizer steps applied behind each version."""
        self.publishes_of = {version: made.publishes for version, made in self._made.items()}
        """Place of each version in the line."""

    @property
    def current(self) -> int:
        """The newest version; 0 before the first."""
        return max(self._made, default=0)

    def __contains__(self, version: int) -> bool:
        return version in self._made

    def __getitem__(self, version: int) -> Made:
        return self._made[version]

    def add(self, version: int, *, step: int, sha256: str, same_weights: bool = False) -> Made:
        """Go on to `version`; `same_weights` are those of the current one under another number."""
        publishes = self.publishes_of.get(self.current, 0)
        made = Made(step, publishes if same_weights else publishes + 1, sha256)
        self._made[version] = made
        self.step_of[version], self.publishes_of[version] = made.step, made.publishes
        return made

    def state(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            str(version): [made.step, made.publishes, made.sha256]
            for version, made in self._made.items()
        }
