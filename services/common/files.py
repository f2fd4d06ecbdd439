"""Files and folders, durably and checked."""

import hashlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's entries: files made or renamed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Of a file's content, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
