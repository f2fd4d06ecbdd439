"""What this process has made of the batches that it was sent, for its own health page.

Counted since it started and apart for every replica, as Prometheus expects; what was measured is in
the store.
"""

from collections import Counter
from typing import Literal

Outcome = Literal["taken", "duplicate", "refused", "failed"]
"""Committed; known already; without a name; not committed because the store failed."""

OUTCOMES: tuple[Outcome, ...] = ("taken", "duplicate", "refused", "failed")


class Intake:
    """Counts batches. Written by the event loop alone, read by any thread."""

    def __init__(self) -> None:
        self.batches: Counter[Outcome] = Counter()
        self.num_deltas_accepted = 0
        self.num_deltas_rejected = 0
        self.num_commits = 0
        self.commit_s = 0.0
        """Seconds from a batch's arrival until it was committed, added up over `num_commits`."""
        self.last_taken_s: float | None = None
        """When the last batch was taken, in seconds since 1970."""

    def took(
        self, *, duplicate: bool, accepted: int, rejected: int, commit_s: float, now_s: float
    ) -> None:
        """A batch was committed, or was known already."""
        self.batches["duplicate" if duplicate else "taken"] += 1
        self.num_deltas_accepted += accepted
        self.num_deltas_rejected += rejected
        self.num_commits += 1
        self.commit_s += commit_s
        self.last_taken_s = now_s

    def missed(self, outcome: Literal["refused", "failed"]) -> None:
        """A batch was not taken."""
        self.batches[outcome] += 1
