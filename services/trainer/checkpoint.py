"""Checkpoints on disk: written beside and renamed, the last few kept, a broken one passed over.

    checkpoints/ATTEMPT-STEP/state.json               everything but tensors, and their digests
    checkpoints/ATTEMPT-STEP/rank-00000.safetensors   weights, moments, random state: one of each
                                                      rank (tensor_files.py)
    checkpoints/broken-ATTEMPT-STEP/                  one that could not be read when it was wanted

The newest by (attempt, step) is that of the surviving line: an attempt that went back further than
the last checkpoint is later all the same. Nothing here is pickled.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from services.common.errors import UserError
from services.common.files import sha256, sync
from services.trainer import journal
from services.trainer.attempts import Attempts
from services.trainer.journal import Moment
from services.trainer.rank_files import Digest

FORMAT = 2
"""Of the folder; rises when another version could not read it."""

NAME = re.compile(r"(\d+)-(\d+)")

STATE = "state.json"


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; the one before is as it was."""


class Broken(ValueError):
    """A checkpoint cannot be used; the message says why."""


class Files(Protocol):
    """What knows how to write the tensors."""

    def write(self, folder: Path) -> Mapping[str, Digest]:
        """Write them durably; the files by name. Raises OSError."""


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole."""

    moment: Moment
    state: Mapping[str, Any]
    folder: Path
    """Of its tensors."""

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

    def look(self, *, step: int | None = None) -> Checkpoint | None:
        """The newest one that is whole, or the newest of a step, or None. Only read: a trainer may
        be at work in the folder, so what is broken stays where it is."""
        for moment, path in reversed(self._all()):
            if step is not None and moment[1] != step:
                continue
            try:
                return _read(path, moment)
            except Broken as error:
                structlog.get_logger().warning(
                    "a checkpoint is broken or gone", checkpoint=str(path), why=str(error)
                )
        return None

    def steps(self) -> list[int]:
        """Of which steps there are some, rising."""
        return sorted({step for (_, step), _ in self._found()})

    def write(self, moment: Moment, state: Mapping[str, Any], files: Files) -> None:
        """Write one durably, then remove those that are not kept.

        Raises CheckpointFailed when the disk refuses (nothing is left of the attempt to write), and
        Fenced when a newer trainer has begun.
        """
        attempts = Attempts(self.folder)
        attempts.check_last(moment[0])
        path = self.folder / f"{moment[0]}-{moment[1]}"
        fresh = self.folder / f".writing-{path.name}"
        try:
            self._clean()
            _write(fresh, state, files)
            attempts.check_last(moment[0])
            self._remove(path)
            fresh.rename(path)
            sync(self.folder)
        except OSError as error:
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


def _write(folder: Path, state: Mapping[str, Any], files: Files) -> None:
    folder.mkdir()
    digests = {name: asdict(digest) for name, digest in files.write(folder).items()}
    (folder / STATE).write_text(json.dumps({"format": FORMAT, "files": digests, **state}))
    sync(folder / STATE)
    sync(folder)


def _read(folder: Path, moment: Moment) -> Checkpoint:
    """Raises Broken, and UserError for one of another version: it is good, and not ours."""
    try:
        state = json.loads((folder / STATE).read_text())
        if state["format"] != FORMAT:
            raise UserError(
                f"{folder} has format {state['format']}, and this version reads {FORMAT}: take the "
                "version of Headrace that wrote it, or start over with --fresh"
            )
        for name, digest in state["files"].items():
            _check(folder / name, Digest(**digest))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Broken | UserError):
            raise
        raise Broken(f"{type(error).__name__}: {error}") from error
    return Checkpoint(moment, state, folder)


def _check(file: Path, wanted: Digest) -> None:
    """Raises Broken for a file that is not what was written, OSError for one that is gone."""
    if (size := file.stat().st_size) != wanted.bytes:
        raise Broken(f"{file.name} has {size} bytes, {wanted.bytes} were written")
    if sha256(file) != wanted.sha256:
        raise Broken(f"{file.name} is not what was written (its sha256 differs)")
