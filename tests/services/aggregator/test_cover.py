import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.aggregator.cover import FINE, Piece, cover

LEVELS = (8, 64, 512, 4096)


def test_the_docstrings_example() -> None:
    assert cover(0, 200, levels=(8, 64), block=64, stale=[2]) == [
        Piece(64, 0, 128),
        Piece(FINE, 128, 192),
        Piece(8, 192, 200),
    ]


@given(
    st.integers(0, 9000),
    st.integers(0, 9000),
    st.sets(st.integers(0, 140), max_size=6),
    st.integers(0, len(LEVELS)),
)
def test_every_position_is_answered_once_and_none_by_what_is_stale(
    begin: int, length: int, stale: set[int], num_levels: int
) -> None:
    end = begin + length
    levels = LEVELS[:num_levels]
    pieces = cover(begin, end, levels=levels, block=64, stale=sorted(stale))
    at = begin
    for piece in pieces:
        assert piece.begin == at < piece.end
        at = piece.end
        assert piece.level in (FINE, *levels)
        assert piece.begin % piece.level == piece.end % piece.level == 0
        if piece.level != FINE:
            assert not stale & set(range(piece.begin // 64, -(-piece.end // 64)))
    assert at == max(begin, end)


@pytest.mark.parametrize(("end", "most"), [(1_000_000, 3), (999_999, 9)])
def test_a_long_range_is_a_few_pieces(end: int, most: int) -> None:
    pieces = cover(0, end, levels=LEVELS, block=64, stale=[])
    assert len(pieces) <= most
    rows = sum((piece.end - piece.begin) // piece.level for piece in pieces)
    assert rows < 300
