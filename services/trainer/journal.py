"""What became of groups since a checkpoint, line by line: what a trainer that is killed leaves.

    checkpoints/journal/ATTEMPT-STEP.jsonl     ["trained","0.17.1.0","",120]

A file is begun at every start and with every checkpoint, at the very moment whose state the
checkpoint holds; its name is that moment. So behind the checkpoint of attempt a at step s come all
files from a-s on. A line is written after the queue server has taken the group's settlement and
before anybody hears of it: what the ledger was told is in the journal, or in a checkpoint.

Lines reach the kernel at once and survive the death of the process; a machine that loses power may
lose the last of them.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

NAME = re.compile(r"(\d+)-(\d+)\.jsonl")

Moment = tuple[int, int]
"""(attempt, step): checkpoints and journal files are in this order."""


@dataclass(frozen=True)
class Record:
    """What happened to one group."""

    kind: str
    """"dispatched", "trained", "dropped", "given_up", "found" (lost, and there after all); in
    checkpoints also "rolled_back"."""
    group_id: str
    reason: str = ""
    step: int = 0
    """That trained it."""

    def line(self) -> list[str | int]:
        """As JSON holds it."""
        return [self.kind, self.group_id, self.reason, self.step]

    @property
    def terminal(self) -> bool:
        """Whether it is a group's end."""
        return self.kind not in ("dispatched", "found")


class Journal:
    """The open file. On a full disk lines wait in memory for room."""

    def __init__(self, folder: Path, *, moment: Moment) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._waiting = b""
        self._told = False
        self._descriptor = -1
        self.rotate(moment)

    def rotate(self, moment: Moment) -> None:
        """Go on in the file of `moment`. Raises OSError when it cannot be made, and goes on in the
        present one."""
        path = self._folder / f"{moment[0]}-{moment[1]}.jsonl"
        fresh = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        if self._descriptor >= 0:
            self._flush()
            os.close(self._descriptor)
        # Lines that found no room belong to the moment before: in this file they would count twice.
        self._descriptor, self._waiting = fresh, b""

    def write(self, record: Record) -> None:
        """Add a line."""
        self._waiting += json.dumps(record.line(), separators=(",", ":")).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        while self._waiting:
            try:
                written = os.write(self._descriptor, self._waiting)
            except OSError as error:
                if not self._told:
                    structlog.get_logger().error(
                        "the journal cannot be written: should the trainer die now, the ledger "
                        "misses groups",
                        folder=str(self._folder),
                        why=error.strerror,
                        waiting_bytes=len(self._waiting),
                    )
                self._told = True
                return
            self._waiting = self._waiting[written:]
        self._told = False

    def close(self) -> None:
        """Close the file."""
        self._flush()
        os.close(self._descriptor)


def records_since(folder: Path, moment: Moment) -> Iterator[Record]:
    """What was written from `moment` on, by whichever attempts, in order. A line cut off by the
    death of a machine is skipped, and said."""
    for at, path in _files(folder):
        if at < moment:
            continue
        for line in path.read_bytes().splitlines():
            try:
                kind, group_id, reason, step = json.loads(line)
            except ValueError:
                structlog.get_logger().warning("a broken line in the journal", file=str(path))
                continue
            yield Record(kind, group_id, reason, step)


def prune(folder: Path, *, before: Moment) -> None:
    """Remove the files that only checkpoints before `before` would need."""
    for at, path in _files(folder):
        if at < before:
            path.unlink(missing_ok=True)


def _files(folder: Path) -> list[tuple[Moment, Path]]:
    named = [(NAME.fullmatch(path.name), path) for path in folder.glob("*.jsonl")]
    return sorted(((int(name[1]), int(name[2])), path) for name, path in named if name)
