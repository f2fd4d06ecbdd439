"""`python -m tests.verdict.trainer RECIPE`: the trainer service, with sleeps within the model's
forward and before weights are written."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from services.common.command import service_command_of_nodes
from services.common.config import Recipe
from services.trainer import service, training
from services.trainer.adapter_publishing import Kind
from services.trainer.learner import Learner
from services.trainer.ranks import Place
from services.trainer.types import Row
from tests.verdict import sleeps


class SleepingLearner(Learner):
    """Forwards all samples of a step in `training` seconds, beside what they take."""

    def __init__(self, recipe: Recipe, place: Place | None = None) -> None:
        super().__init__(recipe, place)
        self._samples_per_step = recipe.trainer.groups_per_step * recipe.generation.num_generations
        self._share = 0.0
        """Of the step's samples, those that are forwarded now."""
        embeddings: Any = self._own._model.get_input_embeddings()
        # Within what is measured as forward; the canary's forwards are not slowed.
        embeddings.register_forward_pre_hook(self._sleep)

    def _sleep(self, *_: Any) -> None:
        time.sleep(self._share * sleeps.seconds("training"))

    def accumulate(self, microbatch: Sequence[Row]) -> None:
        num_samples = sum(len(row.samples) for row in microbatch)
        self._share = num_samples / self._samples_per_step
        try:
            super().accumulate(microbatch)
        finally:
            self._share = 0.0

    def write_weights(self, path: Path, kind: Kind | None = None) -> tuple[int, float]:
        time.sleep(sleeps.seconds("publish"))
        return super().write_weights(path, kind)


if __name__ == "__main__":
    # The service itself, but for this class.
    vars(training)["Learner"] = SleepingLearner
    typer.run(service_command_of_nodes("trainer", service.main, "A trainer with sleeps."))
