"""What one rank does of all that is torch: the model, its optimizer step, its weights as whole
tensors, its canary, its part of a checkpoint.

With several ranks all of them make the same calls in the same order; each is a collective. A rank
that is alone waits for nobody.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from services.common import canary
from services.common.config import Recipe
from services.common.errors import UserError
from services.trainer import adapter_publishing, lora, tensor_files
from services.trainer.adapter_publishing import Choice, Kind
from services.trainer.device import choose_device
from services.trainer.flops import peak_flops
from services.trainer.load import Load
from services.trainer.model_folder import load_model
from services.trainer.packing import pack
from services.trainer.ranks import Group, Place
from services.trainer.reference import reference_of
from services.trainer.sharding import as_sharded, local_rows, unique_tensors, whole
from services.trainer.step import MOMENTS, OptimizerStep, StepResult
from services.trainer.stored_dtype import say_dtype
from services.trainer.tensor_files import Part
from services.trainer.types import Row

SHARDED = ("master", *MOMENTS)
"""Kinds of a checkpoint's tensors of which each rank holds some rows; of others rank 0 has all."""


@dataclass(frozen=True)
class Gathered:
    """The weights as they are published."""

    tensors: dict[str, torch.Tensor]
    """By names as in files; on rank 0, on the CPU, what is tied once; empty on the others."""
    seconds: float
    """That all ranks took to gather them."""


