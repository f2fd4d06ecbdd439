"""Files of weights in pieces: what is announced of them, and which pieces of a file are here.

A version's file is cut into chunks of CHUNK_BYTES; a difference (weight_delta.py) into one frame
for each chunk. A piece is what is sent in one message, checked, and fetched again by itself when it
is not right. `Held` is a file on this machine that may still lack pieces: whoever sends it on waits
for each of them.

Nothing here holds more of a file in memory than one piece.
"""

import asyncio
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 1 << 20
"""Of a file of weights. Larger pieces are not faster over gRPC, and each costs its size in memory
a few times on both sides."""

SUM_CHUNKS = 8
"""Summed by a thread at a time."""

READ_BYTES = 1 << 18
"""Read at once for a digest: it stays in a core's cache for the second sum over it."""

Words = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """A file's digest and where its pieces end.

    Example: 2,500 bytes in chunks of 1,000 have ends [1000, 2000, 2500]; byte 2,000 is in piece 2.
    """

    sha256: str
    """Hex, of the whole file: of a version's see digest_of."""
    ends: Offsets
    """int64 [pieces], rising."""
    crc32: Words | None = None
    """uint32 [pieces]; None where each piece is checked otherwise."""

    @property
    def num(self) -> int:
        """Pieces."""
        return len(self.ends)

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def bounds(self, piece: int) -> tuple[int, int]:
        """First byte of a piece, and the one after its last."""
        return (int(self.ends[piece - 1]) if piece else 0), int(self.ends[piece])

    def at(self, offset: int) -> int:
        """The piece with this byte; `num` for one behind the file."""
        return int(np.searchsorted(self.ends, offset, side="right"))


def chunk_ends(size_bytes: int, chunk_bytes: int) -> Offsets:
    """Where the chunks of a file of this size end; at least one byte each."""
    num = -(-size_bytes // chunk_bytes)
    return np.minimum(np.arange(1, num + 1, dtype=np.int64) * chunk_bytes, size_bytes)


def frame_ends(frame_bytes: Words) -> Offsets:
    """Where frames of these sizes end."""
    return np.cumsum(frame_bytes, dtype=np.int64)


def describe(path: Path, *, chunk_bytes: int) -> Pieces:
    """Digest of a file and checksum of each chunk, in one pass by as many threads as there are
    cores: it is on the way of every publish. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        ends = chunk_ends(os.fstat(file.fileno()).st_size, chunk_bytes)
        pieces = Pieces("", ends)
        threads = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(threads, thread_name_prefix="describe") as pool:
            sums = partial(_sums, file.fileno(), pieces)
            found = list(pool.map(sums, range(0, pieces.num, SUM_CHUNKS)))
    digests = [digest for part, _ in found for digest in part]
    crc32 = np.array([crc for _, part in found for crc in part], np.uint32)
    return Pieces(digest_of(digests), ends, crc32)


def _sums(descriptor: int, pieces: Pieces, first: int) -> tuple[list[bytes], list[int]]:
    """Digests and checksums of SUM_CHUNKS pieces from `first` on."""
    digests, sums = [], []
    buffer = memoryview(bytearray(READ_BYTES))
    for piece in range(first, min(pieces.num, first + SUM_CHUNKS)):
        at, end = pieces.bounds(piece)
        digest, crc = hashlib.sha256(), 0
        while at < end:
            num = os.preadv(descriptor, [buffer[: end - at]], at)
            if num == 0:
                raise OSError("a file of weights became shorter while it was read")
            digest.update(buffer[:num])
            crc = zlib.crc32(buffer[:num], crc)
            at += num
        digests.append(digest.digest())
        sums.append(crc)
    return digests, sums


def digest_of(digests: Iterable[bytes]) -> str:
    """A file's digest from those of its pieces, which can be made in any order and side by side:
    SHA-256 of their SHA-256s, one after the other. Hex.

    Example: of a file of two pieces it is sha256(sha256(first) + sha256(second)).
    """
    return hashlib.sha256(b"".join(digests)).hexdigest()


class Gone(RuntimeError):
    """A file that was waited for will not be completed."""


class Held:
    """A file of which pieces are here. Use from one event loop; bytes may be written in threads,
    and `mark` follows on the loop."""

    def __init__(self, path: Path, pieces: Pieces, *, whole: bool = False) -> None:
        """A whole file, or a new one without any piece. Raises OSError when there is no room."""
        self.path, self.pieces = path, pieces
        self._here = bytearray(b"\x01" * pieces.num if whole else pieces.num)
        self._missing = 0 if whole else pieces.num
        self._changed = asyncio.Event()
        self._dropped = False
        if not whole:
            with path.open("wb") as file:
                file.truncate(pieces.size_bytes)

    @property
    def complete(self) -> bool:
        """Whether all pieces are here."""
        return self._missing == 0

    @property
    def missing_bytes(self) -> int:
        """Of the pieces that are not here."""
        return sum(end - begin for begin, end in map(self.pieces.bounds, self.missing()))

    def has(self, piece: int) -> bool:
        """Whether a piece is here, checked."""
        return bool(self._here[piece])

    def missing(self) -> Iterator[int]:
        """The pieces that are not here, in order."""
        return (piece for piece, here in enumerate(self._here) if not here)

    def mark(self, piece: int) -> None:
        """A piece has been written and is right."""
        if not self._here[piece]:
            self._here[piece] = 1
            self._missing -= 1
            self._wake()

    def clear(self) -> None:
        """No piece is here any more."""
        self._here = bytearray(self.pieces.num)
        self._missing = self.pieces.num

    def drop(self) -> None:
        """The file is not kept, or not completed: who waits for a piece is told."""
        self._dropped = True
        self._wake()

    async def wait(self, piece: int) -> None:
        """Return once a piece is here. Raises Gone when it will not come."""
        while not self._here[piece]:
            if self._dropped:
                raise Gone(f"{self.path.name} is not completed")
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def open(self) -> int:
        """A descriptor for reading, which outlives the file's deletion. Raises
        FileNotFoundError."""
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
