"""The load-balancing loss of a mixture of experts, over the tokens that a row forwards."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import torch

ARGUMENTS = ["gate_logits", "num_experts", "top_k"]
"""Of the function that most families share."""


@dataclass(frozen=True)
class RouterLoss:
    """Experts x sum over experts of (share of tokens sent to it) x (mean routing probability): 1
    times the experts per token when all are loaded alike, more when some are favoured (Switch
    Transformer, arXiv:2101.03961, equations 4 to 6).

    The gradient runs through the probabilities alone. It is a mean over the tokens of one forward,
    no sum, so the step's value depends on how its samples are put into rows.
    """

    function: Callable[..., torch.Tensor]
    """The model's own, from the module of transformers that defines it."""
    num_experts: int
    num_experts_per_token: int

    @classmethod
    def of(cls, model: Any) -> "RouterLoss | None":
        """The loss of a causal language model of transformers; None where it has none (no experts,
        or balanced without a loss, as DeepSeek-V3 is)."""
        function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
        num_experts = getattr(model, "num_experts", None)
        per_token = getattr(model, "num_experts_per_tok", None)
        if function is None or num_experts is None or per_token is None:
            return None
        if list(inspect.signature(function).parameters)[:3] != ARGUMENTS:
            structlog.get_logger().warning(
                "the load-balancing loss of this family is of another kind: it is left out",
                model=type(model).__name__,
            )
            return None
        return cls(function, int(num_experts), int(per_token))

    @property
    def options(self) -> dict[str, bool]:
        """What the base model is called with, so that its output has router logits."""
        return {"output_router_logits": True}

    def __call__(self, outputs: Sequence[Any]) -> torch.Tensor | None:
        """The loss over the tokens of a row, forwarded in one or several calls of the base model;
        None where no layer has a router."""
        layers = [tuple(output.router_logits or ()) for output in outputs]
        if not layers[0]:
            return None
        logits = tuple(torch.cat(parts) for parts in zip(*layers, strict=True))
        return self.function(logits, self.num_experts, self.num_experts_per_token)
