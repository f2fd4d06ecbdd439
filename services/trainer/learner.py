"""Everything of the trainer that is torch, as the service sees it: one object, whatever the number
of ranks. Rank 0 does its share here and has the other ranks do theirs.

All methods run on one thread of their own, never on the event loop; the service sees to that.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from services.common import adapter_files
from services.common.config import Recipe
from services.trainer import lora, messages
from services.trainer.adapter_publishing import Kind
from services.trainer.assignment import Budgets
from services.trainer.planner import Plan, plan, plan_ready
from services.trainer.policy import MODEL_FILES
from services.trainer.rank_files import RankFiles
from services.trainer.rank_learner import RankLearner
from services.trainer.ranks import Command, Place
from services.trainer.ready import fill_at_most
from services.trainer.step import StepResult
from services.trainer.types import Row, TrainSample

ADAPTER_FOLDER = "adapter"
"""Beside the folder of the model at the end of a run."""


class Learner:
    """The policy being trained. With a place, the other ranks of it must be started, and follow
    what is done here (rank.py). Raises UserError for a model or device that cannot be used."""

    def __init__(self, recipe: Recipe, place: Place | None = None) -> None:
        self._recipe = recipe
        self._own = RankLearner(recipe, place)
        self._group = self._own.group
        self._num_snapshots = 0
        self.folder = self._own.folder
        self.device = self._own.device
        self.dtype = recipe.model.dtype
        self.vocab_size = self._own.vocab_size
        self._bounds: dict[str, Any] = {
            "token_budget": recipe.token_budget,
            "trained_token_budget": recipe.trained_token_budget,
            "ranks": self._group.size,
            "load": self._own.load,
            "share_prefixes": self._own.shares_prefixes,
            "samples_per_row": recipe.trainer.samples_per_row,
        }
        self._budgets = Budgets(
            recipe.token_budget, recipe.trained_token_budget, recipe.trainer.samples_per_row
        )

    def plan(self, samples: Sequence[TrainSample]) -> Plan:
        """Rows for a step, or for what is left of one."""
        return plan(samples, **self._bounds)

    def fill_at_most(self, samples: Sequence[TrainSample]) -> float:
        """Micro-batches that samples of one group fill, at most. Needs no torch: it may be called
        on the event loop."""
        share = self._own.shares_prefixes
        return fill_at_most(samples, self._budgets, share_prefixes=share) / self._group.size

    def plan_ready(self, samples: Sequence[TrainSample]) -> tuple[Plan, list[int]]:
        """Micro-batches that need not wait for the samples that a step still lacks, and the indices
        of samples that are kept for later."""
        return plan_ready(samples, **self._bounds)

    def accumulate(self, microbatch: Sequence[Row]) -> None:
        """Forward and backward of one micro-batch: a row for every rank."""
        assert len(microbatch) == self._group.size
        self._group.send(Command.ACCUMULATE)
        self._group.scatter([b"", *map(messages.of_row, microbatch[1:])])
        self._own.accumulate(microbatch[0])

    def finish(self) -> StepResult:
        """The optimizer's part of the step."""
        self._group.send(Command.FINISH)
        return self._own.finish()

    def abandon(self) -> None:
        """Forget what was accumulated for a step that will not be finished."""
        self._group.send(Command.ABANDON)
        self._own.abandon()

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s that the devices of all ranks can do at most; None where that is not known."""
        peak = self._own.peak_flops
        return None if peak is None else peak * self._group.size

    @property
    def rows(self) -> str:
        """How rows are forwarded, and why not faster, for people."""
        return self._own.rows

    @property
    def num_applied(self) -> int:
        """Optimizer steps applied, over all attempts."""
        return self._own.num_applied

    def snapshot(self) -> RankFiles:
        """A copy in memory of all that a checkpoint needs; another thread may write it while
        training goes on. Not within a step."""
        self._group.send(Command.SNAPSHOT)
        self._num_snapshots += 1
        return RankFiles(self._group, self._own.snapshot(), number=self._num_snapshots)

    def restore(self, folder: Path) -> None:
        """Take over the checkpoint in a folder, which any number of ranks may have written. Raises
        UserError when it is of another model."""
        self._group.send(Command.RESTORE, str(folder.absolute()).encode())
        self._own.restore(folder)

    @property
    def publishes_adapters(self) -> bool:
        """Whether a version is an adapter alone, and generators need the frozen weights once."""
        return self._own.publishes.kind == "adapter"

    def adapter_config(self, *, base: str | None = None) -> bytes:
        """peft's description of the adapter, as a file's content; base: see lora.py."""
        settings = self._recipe.trainer.lora
        assert settings is not None, "there is an adapter"
        return lora.config_file(settings, self._own.adapted, base=base)

    def write_weights(self, path: Path, kind: Kind | None = None) -> tuple[int, float]:
        """Write weights, by default those that are published, to a safetensors file; the number of
        tensors, and the seconds that gathering them from all ranks took.

        Tied tensors are written once, under the name that comes first, as checkpoints have them.
        """
        self._group.send(Command.WEIGHTS, messages.of_kind(kind))
        gathered = self._own.gather(kind)
        save_file(gathered.tensors, path, metadata={"format": "pt"})
        return len(gathered.tensors), gathered.seconds

    def canary_logprobs(self, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """What a generator with these weights must compute for the canary rows."""
        self._group.send(Command.CANARY, messages.of_rows(rows))
        return self._own.canary_logprobs(rows)

    def perturbed_logprobs(
        self, path: Path, rows: "np.ndarray[Any, Any]"
    ) -> "np.ndarray[Any, Any]":
        """The canary under the perturbed weights of a published file; the model is as before
        afterwards."""
        self._group.send(Command.PERTURBED, messages.of_rows(rows, path=path.absolute()))
        return self._own.perturbed_logprobs(path, rows)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder: weights, configuration, tokenizer. Of an adapted model the
        weights have the adapter in them, and `adapter` beside the folder has it alone."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in MODEL_FILES:
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, folder / name)
        weights = folder / "model.safetensors"
        if self._recipe.trainer.lora is None:
            self.write_weights(weights)
            return
        self.write_weights(weights, kind="merged")
        adapter = folder.with_name(ADAPTER_FOLDER)
        adapter.mkdir(exist_ok=True)
        self.write_weights(adapter / adapter_files.WEIGHTS, kind="adapter")
        config = self.adapter_config(base=str(self.folder.absolute()))
        (adapter / adapter_files.CONFIG).write_bytes(config)
