"""The adapter (LoRA, arXiv:2106.09685) of a model that is otherwise frozen, by peft.

An adapted linear layer with weights W [out, in] computes W x + s B A x with A [rank, in] and
B [out, rank], s = alpha / rank. B begins as 0, so that the policy begins as the model. Names of
tensors, by example:

    model.layers.0.mlp.up_proj.lora_A.default.weight          of the model while it is trained
    base_model.model.model.layers.0.mlp.up_proj.lora_A.weight  in files, as peft has them
    model.layers.0.mlp.up_proj.base_layer.weight              the frozen W; `.base_layer` left out
                                                              in files
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from transformers.pytorch_utils import Conv1D

from services.common.errors import UserError
from services.common.training_config import Lora

ADAPTER = "default"
"""peft's name of the one adapter there is."""

FILE_PREFIX = "base_model.model."
"""Of names in files: peft's own wrapper around the model."""

NAMED_LAYERS = 12
"""So many names of layers are shown in a mistake."""


def add_adapter(model: Any, settings: Lora) -> None:
    """Freeze a causal language model and adapt its layers in place; the adapter has the dtype of
    the layers, and is drawn from torch's random state. Raises UserError for layers that cannot be
    adapted."""
    chosen, modules = _chosen(model, settings), dict(model.named_modules())
    config = LoraConfig(**_arguments(settings, {name: modules[name] for name in chosen}))
    model.requires_grad_(False)
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for layer in layers(model).values():
        # peft has them in float32. Here the forward computes with what is published, and float32
        # masters are beside it (masters.py).
        dtype = layer.get_base_layer().weight.dtype
        layer.lora_A.to(dtype)
        layer.lora_B.to(dtype)


def layers(model: Any) -> dict[str, LoraLayer]:
    """The adapted layers by their names in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def is_adapter(name: str) -> bool:
    """Whether a tensor of the model is the adapter's."""
    return f".{ADAPTER}." in name and (".lora_A." in name or ".lora_B." in name)


def file_name(name: str) -> str:
    """The name in files of a tensor of an adapted model.

    Example: of "model.norm.weight", which is not adapted, it is the same.
    """
    if is_adapter(name):
        return FILE_PREFIX + name.replace(f".{ADAPTER}.", ".")
    return name.replace(".base_layer.", ".")


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """The model as it was before it was adapted, for a while. Nothing may be computed with it
    elsewhere meanwhile."""
    with rescale_adapter_scale(model, 0.0):
        yield


def change(a: torch.Tensor, b: torch.Tensor, *, scaling: float, transposed: bool) -> torch.Tensor:
    """What an adapter adds to a layer's weights, float32: s B A, [out, in], or [in, out] for a
    layer that has its weights so.

    Example: A = [[1, 2]], B = [[3], [4]] and s = 2 give [[6, 12], [8, 16]].
    """
    product = scaling * (b.float() @ a.float())
    return product.T if transposed else product


def is_transposed(layer: torch.nn.Module) -> bool:
    """Whether a layer has its weights as [in, out]."""
    return isinstance(layer, Conv1D)


@torch.no_grad()
def merge(model: Any, adapter: Mapping[str, torch.Tensor], settings: Lora) -> Any:
    """Add an adapter, by the names it has while it is trained, to a model that has none; the model.
    Raises UserError when it is of another model."""
    for name, layer in layers_of(model, adapter).items():
        first, second = (f"{name}.lora_{factor}.{ADAPTER}.weight" for factor in "AB")
        try:
            a, b = adapter[first], adapter[second]
            weight = cast(torch.Tensor, layer.weight)
            added = change(
                a, b, scaling=settings.alpha / settings.rank, transposed=is_transposed(layer)
            )
            if added.shape != weight.shape:
                raise ValueError(f"{name} has shape {list(weight.shape)}, not {list(added.shape)}")
        except (AttributeError, KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"the adapter is of another model: {error}") from error
        weight.copy_(weight.float() + added)
    return model


def config_file(settings: Lora, adapted: Mapping[str, Any], *, base: str | None) -> bytes:
    """peft's description of an adapter of these layers, adapted or not, as JSON; always the same
    for the same ones. base: the model that it is of, for AutoPeftModelForCausalLM."""
    plain = {
        name: layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
        for name, layer in adapted.items()
    }
    arguments = _arguments(settings, plain)
    config = LoraConfig(**arguments, base_model_name_or_path=base, inference_mode=True)
    content = config.to_dict() | {"target_modules": arguments["target_modules"]}
    return json.dumps(content, indent=2, sort_keys=True).encode()


def layers_of(model: Any, adapter: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """The layers of a model that has no adapter which these tensors are of, by name; the tensors
    have the names of training. Raises UserError for one that is not there."""
    names = [name.partition(".lora_A.")[0] for name in adapter if ".lora_A." in name]
    try:
        return {name: model.get_submodule(name) for name in names}
    except AttributeError as error:
        raise UserError(f"the adapter is of another model: {error}") from error


def _arguments(settings: Lora, plain: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """peft's, for an adapter of these layers."""
    return {
        # peft warns where it is not as the layers have it.
        "fan_in_fan_out": all(map(is_transposed, plain.values())),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": sorted(plain),
        "lora_dropout": 0.0,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }


def _chosen(model: Any, settings: Lora) -> list[str]:
    """Full names of the layers to adapt."""
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    linear = {
        name: module
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }
    if not settings.target_modules:
        return sorted(linear)
    chosen: list[str] = []
    for target in settings.target_modules:
        found = [name for name in modules if f".{name}".endswith(f".{target}")]
        if any(modules[name] is head for name in found):
            # Log-probabilities read the head's weights themselves (logprobs.py).
            raise UserError(
                f"trainer.lora.target_modules: {target!r} is the output head, which is not adapted "
                "here; leave it out"
            )
        if not found or any(name not in linear for name in found):
            ends = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            raise UserError(
                f"trainer.lora.target_modules: {target!r} is no linear layer of "
                f"{type(model).__name__}, which has {', '.join(list(ends)[:NAMED_LAYERS])}"
            )
        chosen += found
    return sorted(set(chosen))
