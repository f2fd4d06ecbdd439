"""Attempts of a run by files that are made once: which one comes next, and whether one is the last.

`checkpoints/attempts/N` is made, durably, before anything of attempt N is dispatched, so a number
never repeats, also when the queue server has lost everything.
"""

import os
from pathlib import Path

from services.common.errors import Fenced
from services.common.files import sync


class Attempts:
    """The attempts that were begun in one run's checkpoints folder."""

    def __init__(self, checkpoints: Path) -> None:
        self._folder = checkpoints / "attempts"

    def highest(self) -> int:
        """The last attempt begun; 0 before the first."""
        if not self._folder.is_dir():
            return 0
        return max((int(p.name) for p in self._folder.iterdir() if p.name.isdigit()), default=0)

    def begin(self, attempt: int) -> None:
        """Make an attempt's file, durably. Raises Fenced when another trainer has."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self._folder / str(attempt), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            raise Fenced(f"attempt {attempt} was begun by another trainer; this one ends") from None
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync(self._folder)

    def check_last(self, attempt: int) -> None:
        """Raises Fenced when a newer attempt has begun: its checkpoints are the run's now."""
        highest = self.highest()
        if highest > attempt:
            raise Fenced(f"attempt {attempt} was replaced by attempt {highest}; this one ends")
