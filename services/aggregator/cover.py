"""Which roll-ups and which fine rows answer for a range: as few rows as there can be.

Positions are steps of one attempt, or 10 s buckets. A roll-up of a level covers positions from a
multiple of it; it may answer only where none of its blocks is stale.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FINE = 1
"""The level of fine rows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions begin <= x < end, answered by one level."""

    level: int
    begin: int
    end: int


def cover(
    begin: int, end: int, *, levels: Sequence[int], block: int, stale: Sequence[int]
) -> list[Piece]:
    """Pieces, ascending, that together are begin <= x < end.

    `levels` are those that may be used, ascending, each a multiple of the one before; `stale` are
    block numbers, ascending.

    Example: 0 to 200 by levels 8 and 64, with block 2 stale, is 0 to 128 by 64, 128 to 192 by
    fine rows, 192 to 200 by 8.
    """
    pieces: list[Piece] = []
    for first, last, fresh in _split(begin, end, block=block, stale=stale):
        for piece in _by_level(first, last, levels) if fresh else [Piece(FINE, first, last)]:
            before = pieces[-1] if pieces else None
            if before is not None and before.level == piece.level and before.end == piece.begin:
                pieces[-1] = Piece(piece.level, before.begin, piece.end)
            else:
                pieces.append(piece)
    return pieces


def _split(
    begin: int, end: int, *, block: int, stale: Sequence[int]
) -> Iterator[tuple[int, int, bool]]:
    """The range cut at stale blocks: each part, and whether roll-ups hold all of it."""
    at = begin
    for index in range(bisect_left(stale, begin // block), len(stale)):
        first, last = stale[index] * block, (stale[index] + 1) * block
        if first >= end:
            break
        if at < first:
            yield at, first, True
        yield max(at, first), min(last, end), False
        at = min(last, end)
    if at < end:
        yield at, end, True


def _by_level(begin: int, end: int, levels: Sequence[int]) -> list[Piece]:
    """The range by the coarsest level inside, and by finer ones at its ends."""
    if begin >= end:
        return []
    if not levels:
        return [Piece(FINE, begin, end)]
    *finer, level = levels
    first, last = -(-begin // level) * level, end // level * level
    if first >= last:
        return _by_level(begin, end, finer)
    return [
        *_by_level(begin, first, finer),
        Piece(level, first, last),
        *_by_level(last, end, finer),
    ]