class RankLearner:
    """The part of the policy being trained that one rank has. Raises UserError for a model or
    device that cannot be used."""

    def __init__(self, recipe: Recipe, place: Place | None = None) -> None:
        torch.manual_seed(recipe.trainer.seed)
        rank = 0 if place is None else place.rank
        local_rank, local_size = (0, 1) if place is None else (place.local_rank, place.local_size)
        self.folder = Path(recipe.model.path)
        if not (self.folder / "config.json").is_file():
            raise UserError(
                f"model.path: {recipe.model.path} is no model folder (it has no config.json); "
                "`headrace tiny-model DIR` makes a small one"
            )
        self.device = choose_device(recipe.trainer.device, rank=local_rank, size=local_size)
        if local_size > 1:  # the ranks of a machine share its cores
            torch.set_num_threads(max(1, torch.get_num_threads() // local_size))
        self._dtype = getattr(torch, recipe.model.dtype)
        self._model = load_model(self.folder, self._dtype, of="model.path").to(self.device)
        self.publishes = Choice("all")
        """What of the model a version has."""
        if recipe.trainer.lora is not None:
            lora.add_adapter(self._model, recipe.trainer.lora)
            self.publishes = adapter_publishing.choose(recipe.trainer.lora, self._model)
        if rank == 0:
            say_dtype(self.folder, recipe.model.dtype)
            if recipe.trainer.lora is not None:
                adapter_publishing.say(self.publishes, self._model)
        if recipe.trainer.gradient_checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        self.adapted = lora.layers(self._model)
        """The adapted layers, by name."""
        self.vocab_size = int(self._model.config.get_text_config().vocab_size)
        reference = reference_of(recipe, self.device, self._dtype)
        self._one_machine = place is None or place.nodes == 1
        self.group = Group.join(place, self.device)
        self._step = OptimizerStep(
            self._model,
            optimizer=recipe.optimizer,
            loss=recipe.loss,
            temperature=recipe.generation.temperature,
            max_completion_tokens=recipe.generation.max_completion_tokens,
            reference=reference,
            group=self.group,
            attention=recipe.trainer.attention,
        )

    @property
    def load(self) -> Load:
        """What rows cost, in FLOPs of the forward."""
        flops = self._step.flops
        return Load(
            per_token=flops.per_token,
            per_pair=sum(flops.per_pair.values()),
            per_trained=flops.per_logits,
        )

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s that this rank's device can do at most; None where that is not known."""
        return peak_flops(self.device, self._dtype)

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows forward shared prefixes once."""
        return self._step.shares_prefixes

    @property
    def rows(self) -> str:
        """How rows are forwarded, and why not faster, for people."""
        return str(self._step.forward.way)

    @property
    def num_applied(self) -> int:
        """Optimizer steps applied, over all attempts."""
        return self._step.num_applied

    def accumulate(self, row: Row) -> None:
        """Forward and backward of this rank's row of a micro-batch."""
        packed = pack(row.samples, share_prefixes=self._step.shares_prefixes)
        self._step.accumulate(packed, echo=row.echo)

    def finish(self) -> StepResult:
        """The optimizer's part of the step; the same result on every rank, but for its times."""
        return self._step.finish()

    def abandon(self) -> None:
        """Forget what was accumulated for a step that will not be finished."""
        self._step.abandon()

    # -- weights

    def gather(self, kind: Kind | None = None) -> Gathered:
        """Whole weights, tensor by tensor, by default those that are published: beside what rank 0
        collects there are never more than a layer's in memory."""
        kind = kind or self.publishes.kind
        begin_s = time.perf_counter()
        tensors = {}
        for name, tensor in self._tensors(kind).items():
            found = whole(tensor, self._published_dtype(tensor))
            if kind == "merged":
                found = self._merged(name, found)
            if self.group.rank == 0:
                tensors[name] = found.to("cpu").contiguous()
        return Gathered(tensors, time.perf_counter() - begin_s)

    def _tensors(self, kind: Kind) -> dict[str, torch.Tensor]:
        """The model's tensors that a file of this kind is made of, by their names in it."""
        of_adapter = kind == "adapter"
        return {
            name if kind == "all" else lora.file_name(name): tensor
            for name, tensor in unique_tensors(self._model)
            if kind == "all" or lora.is_adapter(name) == of_adapter
        }

    @torch.no_grad()
    def _merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A whole tensor of the frozen model, with the adapter's change where it is adapted."""
        layer = self.adapted.get(name.removesuffix(".weight"))
        if layer is None or not name.endswith(".weight"):
            return weight
        a, b = layer.lora_A[lora.ADAPTER].weight, layer.lora_B[lora.ADAPTER].weight
        change = lora.change(
            whole(a, self._published_dtype(a)),
            whole(b, self._published_dtype(b)),
            scaling=layer.scaling[lora.ADAPTER],
            transposed=lora.is_transposed(layer.get_base_layer()),
        )
        return (weight.float() + change).to(weight.dtype)

    def canary_logprobs(self, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """What a generator with these weights must compute for the canary rows."""
        return self._step.forward.sequence_logprobs(rows)

    @torch.no_grad()
    def perturbed_logprobs(
        self, path: Path, rows: "np.ndarray[Any, Any]"
    ) -> "np.ndarray[Any, Any]":
        """The canary under the perturbed weights of a published file; the model is as before
        afterwards."""
        published = self._published(path)
        kind = self.publishes.kind
        tensors = {name: _local(tensor) for name, tensor in self._tensors(kind).items()}
        backup = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        # The adapter is part of what was merged.
        off = lora.adapter_off(self._model) if kind == "merged" else nullcontext()
        try:
            for name, tensor in tensors.items():
                value = published[name]
                shape = tuple(value.shape)
                factors = torch.from_numpy(canary.factors(name, shape))
                offsets = torch.from_numpy(canary.offsets(name, shape))
                perturbed = (value.float() * factors + offsets).to(value.dtype)
                tensor.copy_(self._own_rows(perturbed, tensor))
            self._step.weights.changed()
            with off:
                return self._step.forward.sequence_logprobs(rows)
        finally:
            for name, tensor in tensors.items():
                tensor.copy_(backup[name])
            self._step.weights.changed()

    def _published(self, path: Path) -> dict[str, torch.Tensor]:
        """The tensors of a published file, which is in the memory of rank 0's machine: other
        machines are sent them."""
        first = self.group.rank == 0
        read = load_file(path) if self._one_machine or first else {}
        if self._one_machine:
            return read
        published = {}
        for name, tensor in self._tensors(self.publishes.kind).items():
            dtype = self._published_dtype(tensor)
            value = read.pop(name) if first else torch.empty(tensor.shape, dtype=dtype)
            self.group.broadcast(value)
            published[name] = value
        return published

    # -- checkpoints

    def snapshot(self) -> dict[str, Part]:
        """A copy, on the CPU, of all that a checkpoint needs of this rank: weights to full
        precision, moments, the warm-up's count, the state of torch's random generators. Not within
        a step."""
        parts = {}
        for name, tensor in self._step.tensors().items():
            kind, _, of = name.partition(".")
            if self.group.size > 1 and kind in SHARDED:
                rows = local_rows(self._step.weights.shape(of)[0], self.group)
                parts[name] = Part(_copied(tensor), rows.start)
            elif self.group.rank == 0:
                parts[name] = Part(_copied(tensor))
        for name, state in self._random_states().items():
            parts[name] = Part(_copied(state))
        return parts

    def restore(self, folder: Path) -> None:
        """Take over the checkpoint in a folder, which any number of ranks may have written. Raises
        UserError when it is of another model."""
        try:
            shapes = tensor_files.shapes(folder)
            wanted = self._wanted(shapes)
            tensor_files.read(folder, wanted)
            local = {name: _local(tensor) for name, tensor in wanted.items()}
            self._set_random_states(local)
            self._step.load_tensors(local)
        except ValueError as error:
            raise UserError(
                f"the checkpoint does not fit model.path {self.folder}: {error}; start over with "
                "--fresh"
            ) from error

    def _wanted(self, shapes: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
        """Room for what this rank needs of the tensors of a checkpoint."""
        wanted: dict[str, torch.Tensor] = {}
        random = self._random_states()
        for name, (shape, dtype) in shapes.items():
            kind = name.partition(".")[0]
            if kind == "random" and name not in random:
                continue
            if self.group.size > 1 and kind in SHARDED:
                rows = local_rows(shape[0], self.group)
                local = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=dtype)
                wanted[name] = as_sharded(local, shape)
            else:
                wanted[name] = torch.empty(shape, dtype=dtype)
        return wanted

    def _random_states(self) -> dict[str, torch.Tensor]:
        states = {f"random.cpu.{self.group.rank}": torch.get_rng_state()}
        if self.device.type == "cuda":
            states[f"random.cuda.{self.group.rank}"] = torch.cuda.get_rng_state(self.device)
        return states

    def _set_random_states(self, tensors: dict[str, torch.Tensor]) -> None:
        """Ranks that were not there when the checkpoint was written begin with the seed's."""
        for name in self._random_states():
            state = tensors.pop(name, None)
            if state is None:
                continue
            if name.startswith("random.cuda"):
                torch.cuda.set_rng_state(state, self.device)
            else:
                torch.set_rng_state(state)

    def _published_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Shards are float32 whatever the model's dtype is; with one rank the model has its own."""
        sharded = isinstance(tensor, DTensor)
        return self._dtype if sharded else tensor.dtype

    def _own_rows(self, value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if value.shape == local.shape:
            return value
        return value[local_rows(value.shape[0], self.group)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is on this rank; writing to it writes to the tensor."""
    tensor = tensor.detach()
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
