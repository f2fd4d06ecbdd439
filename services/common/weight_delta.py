"""The difference of one version's file to that of the version before it, without loss.

A step at a usual learning rate changes few of the weights in bfloat16, and of most of those the
last bits. So the exclusive or of two files, as 16-bit words, is zero nearly everywhere; its low
bytes and its high bytes, apart, are compressed by zstd. One frame for each chunk of the file: any
chunk can be made from its frame and the same chunk of the base, alone and in any order.

Example: the words 0x3F80 and 0x3F81 differ by 0x0001: low bytes [0x01], high bytes [0x00].

What comes of a frame is checked against the checksum of the version's own chunk, so a wrong base
and a damaged frame are the same mistake: another chunk than was announced.
"""

import hashlib
import json
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import zstandard

from services.common.weight_files import Pieces, frame_ends

LEVEL = 1
"""Of zstd: 3 is hardly smaller and takes half as long again, 6 three times as long."""

WORTH = 0.8
"""Of the whole file's size: a difference above it is not made to its end."""

AT_ONCE = 32
"""Chunks in memory at a time while a difference is made."""

HEADER_LIMIT_BYTES = 100 << 20
"""Of a safetensors file, as its own library has it."""


class BadFrame(ValueError):
    """A frame that no chunk of this size comes of."""


@dataclass(frozen=True)
class Delta:
    """A difference, as it is announced."""

    base_version: int
    base_sha256: str
    pieces: Pieces
    """Of its file: a frame for each chunk of the version's file."""


def encode(chunk: bytes, base: bytes) -> bytes:
    """The frame of a chunk over its base; both have the same even number of bytes."""
    words = np.frombuffer(chunk, "<u2") ^ np.frombuffer(base, "<u2")
    planes = np.ascontiguousarray(words.view(np.uint8).reshape(-1, 2).T)
    frame: bytes = zstandard.ZstdCompressor(level=LEVEL).compress(planes.data)
    return frame


def decode(frame: bytes, base: bytes) -> bytes:
    """The chunk that a frame makes of its base. Raises BadFrame."""
    try:
        # Said by whoever made the frame: a bomb must not be unpacked.
        if zstandard.frame_content_size(frame) != len(base):
            raise BadFrame(f"a frame for another number of bytes than {len(base)}")
        planes = zstandard.ZstdDecompressor().decompress(frame, max_output_size=len(base))
    except zstandard.ZstdError as error:
        raise BadFrame(str(error)) from error
    if len(planes) != len(base):
        raise BadFrame(f"{len(planes)} bytes where {len(base)} were announced")
    mixed = np.frombuffer(planes, np.uint8).reshape(2, -1).T
    words = np.ascontiguousarray(mixed).view("<u2").reshape(-1) ^ np.frombuffer(base, "<u2")
    chunk: bytes = words.tobytes()
    return chunk


def same_layout(one: Path, other: Path) -> bool:
    """Whether two safetensors files hold tensors of the same names, shapes and types in the same
    order, all of bfloat16."""
    header = _header(one)
    if header is None or one.stat().st_size != other.stat().st_size or header != _header(other):
        return False
    about = json.loads(header)
    about.pop("__metadata__", None)
    return bool(about) and all(each["dtype"] == "BF16" for each in about.values())


def _header(path: Path) -> bytes | None:
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return None
        (size,) = struct.unpack("<Q", start)
        return file.read(size) if size <= HEADER_LIMIT_BYTES else None


def write(
    target: Path,
    *,
    of: Path,
    base: Path,
    chunks: Pieces,
    stop: threading.Event,
    threads: int,
) -> Pieces | None:
    """Write the frames that make the file `of`, cut into `chunks`, from `base`; what was written.

    None when it would be no gain or `stop` is set meanwhile; nothing is left of it then. Raises
    OSError.
    """
    sizes: list[int] = []
    digest = hashlib.sha256()
    limit_bytes = WORTH * chunks.size_bytes
    bounds = list(pairwise([0, *chunks.ends.tolist()]))
    with of.open("rb") as new, base.open("rb") as old, target.open("wb") as out:

        def frame(begin: int, end: int) -> bytes:
            size = end - begin
            return encode(os.pread(new.fileno(), size, begin), os.pread(old.fileno(), size, begin))

        with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
            for start in range(0, len(bounds), AT_ONCE):
                begins, ends = zip(*bounds[start : start + AT_ONCE], strict=True)
                for made in pool.map(frame, begins, ends):
                    out.write(made)
                    digest.update(made)
                    sizes.append(len(made))
                if stop.is_set() or sum(sizes) > limit_bytes:
                    break
    if len(sizes) < chunks.num or sum(sizes) > limit_bytes:
        target.unlink()
        return None
    return Pieces(digest.hexdigest(), frame_ends(np.array(sizes, np.uint32)))
