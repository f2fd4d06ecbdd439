"""What of a version's file is broadcast to a group, in which order, and cut where.

Chunks are those that vLLM's receiver expects (its packed_tensor.py): a chunk ends with the tensor
that makes it larger than the buffer, and tensors are never cut.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

BUFFER_BYTES = 256 << 20
"""A chunk ends beyond it; both sides have two chunks on their GPU at a time."""

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Of safetensors, as torch calls them: those of published weights."""


class TransferFailed(RuntimeError):
    """A group cannot go on; the message says why. Versions are fetched instead."""


class Communicator(Protocol):
    """Rank 0 of a group that has connected. Of one thread, but for `abort`."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast the bytes of tensors on the CPU, one after the other, as one chunk, which may
        still be on its way when this returns. Raises TransferFailed when an earlier one takes too
        long."""
        ...

    def finish(self) -> None:
        """Return when all that was sent has gone. Raises TransferFailed when it takes too long."""
        ...

    def abort(self) -> None:
        """End it, from any thread: what another one is sending fails. It may be called twice."""
        ...


class Transport(Protocol):
    """Makes groups."""

    def new_id(self) -> bytes:
        """What all ranks of a new group are to know, for one connection: 128 bytes."""
        ...

    def connect(
        self, group_id: bytes, *, world_size: int, timeout_s: float, given_up: threading.Event
    ) -> Communicator:
        """Be rank 0 of a group, all of whose ranks connect now. `timeout_s` is the longest time for
        this, and then for each chunk. Raises TransferFailed, soon when it has been `given_up`."""
        ...


@dataclass(frozen=True)
class Tensor:
    """One of a file."""

    name: str
    dtype: str
    """As torch calls it."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """That it has."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * dtype.itemsize


def tensors_of(path: Path) -> tuple[Tensor, ...]:
    """The tensors of a safetensors file, in the order in which they lie there. Raises
    TransferFailed for a dtype that weights are not published in."""
    found = []
    with safe_open(path, framework="pt") as file:
        for name in file.offset_keys():
            of_file = file.get_slice(name)
            dtype = DTYPES.get(of_file.get_dtype())
            if dtype is None:
                raise TransferFailed(f"{name} is {of_file.get_dtype()}")
            found.append(Tensor(name, dtype, tuple(of_file.get_shape())))
    return tuple(found)


def chunks(tensors: Sequence[Tensor], *, buffer_bytes: int) -> Iterator[list[Tensor]]:
    """Runs of tensors that are broadcast together.

    Example: tensors of 3, 2, 4 and 1 bytes with a buffer of 4 are [3, 2] and [4, 1].
    """
    chunk: list[Tensor] = []
    for tensor in tensors:
        chunk.append(tensor)
        if sum(each.num_bytes for each in chunk) > buffer_bytes:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def send_file(
    path: Path,
    tensors: Sequence[Tensor],
    communicator: Communicator,
    *,
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Broadcast a file's tensors; returns when all have gone. Raises TransferFailed."""
    with safe_open(path, framework="pt") as file:
        for chunk in chunks(tensors, buffer_bytes=buffer_bytes):
            communicator.send([file.get_tensor(tensor.name) for tensor in chunk])
        communicator.finish()
