"""What a run with an adapter publishes: the adapter alone, or the whole model with it merged in."""

from dataclasses import dataclass
from typing import Any, Literal

import structlog

from services.common.errors import UserError
from services.common.training_config import Lora
from services.trainer import lora
from services.trainer.adapter_architectures import SERVED

Kind = Literal["all", "adapter", "base", "merged"]
"""Some of a model's tensors: all of one that is not adapted; of an adapted one the adapter, the
frozen rest, or all with the adapter merged in."""


@dataclass(frozen=True)
class Choice:
    """What is published, and why not the adapter alone."""

    kind: Kind
    reason: str = ""


def choose(settings: Lora, model: Any) -> Choice:
    """What generators are sent of an adapted model; every rank finds the same. Raises UserError
    when the recipe asks for adapters that vLLM does not serve."""
    if settings.publish == "merged":
        return Choice("merged", 'trainer.lora.publish = "merged"')
    if reason := why_not_served(model):
        if settings.publish == "adapter":
            raise UserError(
                f'trainer.lora.publish: "adapter" cannot be: {reason}; set it to "auto" or "merged"'
            )
        return Choice("merged", reason)
    return Choice("adapter")


def why_not_served(model: Any) -> str:
    """What speaks against serving adapters of this model with vLLM; empty for nothing."""
    names = model.config.architectures or [type(model).__name__]
    if not SERVED.intersection(names):
        return f"vLLM serves no adapters of {names[0]}"
    if any(lora.is_transposed(layer.get_base_layer()) for layer in lora.layers(model).values()):
        return "vLLM serves adapters of linear layers, and some of these are convolutions"
    return ""


def say(choice: Choice, model: Any) -> None:
    """Log what is trained and what is published."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    structlog.get_logger().info(
        "training an adapter",
        layers=len(lora.layers(model)),
        trained_parameters=trained,
        frozen_parameters=sum(p.numel() for p in model.parameters()) - trained,
        published="adapter" if choice.kind == "adapter" else f"merged because {choice.reason}",
    )
