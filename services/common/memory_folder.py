"""Folders in memory-backed storage, for weights on their way; those of dead processes are removed.

A process that is killed cannot remove its own. Each folder therefore holds a file that its owner
keeps locked, and whoever makes the next folder removes those that nobody holds any more. The lock
ends with the process, whatever ends it.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
"""Memory-backed storage on Linux; elsewhere the folder for temporary files serves."""

LOCK = ".owner"
"""The locked file."""


class MemoryFolder:
    """A fresh folder of this process, `headrace-KIND-…`; `close()` removes it."""

    def __init__(self, kind: str, *, root: Path | None = None) -> None:
        if root is None:
            root = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
        prefix = f"headrace-{kind}-"
        _sweep(root, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove the folder and all in it; safe to call again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep(root: Path, prefix: str) -> None:
    """Remove the folders whose owners are gone; one that is not ours to open is left alone."""
    for folder in root.glob(f"{prefix}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:
            continue  # just being made, being removed, or another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
