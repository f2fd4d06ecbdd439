"""One published version: what is kept of it, and how it is announced."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from headrace.v1 import policy_pb2 as wire

from services.common.weight_delta import Delta
from services.common.weight_files import Held

Mark = tuple[bool, bool]
"""Of an announcement; see Published.mark."""


@dataclass
class Published:
    """One version that generators may fetch."""

    version: int
    attempt: int
    step: int
    file: Held
    num_tensors: int
    dtype: str
    canary_logprobs: "np.ndarray[Any, Any]"
    perturbed_logprobs: "np.ndarray[Any, Any] | None"
    delta: Delta | None = None
    delta_file: Held | None = None
    """Of `delta`."""
    transfer_group: str = ""
    """The group that there was at its publish; empty for none."""
    broadcast: bool = False
    """Whether it is sent to that group (weight_group.py)."""
    at_s: float = field(default_factory=time.monotonic)

    @property
    def mark(self) -> Mark:
        """What is new in an announcement of a version: whether it has the load-path proof, whether
        it has its difference."""
        return self.perturbed_logprobs is not None, self.delta is not None

    @property
    def path(self) -> Path:
        """Of the whole file."""
        return self.file.path

    @property
    def sha256(self) -> str:
        """Of the whole file."""
        return self.file.pieces.sha256

    @property
    def files(self) -> dict[str, Held]:
        """What may be fetched of it, by digest."""
        held = [self.file, *([] if self.delta_file is None else [self.delta_file])]
        return {each.pieces.sha256: each for each in held}

    def message(self, *, canary_rows: "np.ndarray[Any, Any]", publishes: int) -> wire.PolicyVersion:
        """As it is announced. canary_rows: int [rows, tokens]. publishes: its place in the line of
        published weights."""
        perturbed, pieces = self.perturbed_logprobs, self.file.pieces
        assert pieces.crc32 is not None
        return wire.PolicyVersion(
            version=self.version,
            attempt=self.attempt,
            step=self.step,
            sha256=self.sha256,
            size_bytes=pieces.size_bytes,
            num_tensors=self.num_tensors,
            dtype=self.dtype,
            publishes=publishes,
            chunk_bytes=pieces.bounds(0)[1] if pieces.num else 0,
            chunk_crc32=pieces.crc32.astype("<u4").tobytes(),
            delta=None if self.delta is None else _delta_message(self.delta),
            transfer_group=self.transfer_group,
            broadcast=self.broadcast,
            canary=wire.Canary(
                row_tokens=canary_rows.shape[1],
                token_ids=canary_rows.astype("<u4").tobytes(),
                logprobs=self.canary_logprobs.astype("<f4").tobytes(),
                perturbed_logprobs=b"" if perturbed is None else perturbed.astype("<f4").tobytes(),
            ),
        )


def _delta_message(delta: Delta) -> wire.Delta:
    return wire.Delta(
        base_version=delta.base_version,
        base_sha256=delta.base_sha256,
        sha256=delta.pieces.sha256,
        size_bytes=delta.pieces.size_bytes,
        frame_bytes=np.diff(delta.pieces.ends, prepend=0).astype("<u4").tobytes(),
    )
