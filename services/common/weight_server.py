"""Sends files of weights, whole ones and such as are still coming, to whoever fetches them.

Streams at a time are bounded, and each holds one piece: memory does not grow with those who fetch.
Further ones wait for their turn.

waits_for: a turn, pieces that are still on their way here. unblocked_by: streams that end, this
replica's own fetch.
"""

import asyncio
import os
import zlib
from collections.abc import AsyncGenerator

from headrace.v1 import policy_pb2 as wire

from services.common.weight_files import Held

MAX_STREAMS = 8
"""Of one server at a time: two who fetch have four each."""


class WeightServer:
    """FetchWeights over files that are held here."""

    def __init__(self, *, max_streams: int = MAX_STREAMS) -> None:
        self._room = asyncio.Semaphore(max_streams)
        self.sent_bytes = 0
        """All together."""

    async def stream(
        self, held: Held, *, offset: int, length: int
    ) -> AsyncGenerator[wire.FetchWeightsResponse, None]:
        """The bytes from `offset`, `length` of them or all that follow where it is 0, each message
        within one piece. Raises Gone when the file is not completed here."""
        pieces = held.pieces
        end = min(pieces.size_bytes, offset + length) if length else pieces.size_bytes
        async with self._room:
            descriptor = held.open()
            try:
                while offset < end:
                    piece = pieces.at(offset)
                    await held.wait(piece)
                    first, last = pieces.bounds(piece)
                    data = os.pread(descriptor, min(last, end) - offset, offset)
                    assert data, "a file that is held has its size"
                    if pieces.crc32 is None or len(data) < last - first:
                        crc32 = zlib.crc32(data)
                    else:
                        crc32 = int(pieces.crc32[piece])
                    yield wire.FetchWeightsResponse(offset=offset, data=data, crc32=crc32)
                    offset += len(data)
                    self.sent_bytes += len(data)
            finally:
                os.close(descriptor)
