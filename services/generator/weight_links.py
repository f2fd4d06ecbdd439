"""The ways that weights come by: to the trainer and to other generators, several connections each.

One connection is one TCP stream, which a network may hold below what a link carries; and gRPC reads
each with one thread.
"""

import asyncio
import random

import grpc
from headrace.v1 import policy_pb2_grpc

from services.common import grpc_kit
from services.common.config import Network
from services.common.errors import UserError

NUM_STREAMS = 4
"""Of one fetch at a time, each on a connection of its own."""

TRAINER = ""
"""The address of the source that always has a version that is still kept."""

RETRY_S = (0.2, 3.0)
"""Shortest and longest pause before a broken stream is opened again."""


class Links:
    """Connections to sources, opened when first used."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}

    def stub(self, address: str, number: int) -> policy_pb2_grpc.PolicyServiceStub:
        """The policy service of a source, on one of its connections."""
        channel = self._channels.get((address, number))
        if channel is None:
            network = self._network
            channel = grpc_kit.channel(
                address or network.trainer,
                network,
                server_name=network.peer_name if address else None,
                own_connection=True,
            )
            self._channels[address, number] = channel
        return policy_pb2_grpc.PolicyServiceStub(channel)

    async def keep_only(self, *addresses: str) -> None:
        """Close connections to others than these."""
        others = [key for key in self._channels if key[0] not in addresses]
        await asyncio.gather(*(self._channels.pop(key).close(None) for key in others))


class Backoff:
    """Jittered exponential pauses."""

    def __init__(self) -> None:
        self._next_s = RETRY_S[0]

    def reset(self) -> None:
        """It worked: the next pause is the shortest."""
        self._next_s = RETRY_S[0]

    async def __call__(self) -> None:
        """Pause."""
        await asyncio.sleep(self._next_s * random.uniform(0.5, 1.0))
        self._next_s = min(RETRY_S[1], self._next_s * 2)


def raise_if_hopeless(error: grpc.aio.AioRpcError) -> None:
    """Let errors of the trainer through that no retry will mend."""
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        raise UserError(
            f"network.token_file: the trainer refuses this token ({error.details()})"
        ) from error
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        raise UserError("network.trainer: something answers there that is no trainer") from error
