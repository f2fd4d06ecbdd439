"""How to attend over a packed row: the trie cut into blocks, blocks of similar size stacked.

A row is a trie in preorder (trie.py). Its runs are cut into blocks, consecutive nodes with a common
set of keys: the ancestors of the block's first node, and the block itself. A block of one whole
sequence is plain causal attention; for others a mask says which keys are ancestors. Blocks of
similar size are stacked, so that one call of scaled_dot_product_attention serves many: a call per
sequence, or one dense mask over the row, is several times slower. All index tensors are computed
once a row and shared by all layers with the same window.

A window of w tokens (sliding-window attention, arXiv:2310.06825) is exact over shared prefixes,
too: the path of a sample has one node a depth, and depth is position, so "the last w positions" are
the ancestors with `depth > query's depth - w`.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.trie import Ints, Trie

COST_OF_KEY = 8
"""Gathering a key and its value, in units of one (query, key) pair; measured on a CPU, 4 heads of
32."""

COST_OF_BLOCK = 2000
"""Attention over one more block, in the same unit."""

MAX_PAIRS = 1 << 22
"""(query, key) pairs of one masked block, and of one stack of blocks: bounds the memory of
masks."""

MAX_STACK_KEYS = 1 << 16
"""Keys of one stack of blocks: bounds what is gathered for one call."""

MIN_WINDOW_BLOCK = 128
"""Runs longer than a window are cut into blocks of the window's size, but not below this."""

GRID = 1.25
"""Blocks are stacked when their sizes differ by at most about this factor; the smaller ones are
padded."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Blocks of similar size that one call serves; padded to the largest."""

    num_blocks: int
    num_queries: int
    num_keys: int
    mask: torch.Tensor | None
    """[blocks, 1, queries, keys] True where the key is the query's ancestor; None for plain causal
    attention."""


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """How to attend over one row of N tokens."""

    query_index: torch.Tensor
    """[sum of blocks x queries over the stacks] node of every query slot."""
    key_index: torch.Tensor
    """[sum of blocks x keys over the stacks] node of every key slot."""
    output_index: torch.Tensor
    """[N] query slot that holds a node's output."""
    stacks: tuple[Stack, ...]
    trie: Trie
    """What the plan is of."""
    windowed: dict[int, "AttentionPlan"] = field(default_factory=dict)
    """Plans by window, made when a layer first asks for one."""
    flex_masks: dict[int | None, Any] = field(default_factory=dict)
    """Masks of flex_attention by window (flex.py), made likewise."""

    def for_window(self, window: int | None) -> "AttentionPlan":
        """The plan for layers that see the last `window` tokens, the query included; None: all.

        A window that reaches over every path of the row is no window.
        """
        if window is None or window > int(self.trie.depths.max()):
            return self
        if window not in self.windowed:
            plan = plan_attention(self.trie, window=window)
            self.windowed[window] = plan.to(self.query_index.device)
        return self.windowed[window]

    def to(self, device: torch.device) -> "AttentionPlan":
        """The same on another device."""
        return AttentionPlan(
            query_index=self.query_index.to(device),
            key_index=self.key_index.to(device),
            output_index=self.output_index.to(device),
            stacks=tuple(
                Stack(s.num_blocks, s.num_queries, s.num_keys, _moved(s.mask, device))
                for s in self.stacks
            ),
            trie=self.trie,
            windowed={window: plan.to(device) for window, plan in self.windowed.items()},
        )


def _moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


@dataclass(frozen=True)
class _Block:
    """Nodes `start` to `stop`; their keys are the nearest `num_ancestors` ancestors of the first,
    and themselves."""

    start: int
    stop: int
    num_ancestors: int
    causal: bool
    """Whether it is one whole sequence: plain causal attention."""

    @property
    def num_queries(self) -> int:
        return self.stop - self.start

    @property
    def num_keys(self) -> int:
        return self.num_ancestors + self.stop - self.start

    @cached_property
    def cost(self) -> float:
        """In (query, key) pairs."""
        pairs = self.num_queries * self.num_keys * (0.5 if self.causal else 1.0)
        return pairs + COST_OF_KEY * self.num_keys + COST_OF_BLOCK


