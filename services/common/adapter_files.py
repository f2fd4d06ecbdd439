"""What a run with adapters (LoRA) adds to a model's files: by them generators know what they
serve.

    adapter_config.json    peft's description of the adapters; it is there when versions are
                           adapters and not whole weights
    base_weights.json      which file holds the frozen weights: `BaseWeights`, fetched as version 0
"""

import json
from dataclasses import dataclass

import numpy as np

from services.common.weight_files import Pieces, chunk_ends

CONFIG = "adapter_config.json"
"""In the layout of peft, beside WEIGHTS."""

WEIGHTS = "adapter_model.safetensors"
"""The adapter's tensors, in the layout of peft."""

BASE = "base_weights.json"
"""Among the files of a model that generators get."""

BASE_VERSION = 0
"""The number under which PolicyService has the frozen weights: no version has it."""


@dataclass(frozen=True)
class BaseWeights:
    """The file with the frozen weights that all adapters of a run belong to."""

    file: Pieces
    """With the checksum of each chunk."""

    def to_json(self) -> bytes:
        """Content of BASE."""
        pieces = self.file
        assert pieces.crc32 is not None
        content = {
            "sha256": pieces.sha256,
            "size_bytes": pieces.size_bytes,
            "chunk_bytes": pieces.bounds(0)[1],
            "chunk_crc32": pieces.crc32.tolist(),
        }
        return json.dumps(content).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "BaseWeights":
        """Read the content of BASE. Raises ValueError, TypeError or KeyError for anything else."""
        found = json.loads(data)
        ends = chunk_ends(int(found["size_bytes"]), int(found["chunk_bytes"]))
        sums = np.array(found["chunk_crc32"], np.uint32)
        if len(sums) != len(ends):
            raise ValueError(f"{len(ends)} chunks, not as many checksums")
        return cls(Pieces(str(found["sha256"]), ends, sums))
