"""Differences: without loss, checked, and not for what they do not fit."""

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from services.common import weight_delta
from services.common.weight_delta import BadFrame, decode, encode, same_layout, write
from services.common.weight_files import describe
from tests.services.common import safetensors_bytes

PAIRS = st.integers(0, 300).flatmap(
    lambda num: st.tuples(
        st.binary(min_size=2 * num, max_size=2 * num), st.binary(min_size=2 * num, max_size=2 * num)
    )
)


@given(pair=PAIRS)
def test_a_frame_makes_the_chunk_of_its_base(pair: tuple[bytes, bytes]) -> None:
    chunk, base = pair
    assert decode(encode(chunk, base), base) == chunk


def test_low_bytes_come_before_high_bytes() -> None:
    """0x3F80 and 0x3F81 differ by 0x0001, 0x0000 and 0x0200 by 0x0200."""
    chunk, base = b"\x80\x3f\x00\x00", b"\x81\x3f\x00\x02"
    assert zstandard.ZstdDecompressor().decompress(encode(chunk, base)) == b"\x01\x00\x00\x02"


def test_a_few_changed_weights_are_a_small_frame() -> None:
    base = np.random.default_rng(0).bytes(1 << 20)
    words = np.frombuffer(base, "<u2").copy()
    words[::25] += 1
    assert len(encode(words.tobytes(), base)) < len(base) / 20
    assert len(encode(base, base)) < 200


@pytest.mark.parametrize(
    "frame",
    [b"", b"no frame at all", encode(b"abcd", b"abce"), encode(bytes(100), bytes(100))[:-3]],
)
def test_a_frame_of_something_else_is_refused(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(frame, bytes(100))


def test_a_frame_that_would_fill_the_memory_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(BadFrame, match="another number of bytes"):
        decode(bomb, bytes(100))
    liar = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 26))
    with pytest.raises(BadFrame):
        decode(liar, bytes(100))


def tensors(folder: Path, name: str, seed: int, *, dtype: str = "BF16", num: int = 5_000) -> Path:
    data = np.random.default_rng(seed).bytes(num * safetensors_bytes.WIDTHS[dtype])
    safetensors_bytes.write(folder / name, {"w": data}, dtype=dtype)
    return folder / name


def test_only_the_same_tensors_in_bfloat16_have_a_difference(tmp_path: Path) -> None:
    one = tensors(tmp_path, "one", 1)
    assert same_layout(one, tensors(tmp_path, "two", 2))
    assert not same_layout(one, tensors(tmp_path, "longer", 1, num=5_001))
    floats = [tensors(tmp_path, f"float-{seed}", seed, dtype="F32") for seed in (1, 2)]
    assert not same_layout(*floats)
    # As many bytes, another name.
    two = tmp_path / "named"
    safetensors_bytes.write(two, {"v": bytes(10_000)})
    assert two.stat().st_size == one.stat().st_size
    assert not same_layout(one, two)
    (tmp_path / "short").write_bytes(b"abc")
    assert not same_layout(tmp_path / "short", tmp_path / "short")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_of_frames_makes_the_whole_file(tmp_path: Path, threads: int) -> None:
    base = tensors(tmp_path, "base", 1, num=60_000)
    content = bytearray(base.read_bytes())
    content[-2_000::7] = bytes(len(content[-2_000::7]))
    new = tmp_path / "new"
    new.write_bytes(content)
    chunks = describe(new, chunk_bytes=1_000)
    target = tmp_path / "delta"
    stop = threading.Event()
    frames = write(target, of=new, base=base, chunks=chunks, stop=stop, threads=threads)
    assert frames is not None
    assert frames.num == chunks.num > weight_delta.AT_ONCE
    assert frames.sha256 == hashlib.sha256(target.read_bytes()).hexdigest()
    written, old = target.read_bytes(), base.read_bytes()
    made = b"".join(
        decode(written[slice(*frames.bounds(piece))], old[slice(*chunks.bounds(piece))])
        for piece in range(chunks.num)
    )
    assert made == content


def test_a_difference_that_is_no_gain_or_not_wanted_any_more_leaves_nothing(tmp_path: Path) -> None:
    base, new = (tensors(tmp_path, f"file-{seed}", seed, num=60_000) for seed in (1, 2))
    target = tmp_path / "delta"
    chunks = describe(new, chunk_bytes=1_000)
    never = threading.Event()
    assert write(target, of=new, base=base, chunks=chunks, stop=never, threads=1) is None
    assert not target.exists()
    stopped = threading.Event()
    stopped.set()
    assert write(target, of=new, base=new, chunks=chunks, stop=stopped, threads=1) is None
    assert not target.exists()
