"""Everything of the trainer that is torch: the model, its optimizer step, its weights as a file,
its canary.

All methods run on one thread of their own, never on the event loop; the service sees to that.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.common import canary
from services.common.config import Recipe
from services.common.errors import UserError
from services.trainer.logprobs import sequence_logprobs
from services.trainer.packing import pack
from services.trainer.planner import Plan, plan
from services.trainer.policy import MODEL_FILES
from services.trainer.step import OptimizerStep, StepResult
from services.trainer.types import Row, TrainSample

CPU_RANDOM, CUDA_RANDOM = "random.cpu", "random.cuda"
"""Names of the random states among a checkpoint's tensors."""


class Learner:
    """The policy being trained. Raises UserError for a model or device that cannot be used."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(recipe.trainer.seed)
        self._recipe = recipe
        self.folder = Path(recipe.model.path)
        if not (self.folder / "config.json").is_file():
            raise UserError(
                f"model.path: {recipe.model.path} is no model folder (it has no config.json); "
                "`headrace tiny-model DIR` makes a small one"
            )
        self._device = _device(recipe.trainer.device)
        self.dtype = recipe.model.dtype
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=getattr(torch, self.dtype), local_files_only=True
            )
        except (OSError, ValueError, SafetensorError) as error:
            why = next(iter(str(error).splitlines()), "")
            raise UserError(f"model.path: {recipe.model.path} cannot be loaded: {why}") from error
        self._model = model.to(self._device)
        self.vocab_size = int(model.config.vocab_size)
        self._step = OptimizerStep(
            self._model,
            optimizer=recipe.optimizer,
            loss=recipe.loss,
            temperature=recipe.generation.temperature,
        )

    def plan(self, samples: Sequence[TrainSample]) -> Plan:
        """Rows for a step."""
        return plan(
            samples,
            token_budget=self._recipe.token_budget,
            trained_token_budget=self._recipe.trained_token_budget,
        )

    def accumulate(self, microbatch: Sequence[Row]) -> None:
        """Forward and backward of one micro-batch: a row for every rank."""
        [row] = microbatch
        self._step.accumulate(pack(row.samples))

    def finish(self) -> StepResult:
        """The optimizer's part of the step."""
        return self._step.finish()

    @property
    def num_applied(self) -> int:
        """Optimizer steps applied, over all attempts."""
        return self._step.num_applied

    def snapshot(self) -> dict[str, torch.Tensor]:
        """A copy, on the CPU, of all that a checkpoint needs: weights to full precision, moments,
        the warm-up's count, the state of torch's random generators. Not within a step."""
        tensors = self._step.tensors() | {CPU_RANDOM: torch.get_rng_state()}
        if self._device.type == "cuda":
            tensors[CUDA_RANDOM] = torch.cuda.get_rng_state(self._device)
        return {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in tensors.items()
        }

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `snapshot()` gave. Raises UserError when it is of another model."""
        state = dict(tensors)
        torch.set_rng_state(state.pop(CPU_RANDOM))
        cuda_random = state.pop(CUDA_RANDOM, None)
        if cuda_random is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(cuda_random, self._device)
        try:
            self._step.load_tensors(state)
        except ValueError as error:
            raise UserError(
                f"the checkpoint does not fit model.path {self.folder}: {error}; start over with "
                "--fresh"
            ) from error

    def write_weights(self, path: Path) -> int:
        """Write the weights as published to a safetensors file; the number of tensors.

        Tied tensors are written once, under the name that comes first, as checkpoints have them.
        """
        tensors = self._unique_tensors()
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
        return len(tensors)

    def canary_logprobs(self, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """What a generator with these weights must compute for the canary rows."""
        return sequence_logprobs(self._model, rows)

    @torch.no_grad()
    def perturbed_logprobs(
        self, path: Path, rows: "np.ndarray[Any, Any]"
    ) -> "np.ndarray[Any, Any]":
        """The canary under the perturbed weights of a published file; the model is as before
        afterwards."""
        published = load_file(path)
        tensors = self._unique_tensors()
        backup = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        try:
            for name, tensor in tensors.items():
                value = published[name]
                factor = torch.from_numpy(canary.factors(name, tuple(value.shape)))
                tensor.copy_((value.float() * factor).to(value.dtype))
            return sequence_logprobs(self._model, rows)
        finally:
            for name, tensor in tensors.items():
                tensor.copy_(backup[name])

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder: weights, configuration, tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in MODEL_FILES:
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, folder / name)
        self.write_weights(folder / "model.safetensors")

    def _unique_tensors(self) -> dict[str, torch.Tensor]:
        seen: set[int] = set()
        unique = {}
        for name, tensor in self._model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                unique[name] = tensor
        return unique


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            'trainer.device: "cuda" is asked for and no GPU is there; set it to "cpu" or "auto"'
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)
