"""Sequences read together: what is wrong is said of the one that it is wrong with."""

import numpy as np
import pytest
from headrace.v1 import rollout_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.common.sequences import (
    BATCH_TOKENS,
    BrokenSequence,
    batches,
    broken_invariant,
    read_sequences,
)


def sequence(length: int, *, first: int = 0) -> rollout_pb2.Sequence:
    """One token of context, the rest trained; ids count up from `first`."""
    mask = np.arange(length) >= 1
    return rollout_pb2.Sequence(
        token_ids=np.arange(first, first + length, dtype="<u4").tobytes(),
        trained_mask=mask.astype(np.uint8).tobytes(),
        logprobs=(-0.5 * mask).astype("<f4").tobytes(),
    )


def test_sequences_lie_one_after_the_other() -> None:
    tokens = read_sequences([sequence(3), sequence(2, first=10)])
    assert tokens.token_ids.tolist() == [0, 1, 2, 10, 11]
    assert tokens.trained_mask.tolist() == [0, 1, 1, 0, 1]
    assert tokens.logprobs.tolist() == [0, -0.5, -0.5, 0, -0.5]
    assert tokens.starts == [0, 3, 5]
    assert [tokens.index_at(position) for position in range(5)] == [0, 0, 0, 1, 1]
    tokens.logprobs[0] = 1  # they are the reader's own


def test_nothing_is_read_of_nothing() -> None:
    assert read_sequences([]).starts == [0]
    assert list(batches([], sequence_of=lambda each: each)) == []


def broken() -> dict[str, rollout_pb2.Sequence]:
    """By what is said of them."""
    uneven, empty, begun, odd, nan = (sequence(3) for _ in range(5))
    uneven.trained_mask += b"\1"
    empty.Clear()
    begun.trained_mask = b"\1\1\1"
    odd.trained_mask = b"\0\1\2"
    nan.logprobs = np.array([0, -1, np.nan], "<f4").tobytes()
    return {
        "(12, 4, 12) bytes; expected (4n, n, 4n)": uneven,
        "it has no tokens": empty,
        "its first token is marked as trained": begun,
        "its mask has values other than 0 and 1": odd,
        "a trained token has a log-probability that is not finite": nan,
    }


@pytest.mark.parametrize("why", broken())
@pytest.mark.parametrize("index", range(3))
def test_the_broken_one_is_named(why: str, index: int) -> None:
    good = [sequence(length) for length in (1, 4, 2)]
    good[index] = broken()[why]
    with pytest.raises(BrokenSequence) as raised:
        read_sequences(good)
    assert raised.value.index == index
    assert str(raised.value).endswith(why)
    assert str(broken_invariant(good[index])).endswith(why)


def test_what_is_not_trained_may_have_any_log_probability() -> None:
    context = sequence(3)
    context.logprobs = np.array([np.nan, -1, -1], "<f4").tobytes()
    assert broken_invariant(context) is None


def test_batches_hold_so_many_tokens() -> None:
    lengths = [20_000, 10_000, 5_000, 40_000]
    found = batches(map(sequence, lengths), sequence_of=lambda each: each)
    assert [[len(each.trained_mask) for each in batch] for batch in found] == [
        [20_000, 10_000],
        [5_000],
        [40_000],
    ]


@given(st.lists(st.integers(1, BATCH_TOKENS + 1), max_size=6))
def test_batches_lose_nothing_and_keep_the_order(lengths: list[int]) -> None:
    made = [(number, sequence(length)) for number, length in enumerate(lengths)]
    found = list(batches(made, sequence_of=lambda each: each[1]))
    assert [number for batch in found for number, _ in batch] == list(range(len(lengths)))
    sizes = [sum(len(each.trained_mask) for _, each in batch) for batch in found]
    for batch, size in zip(found, sizes, strict=True):
        assert size <= BATCH_TOKENS or len(batch) == 1
    for before, after in zip(sizes, found[1:], strict=False):
        assert before + len(after[0][1].trained_mask) > BATCH_TOKENS
