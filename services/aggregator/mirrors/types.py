"""What a mirror is, and what it gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """One optimizer step of the surviving line."""

    step: int
    at_s: float
    """About when it ended, in seconds since 1970."""
    values: Mapping[str, float]
    """By key, by each metric's default reduction; what is absent is not in it."""


class Mirror(Protocol):
    """A tracker that is fed. Calls block, and come from one thread at a time; steps ascend."""

    name: str
    """In the store and in logs."""

    def open(self, *, began: int, step: int) -> None:
        """Go on with `step`: what was written from it on is superseded.

        `began` is the attempt with which the steps went back last (or the first one): a tracker
        that cannot forget steps begins another run of its own with each.
        """
        ...

    def write(self, steps: Sequence[StepValues]) -> None:
        """Write steps; on return they are kept, as far as the tracker can promise that."""
        ...

    def close(self) -> None:
        """Finish; open() may follow."""
        ...
