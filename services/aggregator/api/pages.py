"""A history page by page: tokens that keep pages where they are while points arrive.

The first page decides how wide windows are; its token carries that width and where the next page
begins. Windows begin at multiples of their width, so what is recorded meanwhile changes neither
which windows a page has nor where they begin.
"""

import base64
import binascii
import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastapi import HTTPException

from services.aggregator.history import History, Query

DIGEST_BYTES = 8
TOKEN = struct.Struct(f">Qq{DIGEST_BYTES}s")


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a page begins: `x` is a multiple of `width`, both in steps or seconds."""

    width: int
    x: int


def write_token(cursor: Cursor, *, query: Iterable[object]) -> str:
    """The token of a page. `query` is all that must be the same when it is sent back."""
    packed = TOKEN.pack(cursor.width, cursor.x, _digest(cursor, query))
    return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()


def read_token(token: str, *, query: Iterable[object]) -> Cursor:
    """Where the page of a token begins. Raises HTTPException 422 for one that was not given out
    for this query.
    """
    try:
        packed = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        width, x, digest = TOKEN.unpack(packed)
        cursor = Cursor(width, x)
        if digest == _digest(cursor, query):
            return cursor
    except (binascii.Error, ValueError, struct.error):
        pass
    raise HTTPException(
        422,
        "page: not a token of this query; send the answer's next_page with the same parameters as "
        "before (only limit may change), or leave it out to begin again",
    )


def on_page(query: Query, cursor: Cursor | None) -> Query:
    """The query of the page that begins at the cursor; of the first one where that is None."""
    if cursor is None:
        return query
    return replace(query, since=cursor.x, width=cursor.width)


def following(found: History) -> Cursor | None:
    """Where the page after an answer begins; None after the last."""
    return None if found.next_x is None else Cursor(found.width, found.next_x)


def _digest(cursor: Cursor, query: Iterable[object]) -> bytes:
    said = repr((cursor.width, cursor.x, *query)).encode()
    return hashlib.blake2b(said, digest_size=DIGEST_BYTES, person=b"headrace page").digest()
