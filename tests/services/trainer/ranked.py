"""Learners of several ranks for tests: real processes, and the test's own as rank 0."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.common.config import Data, Model, Network, Recipe
from services.common.training_config import Optimizer, Trainer
from services.trainer.interfaces import loopback_interface
from services.trainer.learner import Learner
from services.trainer.rank_processes import RankProcesses
from services.trainer.ranks import open_place
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
            "network": Network(ranks="127.0.0.1:29500"),
        }
    )


@contextmanager
def ranked(recipe: Recipe) -> Iterator[Learner]:
    """The learner of `trainer.ranks` ranks; one at a time in a process. Those of other nodes are
    processes of this machine, too."""
    num_threads, nodes = torch.get_num_threads(), recipe.trainer.nodes
    with asyncio.Runner() as runner:
        place = None
        if nodes > 1:
            place = open_place(
                recipe.trainer.ranks, nodes=nodes, interface=loopback_interface(), session="now"
            )
        started = [runner.run(RankProcesses.start(recipe, place))]
        for node in range(1, nodes):
            assert place is not None
            there = replace(place, rank=node * place.local_size, store=None)
            started.append(runner.run(RankProcesses.host(recipe, there, node)))
        try:
            yield Learner(recipe, started[0].place)
        finally:
            for ranks in started:
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
