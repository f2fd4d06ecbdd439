"""What is broadcast, in which order, and cut where."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.trainer.weight_sending import (
    Tensor,
    TransferFailed,
    chunks,
    send_file,
    tensors_of,
)


class Kept:
    """A communicator that keeps what is sent."""

    def __init__(self) -> None:
        self.chunks: list[list[torch.Tensor]] = []
        self.finished = False

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        assert not self.finished
        self.chunks.append([tensor.clone() for tensor in tensors])

    def finish(self) -> None:
        self.finished = True

    def abort(self) -> None: ...


def tensor(num_bytes: int) -> Tensor:
    return Tensor("t", "float16", (num_bytes // 2,))


def test_a_chunk_ends_with_the_tensor_that_is_too_much() -> None:
    sizes = [6, 4, 8, 2]
    found = [
        [each.num_bytes for each in chunk]
        for chunk in chunks([*map(tensor, sizes)], buffer_bytes=8)
    ]
    assert found == [[6, 4], [8, 2]]


@given(st.lists(st.integers(0, 20)), st.integers(1, 40))
def test_chunks_are_the_tensors_in_order(sizes: list[int], buffer_bytes: int) -> None:
    """Each but the last one is larger than the buffer, and would not be without its last tensor."""
    tensors = [tensor(2 * size) for size in sizes]
    cut = list(chunks(tensors, buffer_bytes=buffer_bytes))
    assert [each for chunk in cut for each in chunk] == tensors
    for chunk in cut:
        assert sum(each.num_bytes for each in chunk[:-1]) <= buffer_bytes
    for chunk in cut[:-1]:
        assert sum(each.num_bytes for each in chunk) > buffer_bytes


def test_a_file_is_sent_whole(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    weights = {
        "wide": torch.arange(6.0).reshape(2, 3),
        "half": torch.arange(4, dtype=torch.bfloat16),
        "number": torch.tensor(3.0),
    }
    save_file(weights, path)
    tensors = tensors_of(path)
    assert {each.name: each.shape for each in tensors} == {
        "wide": (2, 3),
        "half": (4,),
        "number": (),
    }
    assert sum(each.num_bytes for each in tensors) == 24 + 8 + 4
    kept = Kept()
    send_file(path, tensors, kept, buffer_bytes=20)
    assert kept.finished
    sent = [each for chunk in kept.chunks for each in chunk]
    assert len(kept.chunks) == 2
    for of_file, each in zip(tensors, sent, strict=True):
        assert torch.equal(load_file(path)[of_file.name], each)


def test_a_dtype_that_weights_do_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(2, dtype=torch.int64)}, path)
    with pytest.raises(TransferFailed, match="w is I64"):
        tensors_of(path)
