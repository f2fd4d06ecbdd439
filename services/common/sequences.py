"""Training sequences on the wire: read into arrays, with the invariants that whoever makes or reads
one checks."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from headrace.v1 import rollout_pb2
from numpy.typing import NDArray

BATCH_TOKENS = 32_768
"""Sequences are read together up to so many tokens: numpy's cost is by the call for short ones, and
by fresh pages of memory for arrays of several megabytes."""

T = TypeVar("T")


class BrokenSequence(ValueError):
    """A sequence that breaks its promise; the message says how, `index` which of them it is."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


@dataclass(frozen=True)
class Tokens:
    """Sequences one after the other, in memory of their own, which may be written to.

    Example: of sequences with 3 and 2 tokens `starts` is [0, 3, 5], and the second one's
    log-probabilities are `logprobs[3:5]`.
    """

    token_ids: NDArray[np.uint32]
    """[T] of all."""
    trained_mask: NDArray[np.uint8]
    """[T] 0 or 1."""
    logprobs: NDArray[np.float32]
    """[T] finite where the mask is 1."""
    starts: list[int]
    """Where each begins, and T."""

    def index_at(self, position: int) -> int:
        """Which sequence a position lies in."""
        return bisect_right(self.starts, position) - 1


def batches(
    holders: Iterable[T], *, sequence_of: Callable[[T], rollout_pb2.Sequence]
) -> Iterator[list[T]]:
    """Messages that hold a sequence each, in their order, to be read together.

    Example: lengths 20,000, 10,000, 5,000 and 40,000 -> the first two, the third, the fourth.
    """
    batch, num_tokens = list[T](), 0
    for holder in holders:
        length = len(sequence_of(holder).trained_mask)
        if batch and num_tokens + length > BATCH_TOKENS:
            yield batch
            batch, num_tokens = [], 0
        batch.append(holder)
        num_tokens += length
    if batch:
        yield batch


def read_sequences(sequences: Iterable[rollout_pb2.Sequence]) -> Tokens:
    """Read and check. Raises BrokenSequence.

    Promised are one mask byte and one log-probability for each token, mask 0 or 1 and 0 at the
    first token (it has no predecessor to be predicted from), and finite log-probabilities where
    the mask is 1.
    """
    ids, masks, logprobs, starts = list[bytes](), list[bytes](), list[bytes](), [0]
    for index, sequence in enumerate(sequences):
        # Each access to a field of bytes is a copy.
        ids.append(sequence.token_ids)
        masks.append(sequence.trained_mask)
        logprobs.append(sequence.logprobs)
        if broken := _broken_shape(ids[-1], masks[-1], logprobs[-1]):
            raise BrokenSequence(index, broken)
        starts.append(starts[-1] + len(masks[-1]))
    tokens = Tokens(
        np.frombuffer(bytearray().join(ids), "<u4"),
        np.frombuffer(bytearray().join(masks), np.uint8),
        np.frombuffer(bytearray().join(logprobs), "<f4"),
        starts,
    )
    _check_values(tokens)
    return tokens


def broken_invariant(sequence: rollout_pb2.Sequence) -> str | None:
    """What is wrong with a sequence, or None."""
    try:
        read_sequences([sequence])
    except BrokenSequence as error:
        return str(error)
    return None


def _broken_shape(ids: bytes, mask: bytes, logprobs: bytes) -> str | None:
    if not len(ids) == len(logprobs) == 4 * len(mask):
        lengths = (len(ids), len(mask), len(logprobs))
        return f"token_ids, trained_mask, logprobs have {lengths} bytes; expected (4n, n, 4n)"
    if not mask:
        return "it has no tokens"
    if mask[0] != 0:
        return "its first token is marked as trained"
    return None


def _check_values(tokens: Tokens) -> None:
    odd = tokens.trained_mask > 1
    if odd.any():
        index = tokens.index_at(int(odd.argmax()))
        raise BrokenSequence(index, "its mask has values other than 0 and 1")
    finite = np.isfinite(tokens.logprobs)
    if finite.all():
        return
    bad = ~finite & (tokens.trained_mask == 1)
    if bad.any():
        index = tokens.index_at(int(bad.argmax()))
        raise BrokenSequence(index, "a trained token has a log-probability that is not finite")
