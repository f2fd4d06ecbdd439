"""Safetensors files of raw bytes, for dtypes that numpy does not know."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

WIDTHS = {"BF16": 2, "F32": 4}


def write(path: Path, tensors: Mapping[str, bytes], *, dtype: str = "BF16") -> None:
    """A file with flat tensors of these bytes."""
    header, offset = {}, 0
    for name, data in tensors.items():
        shape = [len(data) // WIDTHS[dtype]]
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
