"""Attention over packed rows: every token sees exactly its path from the root of the trie.

The function is registered with transformers as an attention implementation, works on any device,
and gets the row's plan (attention_plan.py) as the keyword `attention_plan` of `model(...)`; without
a plan it is plain causal attention over unpadded rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from services.trainer import flex
from services.trainer.attention_plan import AttentionPlan

IMPLEMENTATION = "headrace_packed"
"""Name of the attention implementation in transformers."""

UNKNOWN = ("position_bias", "indices", "block_indices", "cu_seq_lens_q")
"""Arguments of attention that change scores in ways that are not implemented here."""


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention_kernel: str = "blocks",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [1, heads, N, d], key and value [1, key heads, N,
    d].

    sliding_window: tokens that a query sees, itself included. softcap: scores s become c tanh(s/c)
    (Gemma 2, arXiv:2408.00118). s_aux [heads]: attention sinks, a score a head that takes part in
    the softmax and has no value (gpt-oss). attention_kernel: "blocks", or "flex" for plain scores
    (flex.py).

    Returns [1, N, heads, d]. Raises ValueError for what would make packed rows wrong or random:
    dropout, a mask, a bias of the scores, layers that are not causal.
    """
    asked = ["dropout"] * bool(dropout) + ["attention_mask"] * (attention_mask is not None)
    asked += [name for name in UNKNOWN if kwargs.get(name) is not None]
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        asked.append("bidirectional layers")
    if asked:
        raise ValueError(f"packed attention does not know {', '.join(asked)}")
    sliding_window = sliding_window or None  # Qwen2-MoE's configuration says 0 for none
    scores = _Scores(scaling=scaling, softcap=softcap, sinks=s_aux)
    if attention_plan is None:
        mask = _window_mask(query.shape[2], sliding_window, query.device)
        output = _attend(query, key, value, mask=mask, scores=scores)
        return output.transpose(1, 2), None
    if attention_kernel == "flex":
        if not scores.plain:
            raise ValueError("flex attention is for scores without soft cap and sinks")
        return flex.attend(
            query, key, value, plan=attention_plan, window=sliding_window, scaling=scaling
        ), None
    attention_plan = attention_plan.for_window(sliding_window)
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
            scores=scores,
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


@dataclass(frozen=True)
class _Scores:
    """How scores are made of queries and keys."""

    scaling: float | None
    """Factor; 1 / sqrt(d) by default."""
    softcap: float | None
    sinks: torch.Tensor | None
    """[heads]."""

    @property
    def plain(self) -> bool:
        """Whether scaled_dot_product_attention knows them."""
        return self.softcap is None and self.sinks is None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scores: _Scores,
) -> torch.Tensor:
    """Attention of blocks [B, heads, queries, d]; no mask is plain causal. Fewer key heads than
    query heads are shared."""
    if not scores.plain:
        return _attend_explicitly(query, key, value, mask=mask, scores=scores)
    repeats = query.shape[1] // key.shape[1]
    if mask is not None and query.device.type == "cuda" and repeats > 1:
        # On CUDA a mask together with enable_gqa falls back to the kernel that stores all scores.
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and query.shape[2] > 1,
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_explicitly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scores: _Scores,
) -> torch.Tensor:
    """The same with all scores in memory, for those that scaled_dot_product_attention does not
    know."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    logits = query @ key.transpose(2, 3) * scaling
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    if mask is None:
        places = torch.arange(query.shape[2], device=query.device)
        mask = places[:, None] >= places[None]
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    if scores.sinks is not None:
        sinks = scores.sinks.to(logits.dtype).view(1, -1, 1, 1)
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], dim=-1)
    precise = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.softmax(-1, dtype=precise).to(query.dtype)
    return weights[..., : key.shape[2]] @ value


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """[length, length] True where a query of a plain row sees the key; None where the window
    reaches over the whole row."""
    if window is None or window >= length:
        return None
    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None]
    return (distance >= 0) & (distance < window)


def _no_mask(attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """The mask that transformers asks for: none. Raises ValueError for a padded batch, which would
    go wrong silently."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("packed attention takes unpadded rows; attention_mask has zeros")


AttentionInterface.register(IMPLEMENTATION, packed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
