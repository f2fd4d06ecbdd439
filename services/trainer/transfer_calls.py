"""TransferService over a WeightGroup."""

from typing import Any

from headrace.v1 import transfer_pb2 as wire
from headrace.v1 import transfer_pb2_grpc

from services.trainer.weight_group import State, WeightGroup

SERVICE = "headrace.v1.TransferService"

STATES = {
    State.BEGUN: wire.TRANSFER_STATE_BEGUN,
    State.OVERTAKEN: wire.TRANSFER_STATE_OVERTAKEN,
    State.OVER: wire.TRANSFER_STATE_OVER,
}


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):  # type: ignore[misc]
    """The calls of generators to their group."""

    def __init__(self, group: WeightGroup) -> None:
        self._group = group

    async def JoinTransfer(
        self, request: wire.JoinTransferRequest, context: Any
    ) -> wire.JoinTransferResponse:
        """Give a place in a group that connects now."""
        place = await self._group.join(request.generator, num_workers=request.num_workers)
        if place is None:
            return wire.JoinTransferResponse()
        return wire.JoinTransferResponse(
            group=place.group,
            nccl_id=place.nccl_id,
            world_size=place.world_size,
            rank_offset=place.rank_offset,
            buffer_bytes=self._group.buffer_bytes,
            timeout_s=self._group.timeout_s,
            after_version=place.after_version,
        )

    async def BeginTransfer(
        self, request: wire.BeginTransferRequest, context: Any
    ) -> wire.BeginTransferResponse:
        """Answer when all members are ready, or need not be."""
        state, tensors = await self._group.begin(
            request.generator, group=request.group, version=request.version
        )
        return wire.BeginTransferResponse(
            state=STATES[state],
            tensors=[
                wire.TransferTensor(name=each.name, dtype=each.dtype, shape=each.shape)
                for each in tensors
            ],
        )
