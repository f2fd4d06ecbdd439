"""Attention over packed rows: every token sees exactly its path from the root of the trie.

The function is registered with transformers as an attention implementation, works on any device,
and gets the row's plan (attention_plan.py) as the keyword `attention_plan` of `model(...)`; without
a plan it is plain causal attention over unpadded rows.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from services.trainer.attention_plan import AttentionPlan

IMPLEMENTATION = "headrace_packed"
"""Name of the attention implementation in transformers."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_plan: AttentionPlan | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [1, heads, N, d], key and value [1, key heads, N,
    d].

    Returns [1, N, heads, d]. Raises ValueError for what would make packed rows wrong or random:
    dropout, a mask, a sliding window, attention sinks, soft-capped scores.
    """
    extras = ("sliding_window", "softcap", "s_aux")
    asked = [name for name in extras if kwargs.get(name) is not None]
    asked += ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
    if asked:
        raise ValueError(f"packed attention does not know {', '.join(asked)}")
    if attention_plan is None:
        causal = query.shape[2] > 1
        output = _attend(query, key, value, mask=None, causal=causal, scaling=scaling)
        return output.transpose(1, 2), None
    _, num_heads, _, size = query.shape
    # [N, heads x d] lies in memory as the projections wrote it: a gather copies whole rows.
    stacks = attention_plan.stacks
    query_sizes = [stack.num_blocks * stack.num_queries for stack in stacks]
    key_sizes = [stack.num_blocks * stack.num_keys for stack in stacks]
    # split, not slices: the backward of each slice fills a tensor of the whole size, that of split
    # is one cat.
    queries = _rows(query).index_select(0, attention_plan.query_index).split_with_sizes(query_sizes)
    keys = _rows(key).index_select(0, attention_plan.key_index).split_with_sizes(key_sizes)
    values = _rows(value).index_select(0, attention_plan.key_index).split_with_sizes(key_sizes)
    outputs = []
    for stack, q, k, v in zip(stacks, queries, keys, values, strict=True):
        output = _attend(
            _heads(q, stack.num_blocks, size),
            _heads(k, stack.num_blocks, size),
            _heads(v, stack.num_blocks, value.shape[-1]),
            mask=stack.mask,
            causal=stack.mask is None,
            scaling=scaling,
        )
        outputs.append(output.transpose(1, 2).flatten(2).flatten(0, 1))
    output = torch.cat(outputs).index_select(0, attention_plan.output_index)
    return output.view(1, -1, num_heads, value.shape[-1]), None


def _rows(states: torch.Tensor) -> torch.Tensor:
    """[1, heads, N, d] -> [N, heads x d]."""
    return states[0].transpose(0, 1).flatten(1)


def _heads(rows: torch.Tensor, num_blocks: int, size: int) -> torch.Tensor:
    """[blocks x tokens, heads x d] -> [blocks, heads, tokens, d]."""
    return rows.view(num_blocks, rows.shape[0] // num_blocks, -1, size).transpose(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """One call of scaled_dot_product_attention; fewer key heads than query heads are shared."""
    repeats = query.shape[1] // key.shape[1]
    if mask is not None and query.device.type == "cuda" and repeats > 1:
        # On CUDA a mask together with enable_gqa falls back to the kernel that stores all scores.
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _no_mask(attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """The mask that transformers asks for: none. Raises ValueError for a padded batch, which would
    go wrong silently."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("packed attention takes unpadded rows; attention_mask has zeros")


AttentionInterface.register(IMPLEMENTATION, packed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
