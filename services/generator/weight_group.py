"""This replica's membership of the trainer's transfer group: versions that are broadcast to it
instead of being fetched.

    outside -> asks for a place -> connects -> member -> outside ...

A member pauses its engine for a version that is announced as sent to its group, says so, and
receives once all others have paused, too. Whatever goes wrong ends the membership, and the version
is fetched: at once where nothing has been received yet, under the paused engine where a broadcast
broke off. Then the replica asks for a place in another group.
"""

import asyncio
import base64
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import grpc
import structlog
from headrace.v1 import transfer_pb2 as wire

from services.common.config import Recipe
from services.generator.announcement import Announcement
from services.generator.types import EngineDead, LoadTimes
from services.generator.weight_links import Backoff, raise_if_hopeless
from services.generator.weights import PolicyClient

ASK_AGAIN_S = 1.0
"""Pause after a membership, before a place is asked for again."""


class Receives(Protocol):
    """The part of the engine that a membership needs; see engine_weights.py."""

    num_workers: int

    @property
    def joins_groups(self) -> bool:
        """Whether its workers can be in a group."""
        ...

    async def join_group(self, info: dict[str, Any], *, timeout_s: float) -> None:
        """Connect the workers."""
        ...

    async def leave_group(self) -> None:
        """End their membership."""
        ...

    async def receive(
        self, version: int, *, begin: Callable[[], Awaitable[dict[str, Any] | None]]
    ) -> LoadTimes | None:
        """Pause, `begin`, and load what is broadcast; paused when it raises."""
        ...


@runtime_checkable
class _HasWeights(Protocol):
    weights: Receives


@dataclass
class _Membership:
    group: str
    timeout_s: float
    after_version: int
    over: asyncio.Event = field(default_factory=asyncio.Event)


class GroupMember:
    """The membership of this replica; at most one at a time."""

    def __init__(self, engine: Receives, client: PolicyClient) -> None:
        self._engine, self._client = engine, client
        self._membership: _Membership | None = None

    async def run(self) -> None:
        """Be a member whenever there is a place, for ever. Raises EngineDead."""
        pause = Backoff()
        while True:
            try:
                place = await self._client.join_transfer(self._engine.num_workers)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    structlog.get_logger().warning(
                        'versions are fetched: weights.transport is not "nccl" at the trainer'
                    )
                    return
                raise_if_hopeless(error)
                await pause()
                continue
            pause.reset()
            if place.group:
                await self._be_member(place)
                await asyncio.sleep(ASK_AGAIN_S * random.uniform(0.5, 1.5))

    async def _be_member(self, place: wire.JoinTransferResponse) -> None:
        # Before it connects: a version that is sent meanwhile is received when it has.
        own = _Membership(place.group, place.timeout_s, place.after_version)
        self._membership = own
        info = {
            "nccl_unique_id_b64": base64.b64encode(place.nccl_id).decode(),
            "rank_offset": place.rank_offset,
            "world_size": place.world_size,
            "packed": True,
            "packed_buffer_size_bytes": place.buffer_bytes,
        }
        try:
            await self._engine.join_group(info, timeout_s=place.timeout_s)
        except EngineDead:
            raise
        except Exception:  # whatever it is, versions are fetched
            self.leave("it has not connected")
            structlog.get_logger().error("no transfer group", group=own.group, exc_info=True)
        else:
            structlog.get_logger().info("in a transfer group", group=own.group)
        await own.over.wait()
        await self._engine.leave_group()

    def is_sent(self, target: Announcement) -> bool:
        """Whether a version comes by the group. One that shows that there is another group, or none
        any more, ends the membership."""
        own = self._membership
        if own is None or target.version <= own.after_version:
            return False
        if target.transfer_group != own.group:
            self.leave("the trainer has ended it")
            return False
        return target.broadcast

    async def receive(self, target: Announcement) -> LoadTimes | None:
        """Load a version that `is_sent`; None when it did not come: then look which one is to be
        served next, and how it comes. The engine is paused after a broadcast that broke off, until
        the next load. Raises EngineDead."""
        own = self._membership
        assert own is not None, "only what is sent is received"
        state = wire.TRANSFER_STATE_UNSPECIFIED

        async def begin() -> dict[str, Any] | None:
            nonlocal state
            try:
                answer = await self._client.begin_transfer(
                    own.group, target.version, timeout_s=own.timeout_s
                )
            except grpc.aio.AioRpcError as error:
                structlog.get_logger().warning("no broadcast", why=error.code().name)
                return None
            state = answer.state
            return _update(answer) if state == wire.TRANSFER_STATE_BEGUN else None

        try:
            times = await self._engine.receive(target.version, begin=begin)
        except EngineDead:
            raise
        except Exception:  # vLLM passes on what its workers raise in many forms
            self.leave("a broadcast has failed")
            structlog.get_logger().error(
                "broadcast failed: the version is fetched", version=target.version, exc_info=True
            )
            return None
        if times is None and state == wire.TRANSFER_STATE_OVERTAKEN:
            await self._newer_than(target, own)
        elif times is None:
            self.leave("the trainer has ended it")
        return times

    def leave(self, why: str) -> None:
        """End the membership, where there is one."""
        if self._membership is not None:
            structlog.get_logger().warning(
                "left the transfer group", group=self._membership.group, why=why
            )
            self._membership.over.set()
            self._membership = None

    async def _newer_than(self, target: Announcement, own: _Membership) -> None:
        """Wait for the announcement of what is sent instead."""
        try:
            await asyncio.wait_for(self._client.newer_than(target.version), own.timeout_s)
        except TimeoutError:
            self.leave("the version that is sent has not been announced")


def member_of(recipe: Recipe, engine: object, client: PolicyClient) -> GroupMember | None:
    """The membership of a replica, where recipe and engine have it."""
    if recipe.weights.transport != "nccl" or not isinstance(engine, _HasWeights):
        return None
    if not engine.weights.joins_groups:
        structlog.get_logger().warning("versions are fetched: this engine has no NCCL")
        return None
    return GroupMember(engine.weights, client)


def _update(answer: wire.BeginTransferResponse) -> dict[str, Any]:
    """What comes, as vLLM's NCCLWeightTransferUpdateInfo."""
    return {
        "names": [tensor.name for tensor in answer.tensors],
        "dtype_names": [tensor.dtype for tensor in answer.tensors],
        "shapes": [list(tensor.shape) for tensor in answer.tensors],
    }
