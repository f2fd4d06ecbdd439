"""A policy version as the trainer announces it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from headrace.v1 import policy_pb2 as wire

from services.common.weight_delta import Delta
from services.common.weight_files import Pieces, chunk_ends, frame_ends


@dataclass(frozen=True)
class Announcement:
    """A version as the trainer announced it."""

    version: int
    attempt: int
    step: int
    file: Pieces
    """Of the safetensors file, with the checksum of each chunk."""
    dtype: str
    canary_rows: "np.ndarray[Any, Any]"
    """int64 [rows, tokens]."""
    canary_logprobs: "np.ndarray[Any, Any]"
    """float32 [rows, tokens - 1]."""
    perturbed_logprobs: "np.ndarray[Any, Any]"
    """The same under the perturbed weights; empty where the trainer sent none."""
    max_staleness: int
    publishes: int
    """Its place in the line of published weights; see policy.proto."""
    delta: Delta | None
    """None where it has none (yet)."""
    transfer_group: str = ""
    """The group that there was at its publish; empty for none."""
    broadcast: bool = False
    """Whether it is sent to that group."""

    @property
    def sha256(self) -> str:
        """Of the safetensors file."""
        return self.file.sha256

    @property
    def size_bytes(self) -> int:
        """Of the safetensors file."""
        return self.file.size_bytes


def read(answer: wire.WatchPolicyResponse) -> Announcement:
    """An announcement from the wire. Raises ValueError where it contradicts itself."""
    version = answer.version
    tokens = version.canary.row_tokens
    file = Pieces(
        version.sha256,
        chunk_ends(version.size_bytes, version.chunk_bytes),
        np.frombuffer(version.chunk_crc32, "<u4").astype(np.uint32),
    )
    if file.crc32 is None or len(file.crc32) != file.num:
        raise ValueError(f"version {version.version}: {file.num} chunks, not as many checksums")
    return Announcement(
        version=version.version,
        attempt=version.attempt,
        step=version.step,
        file=file,
        dtype=version.dtype,
        canary_rows=np.frombuffer(version.canary.token_ids, "<u4")
        .reshape(-1, tokens)
        .astype(np.int64),
        canary_logprobs=np.frombuffer(version.canary.logprobs, "<f4").reshape(-1, tokens - 1),
        perturbed_logprobs=np.frombuffer(version.canary.perturbed_logprobs, "<f4").reshape(
            -1, tokens - 1
        ),
        max_staleness=answer.max_staleness,
        publishes=version.publishes,
        delta=_delta(version.delta, num_chunks=file.num) if version.HasField("delta") else None,
        transfer_group=version.transfer_group,
        broadcast=version.broadcast,
    )


def _delta(delta: wire.Delta, *, num_chunks: int) -> Delta:
    frames = np.frombuffer(delta.frame_bytes, "<u4")
    pieces = Pieces(delta.sha256, frame_ends(frames))
    if pieces.num != num_chunks or pieces.size_bytes != delta.size_bytes:
        raise ValueError(f"a difference of {pieces.num} frames for {num_chunks} chunks")
    return Delta(delta.base_version, delta.base_sha256, pieces)
