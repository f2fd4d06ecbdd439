from pathlib import Path

import pytest

from services.common.adapter_files import BaseWeights
from services.common.weight_files import describe


def test_frozen_weights_are_described_as_json(tmp_path: Path) -> None:
    path = tmp_path / "base"
    path.write_bytes(bytes(range(250)) * 10)
    pieces = describe(path, chunk_bytes=1000)
    found = BaseWeights.from_json(BaseWeights(pieces).to_json()).file
    assert found.sha256 == pieces.sha256
    assert found.ends.tolist() == [1000, 2000, 2500]
    assert pieces.crc32 is not None
    assert found.crc32 is not None
    assert found.crc32.tolist() == pieces.crc32.tolist()


def test_chunks_without_checksums_are_refused() -> None:
    text = b'{"sha256": "ab", "size_bytes": 2500, "chunk_bytes": 1000, "chunk_crc32": [1, 2]}'
    with pytest.raises(ValueError, match="3 chunks, not as many"):
        BaseWeights.from_json(text)
