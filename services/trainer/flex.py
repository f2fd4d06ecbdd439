"""Attention over packed rows by flex_attention (arXiv:2412.05496): one call a layer, which skips
the squares of the mask that nobody needs. For GPUs: it has no backward on CPUs.

A row is a trie in preorder, so one comparison says who sees whom: key k is on the path of query q
when `k <= q < ends[k]`; with a window of w tokens also `depth of q - depth of k < w`, since a path
has one token a depth.
"""

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from services.trainer.attention_plan import AttentionPlan


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    plan: AttentionPlan,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """query [1, heads, N, d], key and value [1, key heads, N, d] -> [1, N, heads, d].

    window: tokens that a query sees, itself included; None: all of its path.
    """
    if window not in plan.flex_masks:
        plan.flex_masks[window] = _mask(plan, window, query.device)
    kernel: Any = _compiled() if query.device.type == "cuda" else flex_attention
    output: torch.Tensor = kernel(
        query,
        key,
        value,
        block_mask=plan.flex_masks[window],
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)


def _mask(plan: AttentionPlan, window: int | None, device: torch.device) -> BlockMask:
    ends = torch.from_numpy(plan.trie.ends).to(device)
    depths = torch.from_numpy(plan.trie.depths).to(device)

    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        on_path = (key <= query) & (query < ends[key])
        return on_path if window is None else on_path & (depths[query] - depths[key] < window)

    return create_block_mask(sees, None, None, ends.numel(), ends.numel(), device=str(device))


@cache
def _compiled() -> Any:
    # Not compiled it keeps all scores in memory. Rows differ in length: one kernel for all of them.
    return torch.compile(flex_attention, dynamic=True)
