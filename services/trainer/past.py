"""What earlier attempts of a run have left on disk, read before anything is started.

checkpoints/experiment.json     what the run is, from its first start on
checkpoints/attempts/N          attempts that were begun
checkpoints/ATTEMPT-STEP/       checkpoints; checkpoints/journal/ what happened since
trainer.json                    the report: it is there once the run has come to its end
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.common import experiment
from services.common.config import Recipe
from services.common.errors import UserError
from services.common.files import sync
from services.trainer.attempts import Attempts
from services.trainer.checkpoint import Checkpoint, Checkpoints
from services.trainer.dataset import Dataset
from services.trainer.dispatch import Dispatcher
from services.trainer.evaluation import Evaluation
from services.trainer.journal import Record, records_since
from services.trainer.line import VersionLine
from services.trainer.measure import Totals
from services.trainer.resume import replay


@dataclass
class Past:
    """Where the run stands; a run that is new stands at the beginning."""

    checkpoint: Checkpoint | None
    last_attempt: int
    """0 for a new run."""
    dispatcher: Dispatcher
    line: VersionLine
    totals: Totals
    evaluations: list[Evaluation]
    said: list[Record]
    """Ends of groups that the checkpoint holds."""
    ended: list[Record]
    """Ends of groups since the checkpoint, as they are now that it is restored."""
    started: str
    """When the first attempt began."""

    @property
    def open_step(self) -> int:
        """The step that comes next, as clocks show it; 0 while a run has made none."""
        return self.totals.steps + 1 if self.totals.steps else 0


def read(recipe: Recipe, checkpoints: Checkpoints, rows: Dataset) -> Past:
    """Read the newest checkpoint and the journal behind it.

    Raises UserError when the data are not those of the checkpoint.
    """
    found = checkpoints.newest()
    state: Mapping[str, Any] = {} if found is None else found.state
    data = {"num_rows": len(rows.training), "shuffle": rows.shuffle, "seed": rows.seed}
    if found is not None and state["data"] != data:
        lines = experiment.differences({"data": state["data"]}, {"data": data})
        raise UserError(
            f"run {recipe.run}: its checkpoints are of other data ({'; '.join(lines)}); give the "
            "data as they were, or start over with --fresh"
        )
    trainer = recipe.trainer
    max_steps = trainer.max_steps
    dispatcher = Dispatcher(
        order=rows.order,
        num_rows=len(rows.training),
        attempt=0,
        epochs=recipe.data.epochs,
        max_groups=None if max_steps is None else max_steps * trainer.groups_per_step,
        max_tries=recipe.queue.max_tries,
        max_stale_tries=recipe.queue.max_stale_tries,
        state=state.get("book"),
    )
    moment = (0, 0) if found is None else found.moment
    ended = replay(dispatcher, records_since(checkpoints.journal, moment))
    return Past(
        checkpoint=found,
        last_attempt=Attempts(checkpoints.folder).highest(),
        dispatcher=dispatcher,
        line=VersionLine(state.get("line")),
        totals=Totals.of_state(state.get("totals", {})),
        evaluations=[Evaluation(**each) for each in state.get("evaluations", ())],
        said=[Record(*line) for line in state.get("said", ())],
        ended=ended,
        started=state.get("started") or datetime.now(UTC).isoformat(),
    )


def know(recipe: Recipe, folder: Path) -> bool:
    """Whether the run was begun in this checkpoints folder before; a new one is from now on.

    Raises UserError, with what differs, when it was another experiment.
    """
    path = folder / "experiment.json"
    if path.exists():
        before = json.loads(path.read_text())
        experiment.check_same(before, recipe, place=recipe.run_folder)
        return True
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, experiment.plain(recipe))
    sync(folder)
    return False


def forget(folder: Path) -> None:
    """Undo `know` of a run that may not begin."""
    (folder / "experiment.json").unlink()


def report_of(recipe: Recipe) -> dict[str, Any] | None:
    """The report of the run's end; None while it goes on."""
    path = report_path(recipe)
    if not path.exists():
        return None
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def report_path(recipe: Recipe) -> Path:
    """Where the report is."""
    return recipe.run_folder / "trainer.json"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write by a rename: a reader finds all of it or nothing."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(content, indent=2) + "\n")
    fresh.rename(path)
