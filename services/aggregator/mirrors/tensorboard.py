"""TensorBoard event files in a folder: one file for each time that writing begins.

A file begins with the step that follows, and readers then forget what earlier files say from it
on: steps that a restart of the trainer makes again, and steps that were written but not noted when
the aggregator died, are there once.
"""

import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from services.aggregator.mirrors.event_file import (
    frame,
    scalars_event,
    start_event,
    version_event,
)
from services.aggregator.mirrors.types import StepValues

FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\..*")


class TensorBoard:
    """Event files in `folder`, which is made with the first of them."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def open(self, *, began: int, step: int) -> None:
        """Begin a file; `began` is of no use here. Raises OSError."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        found = (FILE.fullmatch(path.name) for path in self._folder.iterdir())
        # Files are read in the order of their names.
        newest_s = max((int(each.group(1)) for each in found if each is not None), default=0)
        begun_s = max(int(time.time()), newest_s + 1)
        name = f"events.out.tfevents.{begun_s:010d}.{socket.gethostname()}.{os.getpid()}.headrace"
        self._file = (self._folder / name).open("xb")
        self._write(version_event(at_s=begun_s), start_event(step=step, at_s=begun_s))

    def write(self, steps: Sequence[StepValues]) -> None:
        """Write steps, on the disk when it returns. Raises OSError."""
        self._write(*(scalars_event(each.values, step=each.step, at_s=each.at_s) for each in steps))

    def close(self) -> None:
        """End the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, *events: bytes) -> None:
        assert self._file is not None, "open() comes first"
        self._file.write(b"".join(map(frame, events)))
        self._file.flush()
        os.fsync(self._file.fileno())
