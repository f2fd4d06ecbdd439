"""Weights & Biases and trackio, imported when they are used.

Neither forgets a step: when a restart of the trainer goes back, another run of theirs begins, in
the same group, with the steps that are made again.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from services.aggregator.mirrors.types import StepValues
from services.common.errors import UserError


def imported(package: str) -> ModuleType:
    """The package of a mirror. Raises UserError where it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UserError(
            f"mirrors.{package}: the package {package} is not installed where the aggregator runs; "
            f"install it there (pip install 'headrace[{package}]'), or leave mirrors.{package} out"
        ) from None


class Wandb:
    """Runs of a Weights & Biases project. Its key comes from its own settings (WANDB_API_KEY)."""

    name = "wandb"

    def __init__(self, project: str, *, run: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._package = imported(self.name)
        self._entity, _, self._project = project.rpartition("/")
        self._named, self._folder, self._config = run, folder, config
        self._run: Any = None

    def open(self, *, began: int, step: int) -> None:
        """Begin the run of this attempt, or resume it."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = self._package.init(
            project=self._project,
            entity=self._entity or None,
            id=run_name(self._named, began),
            name=run_name(self._named, began),
            group=self._named,
            resume="allow",
            dir=str(self._folder),
            config=dict(self._config),
            settings={"console": "off", "silent": True},
        )

    def write(self, steps: Sequence[StepValues]) -> None:
        """Log steps; W&B sends them by and by. One that is there already it leaves as it is."""
        for each in steps:
            self._run.log(dict(each.values), step=each.step)

    def close(self) -> None:
        """Finish the run, which sends what is left."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


class Trackio:
    """Runs of a trackio project, kept where trackio keeps its own."""

    name = "trackio"

    def __init__(self, project: str, *, run: str, config: Mapping[str, Any]) -> None:
        self._package = imported(self.name)
        self._project, self._named, self._config = project, run, config
        self._run: Any = None

    def open(self, *, began: int, step: int) -> None:
        """Begin the run of this attempt, or resume it."""
        self.close()
        self._run = self._package.init(
            project=self._project,
            name=run_name(self._named, began),
            group=self._named,
            resume="allow",
            config=dict(self._config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, steps: Sequence[StepValues]) -> None:
        """Log steps; trackio writes them by and by."""
        for each in steps:
            self._run.log(dict(each.values), step=each.step)

    def close(self) -> None:
        """Finish the run, which writes what is left."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def run_name(run: str, began: int) -> str:
    """A run of a tracker's.

    Example: `demo-1`; from the step to which attempt 3 went back, `demo-3`.
    """
    return f"{run}-{began}"
