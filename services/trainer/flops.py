"""Model FLOPs of training, and the peaks of devices that they are held against.

Model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B) is what the model's arithmetic needs
over what the device could have done meanwhile: nothing that is computed again counts, be it by
gradient checkpointing or for the logits. What is shared is needed once.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from services.trainer.packing import PackedRow

FORWARD_AND_BACKWARD = 3
"""Times the forward: the backward has two products for each of its products, one for the gradient
of the input and one for that of the weight."""

FROZEN = 2
"""The same where the weight has no gradient."""

PEAK_BF16 = (
    (r"\bB200\b", 2250e12),
    (r"\bH200 NVL\b", 835.5e12),
    (r"\b(H200|GH200)\b", 989.5e12),
    (r"\bH100 NVL\b", 835.5e12),
    (r"\bH100 PCIe\b", 756.5e12),
    (r"\bH100\b", 989.5e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362.05e12),
    (r"\bL4\b", 121e12),
)
"""FLOP/s of dense bfloat16 products with float32 sums, by what is in torch's name of the device,
the first that fits. From NVIDIA's data sheets, which give twice the number "with sparsity" from
Hopper and Ada on."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that a device can do at most; None for a CPU, for a device that is not known, and for
    float32, whose peak depends on what torch may round."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """FLOP/s by the name that torch gives a device.

    Example: "NVIDIA H100 80GB HBM3" has 989.5e12, "NVIDIA H100 PCIe" 756.5e12.
    """
    return next((peak for pattern, peak in PEAK_BF16 if re.search(pattern, name)), None)


@dataclass(frozen=True)
class Flops:
    """What the forward of a model costs.

    A product of a vector with a matrix of n numbers is 2 n FLOPs; a pair of a query and a key that
    it sees is 2 x (size of a key + size of a value) for each head (Kaplan et al. 2020,
    arXiv:2001.08361, table 1). Norms, activations and the recurrences of linear attention are left
    out; they are small beside these.

    Example: 1,000 numbers in matrices, 2 layers with 4 heads of 8 and full attention, a head of
    500 numbers: `per_token` 2,000, `per_pair` {None: 2 x 4 x 2 x (8 + 8) = 256}, `per_logits`
    1,000. A row of one sample of 11 tokens of which 4 are trained: 10 tokens are forwarded, 55
    pairs seen, and 4 positions go through the head: 3 x (10 x 2,000 + 55 x 256 + 4 x 1,000) =
    114,240.
    """

    per_token: float
    """Of a forwarded token."""
    per_pair: dict[int | None, float]
    """Of a pair, over all layers with the same sliding window; None: with full attention."""
    per_logits: float
    """Of a position whose logits are needed."""
    token_passes: float = FORWARD_AND_BACKWARD
    """Forward and backward of a token over its forward: less where weights are frozen."""
    head_passes: float = FORWARD_AND_BACKWARD
    """The same of a position's logits."""

    @classmethod
    def of_model(cls, model: Any) -> "Flops":
        """Counted from the parameters of a causal language model of transformers, before they are
        sharded, and the shape of its attention."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings().weight
        tables = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, torch.nn.Embedding)
        }
        numbers, passes = 0.0, 0.0
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and id(parameter) not in tables and parameter is not head:
                used = parameter.numel() * _share_of_experts(name, parameter, config)
                numbers += used
                passes += used * _passes(parameter)
        per_pair: dict[int | None, float] = {}
        for window, layer in _attending(config):
            heads = getattr(layer, "num_attention_heads", None) or 0
            cost = 2.0 * heads * (_key_size(layer) + _value_size(layer))
            per_pair[window] = per_pair.get(window, 0.0) + cost
        return cls(
            per_token=2.0 * numbers,
            per_pair=per_pair,
            per_logits=2.0 * head.numel(),
            token_passes=passes / numbers if numbers else FORWARD_AND_BACKWARD,
            head_passes=_passes(head),
        )

    def of_row(self, row: PackedRow) -> float:
        """Of forward and backward of a packed row."""
        seen = row.position_ids + 1
        pairs = sum(
            per_pair * int((seen if window is None else seen.clamp(max=window)).sum())
            for window, per_pair in self.per_pair.items()
        )
        tokens, positions = row.num_forwarded, row.positions.shape[0]
        return (
            self.token_passes * tokens * self.per_token
            + FORWARD_AND_BACKWARD * pairs
            + self.head_passes * positions * self.per_logits
        )


def _passes(parameter: torch.Tensor) -> int:
    return FORWARD_AND_BACKWARD if parameter.requires_grad else FROZEN


def _share_of_experts(name: str, parameter: torch.Tensor, config: Any) -> float:
    """Share of a parameter that one token is multiplied with: all, but of experts those chosen."""
    if ".experts." not in name:
        return 1.0
    chosen = getattr(config, "num_experts_per_tok", None)
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    num_experts = next((n for key in counts if (n := getattr(config, key, None))), None)
    return chosen / num_experts if chosen and num_experts else 1.0


def _key_size(config: Any) -> int:
    """Numbers of a key, and of a query, in one head."""
    # Multi-head latent attention has a part with and a part without positions.
    latent = getattr(config, "qk_head_dim", None)
    return latent or _head_size(config)


def _value_size(config: Any) -> int:
    return getattr(config, "v_head_dim", None) or _head_size(config)


def _head_size(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None)
    return int(size or (config.hidden_size // heads if heads else 0))


def _attending(config: Any) -> Iterator[tuple[int | None, Any]]:
    """Of every layer with attention: its window, None for all tokens, and its configuration."""
    kinds = getattr(config, "layer_types", None)
    for number in range(config.num_hidden_layers):
        # Of some families layers differ in the number or size of heads.
        layer = config.per_layer_config[number] if _differ(config) else config
        window = getattr(layer, "sliding_window", None) or None
        kind = kinds[number] if kinds else "sliding_attention"
        if kind == "chunked_attention":
            yield getattr(layer, "attention_chunk_size", None), layer
        elif kind in ("full_attention", "sliding_attention"):
            yield window if kind == "sliding_attention" else None, layer


def _differ(config: Any) -> bool:
    return getattr(config, "is_heterogeneous", False) is True
