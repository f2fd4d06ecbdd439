"""`python -m tests.chaos.trainer RECIPE`: the trainer service, with a witness of its steps."""

from collections.abc import Sequence
from typing import Any

import typer

from services.common.command import service_command_of_nodes
from services.trainer import service, training
from services.trainer.learner import Learner
from services.trainer.training import Training
from services.trainer.types import Row
from tests.chaos.witness import Note, Step
from tests.chaos.world import witness_of


class WatchedLearner(Learner):
    """Remembers whose samples have entered the gradient of the open step."""

    entered: frozenset[str] = frozenset()

    def accumulate(self, microbatch: Sequence[Row]) -> None:
        super().accumulate(microbatch)
        samples = [sample for row in microbatch for sample in row.samples]
        self.entered |= {sample.rollout_id.partition("/")[0] for sample in samples}

    def taken(self) -> frozenset[str]:
        """Those groups; the next step begins."""
        entered, self.entered = self.entered, frozenset()
        return entered


class WatchedTraining(Training):
    """Notes each start and each step. A checkpoint can only be taken after the note."""

    async def _begin_attempt(self, *, known: bool) -> dict[str, str]:
        places = await super()._begin_attempt(known=known)
        self._note = Note(witness_of(self._recipe))
        found = self._past.checkpoint
        self._note.began(self._queue.attempt, restored=None if found is None else found.moment)
        return places

    async def _train(self, groups: Any, *arguments: Any) -> float:
        ended_s: float = await super()._train(groups, *arguments)
        assert isinstance(self._learner, WatchedLearner)
        self._note.stepped(
            Step(
                self._queue.attempt,
                self._totals.steps,
                tuple(group.group_id for group in groups),
                self._learner.taken(),
            )
        )
        return ended_s


if __name__ == "__main__":
    # The service itself, but for these two classes.
    vars(training)["Learner"] = WatchedLearner
    vars(service)["Training"] = WatchedTraining
    typer.run(service_command_of_nodes("trainer", service.main, "A trainer with a witness."))
