"""The folder of a run: what is where, whether it may be started, and who holds it.

recipe.toml           the recipe as resolved at the last start
logs/NAME.log         stdout and stderr of each process
ports/NAME.json       the ports that each process took
queue/                the embedded queue server's data
checkpoints/          the trainer's
trainer.json          the trainer's account of the run, written at its end
summary.json          the whole run's, written by the launcher
launches.json         what its launches have cost so far
"""

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import config
from services.common.config import Recipe
from services.common.errors import UserError


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe; it may hold credentials of the queue server, so only its owner reads
        it.
        """
        return self.path / "recipe.toml"

    @property
    def trainer_report(self) -> Path:
        """What the trainer says at its end."""
        return self.path / "trainer.json"

    @property
    def summary(self) -> Path:
        """What the launcher says at its end."""
        return self.path / "summary.json"

    @property
    def queue(self) -> Path:
        """Data of the embedded queue server."""
        return self.path / "queue"

    @property
    def logs(self) -> Path:
        """Logs of all processes."""
        return self.path / "logs"

    def log(self, name: str) -> Path:
        """The log of one process."""
        return self.logs / f"{name}.log"

    def announce(self, name: str) -> Path:
        """The ports of one process."""
        return self.path / "ports" / f"{name}.json"

    @property
    def launches(self) -> Path:
        """What all launches have cost so far."""
        return self.path / "launches.json"

    def kept_recipe(self) -> Recipe | None:
        """The recipe of the last start; None where there was none. Raises UserError."""
        return config.load(self.recipe, environ={}) if self.recipe.exists() else None

    def complete(self) -> bool:
        """Whether a run has ended here."""
        try:
            found: Any = json.loads(self.summary.read_text())
        except (FileNotFoundError, ValueError):
            return False
        return isinstance(found, dict) and found.get("complete") is True


def claim(folder: RunFolder, *, fresh: bool) -> int:
    """Make the folder of a run, or take that of a run which was stopped, and hold it; the
    descriptor of the hold, freed with the process.

    With `fresh` the folder of an earlier run is moved aside to the first free of NAME.1, NAME.2, …
    Raises UserError when a launcher holds it.
    """
    path = folder.path
    if path.exists():
        hold = _hold(path)
        if not fresh:
            folder.logs.mkdir(exist_ok=True)
            return hold
        os.close(hold)
        number = 1
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(aside)
    try:
        folder.logs.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"folder: {path} cannot be made: {error.strerror}") from error
    return _hold(path)


def _hold(path: Path) -> int:
    """Lock a folder against other launchers until this process ends; children do not inherit it."""
    if not path.is_dir():
        raise UserError(f"{path}: not a folder; choose another run name or folder")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"{path}: a run of this name is going on; stop it first, or choose another run name"
        ) from None
    return descriptor
