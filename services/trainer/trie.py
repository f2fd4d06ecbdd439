"""Shared prefixes: sequences in lexicographic order, and the trie that holds each shared token
once. Pure numpy.

In lexicographic order a sequence shares its longest prefix with its neighbour, so one number a
sequence, the length of the prefix shared with the one before, describes the whole trie. Nodes are
numbered in the order of a depth-first walk (preorder), which makes "is an ancestor of" a comparison
of numbers: node k is an ancestor of q, or q itself, exactly when `k <= q < ends[k]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PrefixOrder:
    """Sequences in lexicographic order."""

    order: Ints
    """[S] index of the sequence at each place."""
    lengths: Ints
    """[S] tokens of the sequence at each place."""
    shared: Ints
    """[S] tokens that it shares with the one before; 0 for the first."""


def prefix_order(sequences: Sequence[Ints]) -> PrefixOrder:
    """Sort sequences by their tokens and measure what neighbours share.

    Example: `[[1, 2, 3], [1, 2], [1, 2, 4]]` gives order `[1, 0, 2]`, lengths `[2, 3, 3]`, shared
    `[0, 2, 2]`: a trie of 2 + 1 + 1 = 4 tokens.
    """
    # Big-endian bytes compare like the numbers that they hold, and comparing bytes is memcmp.
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), np.int64)
    for place in range(1, len(order)):
        before, this = sequences[order[place - 1]], sequences[order[place]]
        size = min(before.size, this.size)
        differs = before[:size] != this[:size]
        first = int(differs.argmax()) if size else 0
        shared[place] = first if size and differs[first] else size
    lengths = np.array([sequences[index].size for index in order], np.int64)
    return PrefixOrder(order=np.array(order, np.int64), lengths=lengths, shared=shared)


@dataclass(frozen=True, eq=False)
class Trie:
    """The trie of several sequences, flattened in preorder to N nodes of one token each."""

    token_ids: Ints
    """[N] the node's token."""
    depths: Ints
    """[N] its position in every sequence that runs through it."""
    ends: Ints
    """[N] one past the last node below it: k is an ancestor of q, or q itself, when k <= q <
    ends[k]."""
    run_starts: Ints
    """[R] where a run begins: the tokens that one sequence adds, each the child of the one before
    it."""
    nodes: list[Ints]
    """Per sequence, the nodes at the depths that were asked for."""

    def run_sizes(self) -> Ints:
        """[R] tokens of every run."""
        return np.diff(self.run_starts, append=self.token_ids.size)

    def paths(self) -> list[Ints]:
        """Per run, the nodes from the root to its last one; the run's own are the last of them."""
        stops = self.run_starts + self.run_sizes()
        return [
            np.append(np.flatnonzero(self.ends[:start] > start), np.arange(start, stop))
            for start, stop in zip(self.run_starts.tolist(), stops.tolist(), strict=True)
        ]


def build_trie(
    sequences: Sequence[Ints], *, depths: Sequence[Ints], share_prefixes: bool = True
) -> Trie:
    """Build the trie; `nodes[s]` answers `depths[s]` (each below the sequence's length).

    With `share_prefixes=False` every sequence gets nodes of its own (a forest of bare chains, in
    the given order).
    """
    if share_prefixes:
        sorted_by = prefix_order(sequences)
        order, shared = sorted_by.order.tolist(), sorted_by.shared.tolist()
    else:
        order, shared = list(range(len(sequences))), [0] * len(sequences)
    tails = [sequences[index][keep:] for index, keep in zip(order, shared, strict=True)]
    num_nodes = sum(tail.size for tail in tails)
    node_depths = np.empty(num_nodes, np.int64)
    ends = np.full(num_nodes, num_nodes, np.int64)
    nodes: list[Ints] = [np.empty(0, np.int64)] * len(sequences)
    run_starts = []
    longest = max((sequence.size for sequence in sequences), default=0)
    path = np.empty(longest, np.int64)
    numbers = np.arange(max(longest, num_nodes))
    length = start = 0
    for index, keep, tail in zip(order, shared, tails, strict=True):
        # What the last path had below the common prefix gets no more children.
        ends[path[keep:length]] = start
        length, stop = keep + tail.size, start + tail.size
        path[keep:length] = numbers[start:stop]
        node_depths[start:stop] = numbers[keep:length]
        nodes[index] = path[depths[index]]
        if tail.size:
            run_starts.append(start)
        start = stop
    return Trie(
        token_ids=np.concatenate(tails) if tails else np.empty(0, np.int64),
        depths=node_depths,
        ends=ends,
        run_starts=np.array(run_starts, np.int64),
        nodes=nodes,
    )
