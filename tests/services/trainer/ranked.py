"""Learners of several ranks for tests: real processes, and the test's own as rank 0."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.common.config import Data, Model, Recipe
from services.common.training_config import Optimizer, Trainer
from services.trainer.learner import Learner
from services.trainer.rank_processes import RankProcesses
from services.trainer.step import StepResult
from services.trainer.tensor_files import read_whole, shapes
from services.trainer.types import Row, TrainSample


def recipe_for(folder: Path, *, dtype: str = "float32", **trainer: Any) -> Recipe:
    """A recipe for the model in a folder; `trainer` keys as the recipe's."""
    return Recipe.model_validate(
        {
            "model": Model(path=str(folder), dtype=dtype),  # type: ignore[arg-type]
            "data": Data(file="prompts.jsonl", epochs=1.0),
            "optimizer": Optimizer(learning_rate=1e-2, warmup_steps=3, weight_decay=0.01),
            "trainer": Trainer(device="cpu", **trainer),
        }
    )


@contextmanager
def ranked(recipe: Recipe) -> Iterator[Learner]:
    """The learner of `trainer.ranks` ranks; one at a time in a process."""
    num_threads = torch.get_num_threads()
    with asyncio.Runner() as runner:
        ranks = runner.run(RankProcesses.start(recipe))
        try:
            yield Learner(recipe, ranks.place)
        finally:
            runner.run(ranks.end())
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.set_num_threads(num_threads)


def step(learner: Learner, microbatches: Sequence[Sequence[Row]]) -> StepResult:
    """One optimizer step."""
    for microbatch in microbatches:
        learner.accumulate(microbatch)
    return learner.finish()


def one_by_one(microbatches: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """The same for one rank: rows that are no echoes, a micro-batch each."""
    return [[row] for microbatch in microbatches for row in microbatch if not row.echo]


def halves(samples: Sequence[TrainSample]) -> list[list[Row]]:
    """Two micro-batches of two ranks, the second with an echo: half, quarter, quarter."""
    half, three = len(samples) // 2, 3 * len(samples) // 4
    return [
        [Row(samples[:half]), Row(samples[half:three])],
        [Row(samples[three:]), Row(samples[:1], echo=True)],
    ]


def kept(learner: Learner, folder: Path) -> Path:
    """The folder, with the learner's state in it."""
    folder.mkdir()
    learner.snapshot().write(folder)
    return folder


def state_in(folder: Path) -> dict[str, torch.Tensor]:
    """All whole tensors of a checkpoint but random states."""
    names = [name for name in shapes(folder) if not name.startswith("random.")]
    return read_whole(folder, names)
