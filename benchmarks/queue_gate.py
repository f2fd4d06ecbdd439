"""The clock of one round: all parties are there and warm, then it runs from the first sample's way
in to the last one's way out."""

import time
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from typing import Any

LONGEST_S = 300.0
"""A party that does not come to the gate within this time has failed."""


@dataclass(frozen=True)
class Gate:
    """Shared by the processes of a round, of which one begins it and one ends it."""

    barrier: Any
    begun_s: Any
    ended_s: Any
    tokens: Any
    """How many have come out, so that nothing is lost unseen."""

    @classmethod
    def of(cls, context: SpawnContext, *, parties: int) -> "Gate":
        """A gate for so many processes."""
        return cls(
            context.Barrier(parties, timeout=LONGEST_S),
            context.Value("d", 0.0),
            context.Value("d", 0.0),
            context.Value("q", 0),
        )

    def wait(self) -> None:
        """Until all parties are here."""
        self.barrier.wait()

    def begin(self) -> None:
        """The first sample goes in. The monotonic clock is one for all processes of a host."""
        self.begun_s.value = time.monotonic()

    def end(self, *, num_tokens: int) -> None:
        """The last sample has come out."""
        self.ended_s.value = time.monotonic()
        self.tokens.value = num_tokens

    @property
    def elapsed_s(self) -> float:
        """Seconds from the one to the other."""
        return float(self.ended_s.value - self.begun_s.value)
