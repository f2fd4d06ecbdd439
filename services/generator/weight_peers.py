"""Sends weights to other generators: the one call of PolicyService that a generator answers."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
from headrace.v1 import policy_pb2 as wire
from headrace.v1 import policy_pb2_grpc

from services.common import grpc_kit
from services.common.weight_files import Gone, Held
from services.common.weight_server import WeightServer


class PeerServicer(policy_pb2_grpc.PolicyServiceServicer):  # type: ignore[misc]
    """FetchWeights of what this replica has, and of what it is still fetching; the rest of the
    service is UNIMPLEMENTED here."""

    def __init__(self) -> None:
        self._server = WeightServer()
        self._find: Callable[[str], Held | None] = lambda sha256: None

    def open(self, find: Callable[[str], Held | None]) -> None:
        """Answer from now on; `find` finds a file by its digest."""
        self._find = find

    async def FetchWeights(
        self, request: wire.FetchWeightsRequest, context: Any
    ) -> AsyncIterator[wire.FetchWeightsResponse]:
        """Stream a range of a file."""
        held = self._find(request.sha256)
        try:
            if held is None:
                raise Gone(f"version {request.version} with this digest is not here")
            stream = self._server.stream(held, offset=request.offset, length=request.length)
            async with aclosing(stream) as pieces:  # a cancelled call's turn is free at once
                async for piece in pieces:
                    yield piece
        except (Gone, FileNotFoundError) as error:
            await grpc_kit.abort(
                context,
                grpc.StatusCode.NOT_FOUND,
                "VERSION_GONE",
                str(error),
                version=str(request.version),
            )
