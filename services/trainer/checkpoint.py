"""Checkpoints on disk: written beside and renamed, the last few kept, a broken one passed over.

    checkpoints/ATTEMPT-STEP/state.json            everything but tensors, and their digest
    checkpoints/ATTEMPT-STEP/tensors.safetensors   weights, moments, random state
    checkpoints/broken-ATTEMPT-STEP/               one that could not be read when it was wanted

The newest by (attempt, step) is that of the surviving line: an attempt that went back further than
the last checkpoint is later all the same. Nothing here is pickled.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from services.common.errors import UserError
from services.trainer import journal
from services.trainer.attempts import Attempts, sync_folder
from services.trainer.journal import Moment

FORMAT = 1
"""Of state.json; rises when an older trainer could not read it."""

NAME = re.compile(r"(\d+)-(\d+)")

STATE, TENSORS = "state.json", "tensors.safetensors"


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; the one before is as it was."""


class Broken(ValueError):
    """A checkpoint cannot be used; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was read."""

    moment: Moment
    state: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def step(self) -> int:
        """Steps that were done."""
        return self.moment[1]


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    @property
    def journal(self) -> Path:
        """What happened since each of them."""
        return self.folder / "journal"

    def newest(self) -> Checkpoint | None:
        """The newest one that is whole, or None.

        Those that are not are passed over, loudly, and set aside: the line goes on from an older
        one, so they must never be taken again.
        """
        for moment, path in reversed(self._all()):
            try:
                return _read(path, moment)
            except Broken as error:
                aside = path.with_name(f"broken-{path.name}")
                structlog.get_logger().error(
                    "BROKEN CHECKPOINT, the one before is taken",
                    checkpoint=str(path),
                    why=str(error),
                    kept_as=str(aside),
                )
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        return None

    def write(
        self, moment: Moment, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Write one durably, then remove those that are not kept. `tensors` are on the CPU and
        nobody else's.

        Raises CheckpointFailed when the disk refuses (nothing is left of the attempt to write), and
        Fenced when a newer trainer has begun.
        """
        attempts = Attempts(self.folder)
        attempts.check_last(moment[0])
        path = self.folder / f"{moment[0]}-{moment[1]}"
        fresh = self.folder / f".writing-{path.name}"
        try:
            self._clean()
            _write(fresh, state, tensors)
            attempts.check_last(moment[0])
            self._remove(path)
            fresh.rename(path)
            sync_folder(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(fresh, ignore_errors=True)
            raise CheckpointFailed(f"{path} cannot be written: {error}") from error
        self._prune()

    def _prune(self) -> None:
        *old, _ = kept = self._all()
        for _, path in old[: max(0, len(kept) - self._keep)]:
            self._remove(path)
        first, _ = self._all()[0]
        journal.prune(self.journal, before=first)

    def _remove(self, path: Path) -> None:
        """By another name first: one that is half removed must not look like a broken one."""
        if path.exists():
            removing = path.with_name(f".removing-{path.name}")
            path.rename(removing)
            shutil.rmtree(removing)

    def _clean(self) -> None:
        """Remove what trainers that died left half written or half removed."""
        for path in self.folder.glob(".*-*-*"):
            shutil.rmtree(path)

    def _all(self) -> list[tuple[Moment, Path]]:
        return sorted(self._found())

    def _found(self) -> Iterator[tuple[Moment, Path]]:
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if name := NAME.fullmatch(path.name):
                    yield (int(name[1]), int(name[2])), path


def _write(folder: Path, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir()
    file = folder / TENSORS
    save_file(dict(tensors), file)
    _sync(file)
    about = {"format": FORMAT, "bytes": file.stat().st_size, "sha256": _sha256(file), **state}
    (folder / STATE).write_text(json.dumps(about))
    _sync(folder / STATE)
    sync_folder(folder)


def _read(folder: Path, moment: Moment) -> Checkpoint:
    """Raises Broken, and UserError for one that a newer version wrote: it is good, and not ours."""
    file = folder / TENSORS
    try:
        state = json.loads((folder / STATE).read_text())
        if state["format"] > FORMAT:
            raise UserError(
                f"{folder} has format {state['format']}, and this version reads {FORMAT}: take the "
                "version of Headrace that wrote it, or start over with --fresh"
            )
        if (size := file.stat().st_size) != state["bytes"]:
            raise Broken(f"{TENSORS} has {size} bytes, {state['bytes']} were written")
        if _sha256(file) != state["sha256"]:
            raise Broken(f"{TENSORS} is not what was written (its sha256 differs)")
        return Checkpoint(moment, state, load_file(file))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, Broken | UserError):
            raise
        raise Broken(f"{type(error).__name__}: {error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
