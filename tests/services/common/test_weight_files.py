"""Pieces of files, and files that lack some."""

import asyncio
import hashlib
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.weight_files import Gone, Held, Pieces, chunk_ends, describe, frame_ends
from services.common.weight_server import WeightServer


@given(size=st.integers(1, 5_000), chunk=st.integers(1, 1_200))
def test_every_byte_is_in_one_piece(size: int, chunk: int) -> None:
    pieces = Pieces("", chunk_ends(size, chunk))
    bounds = [pieces.bounds(piece) for piece in range(pieces.num)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == pieces.size_bytes == size
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(end - begin == chunk for begin, end in bounds[:-1])
    for offset in {0, size // 2, size - 1}:
        begin, end = bounds[pieces.at(offset)]
        assert begin <= offset < end
    assert pieces.at(size) == pieces.num


@pytest.mark.parametrize("size", [1, 999, 1_000, 1_001, 700_000])
@pytest.mark.parametrize("chunk", [1_000, 300_000])
def test_a_file_is_described_by_its_digest_and_its_chunks(
    tmp_path: Path, size: int, chunk: int
) -> None:
    content = np.random.default_rng(size).bytes(size)
    path = tmp_path / "file"
    path.write_bytes(content)
    found = describe(path, chunk_bytes=chunk)
    chunks = [content[begin : begin + chunk] for begin in range(0, size, chunk)]
    digests = b"".join(hashlib.sha256(each).digest() for each in chunks)
    assert found.sha256 == hashlib.sha256(digests).hexdigest()
    assert found.crc32 is not None
    assert found.crc32.tolist() == [zlib.crc32(each) for each in chunks]
    assert found.ends.tolist() == chunk_ends(size, chunk).tolist()


def test_frames_end_where_their_sizes_add_up_beyond_32_bits() -> None:
    ends = frame_ends(np.array([2**32 - 1, 2**32 - 1, 2], np.uint32))
    assert ends.tolist() == [2**32 - 1, 2**33 - 2, 2**33]


async def test_a_piece_is_waited_for(tmp_path: Path) -> None:
    held = Held(tmp_path / "file", Pieces("", chunk_ends(2_500, 1_000)))
    assert (tmp_path / "file").stat().st_size == 2_500
    waiting = asyncio.create_task(held.wait(1))
    held.mark(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    held.mark(1)
    await waiting
    assert list(held.missing()) == [2]
    assert held.missing_bytes == 500
    held.mark(2)
    held.mark(2)
    assert held.complete
    held.clear()
    assert list(held.missing()) == [0, 1, 2]


async def test_who_waits_for_a_file_that_is_given_up_is_told(tmp_path: Path) -> None:
    held = Held(tmp_path / "file", Pieces("", chunk_ends(2_500, 1_000)))
    held.mark(0)
    waiting = asyncio.create_task(held.wait(1))
    await asyncio.sleep(0)
    held.drop()
    with pytest.raises(Gone, match="file is not completed"):
        await waiting
    await held.wait(0)  # what is there is there


async def test_a_range_is_sent_in_messages_that_end_with_pieces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    held = Held(path, describe(path, chunk_bytes=4), whole=True)
    server = WeightServer()

    async def sent(offset: int, length: int) -> list[tuple[int, bytes]]:
        stream = server.stream(held, offset=offset, length=length)
        pieces = [piece async for piece in stream]
        assert all(zlib.crc32(piece.data) == piece.crc32 for piece in pieces)
        return [(piece.offset, piece.data) for piece in pieces]

    assert await sent(0, 0) == [(0, b"0123"), (4, b"4567"), (8, b"89")]
    assert await sent(4, 4) == [(4, b"4567")]
    assert await sent(5, 2) == [(5, b"56")]
    assert await sent(6, 100) == [(6, b"67"), (8, b"89")]
    assert await sent(10, 0) == []
    assert server.sent_bytes == 10 + 4 + 2 + 4