def plan_attention(trie: Trie, *, window: int | None = None) -> AttentionPlan:
    """Cut a trie into blocks and stack them, for layers that see the last `window` tokens (the
    query included), or all."""
    num_nodes = trie.token_ids.size
    query_parts: list[Ints] = []
    key_parts: list[Ints] = []
    output_index = np.empty(num_nodes, np.int64)
    stacks = []
    slot = 0
    for blocks in _stacked(_blocks(trie, window)):
        num_queries = max(block.num_queries for block in blocks)
        num_keys = max(block.num_keys for block in blocks)
        queries = np.empty((len(blocks), num_queries), np.int64)
        # A padding key is no node: it is gathered from node 0 and masked, or behind every causal
        # query.
        keys = np.full((len(blocks), num_keys), -1, np.int64)
        for number, block in enumerate(blocks):
            nodes = np.arange(block.start, block.stop)
            # A padding query repeats the first one, so that no row of the mask is empty (softmax of
            # nothing is NaN).
            queries[number] = block.start
            queries[number, : nodes.size] = nodes
            keys[number, : block.num_ancestors] = _ancestors(trie, block)
            keys[number, block.num_ancestors : block.num_keys] = nodes
            output_index[nodes] = np.arange(slot, slot + nodes.size)
            slot += num_queries
        mask = None if blocks[0].causal else torch.from_numpy(_mask(trie, queries, keys, window))
        stacks.append(Stack(len(blocks), num_queries, num_keys, mask))
        query_parts.append(queries.reshape(-1))
        key_parts.append(np.maximum(keys, 0).reshape(-1))
    return AttentionPlan(
        query_index=torch.from_numpy(np.concatenate(query_parts)),
        key_index=torch.from_numpy(np.concatenate(key_parts)),
        output_index=torch.from_numpy(output_index),
        stacks=tuple(stacks),
        trie=trie,
    )


def _ancestors(trie: Trie, block: _Block) -> Ints:
    """The nearest nodes above the block's first one, from above down."""
    ancestors = np.flatnonzero(trie.ends[: block.start] > block.start)
    return ancestors[ancestors.size - block.num_ancestors :]


def _mask(trie: Trie, queries: Ints, keys: Ints, window: int | None) -> NDArray[np.bool_]:
    """[blocks, 1, queries, keys] whether the key is the query or above it, and in its window."""
    ends = np.where(keys < 0, -1, trie.ends[keys])
    key, query = keys[:, None, None, :], queries[:, None, :, None]
    seen = (key <= query) & (query < ends[:, None, None, :])
    if window is not None:
        seen &= (
            trie.depths[keys][:, None, None, :] > trie.depths[queries][:, None, :, None] - window
        )
    return np.asarray(seen)


def _blocks(trie: Trie, window: int | None) -> list[_Block]:
    """Cut runs into blocks, and join neighbours where one larger block is cheaper than two (greedy,
    in order).

    With a window the first query of a block reaches highest, so `window - 1` ancestors serve all.
    """
    blocks: list[_Block] = []
    stops = np.append(trie.run_starts[1:], trie.token_ids.size)
    for run_start, run_stop in zip(trie.run_starts.tolist(), stops.tolist(), strict=True):
        start = run_start
        while start < run_stop:
            depth = int(trie.depths[start])
            reach = depth if window is None else min(depth, window - 1)
            # A whole sequence within the window needs no mask.
            causal = depth == 0 and (window is None or run_stop - start <= window)
            most = run_stop
            if not causal:
                # A long run under ancestors is cut, so that its mask stays small, and a run longer
                # than the window, so that most pairs of its mask are seen.
                size = MAX_PAIRS // (reach + 4096)
                size = size if window is None else min(size, max(window, MIN_WINDOW_BLOCK))
                most = start + max(1, size)
            block = _Block(start, min(run_stop, most), reach, causal=causal)
            start = block.stop
            if blocks:
                last = blocks[-1]
                # A branch that begins higher up reaches higher up.
                first = int(trie.depths[last.start])
                highest = min(first - last.num_ancestors, depth - reach)
                joined = _Block(last.start, block.stop, first - highest, causal=False)
                small = joined.num_queries * joined.num_keys <= MAX_PAIRS
                if small and joined.cost < last.cost + block.cost:
                    blocks[-1] = joined
                    continue
            blocks.append(block)
    return blocks


def _stacked(blocks: list[_Block]) -> list[list[_Block]]:
    """Group blocks of similar size, each group within the bounds on memory."""
    by_size: dict[tuple[bool, int, int], list[_Block]] = {}
    for block in blocks:
        size = (block.causal, _grid(block.num_queries), _grid(block.num_keys))
        by_size.setdefault(size, []).append(block)
    stacks: list[list[_Block]] = []
    for alike in by_size.values():
        num_queries = max(block.num_queries for block in alike)
        num_keys = max(block.num_keys for block in alike)
        most = MAX_STACK_KEYS // num_keys
        if not alike[0].causal:
            most = min(most, MAX_PAIRS // (num_queries * num_keys))
        most = max(1, most)
        stacks += [alike[first : first + most] for first in range(0, len(alike), most)]
    return stacks


def _grid(size: int) -> int:
    """Number of the size class: multiples of 32 up to 128, then steps of GRID."""
    return -(-size // 32) if size <= 128 else 4 + math.ceil(math.log(size / 128, GRID))
