"""The generators that versions are broadcast to, on the trainer's side.

    nobody -> gathering -> connecting -> [all ready -> broadcast]* -> over -> gathering ...

A group is formed of generators that ask for a place: of `replicas` of them, or after GATHER_S of
those that are there. It lasts until something goes wrong with it, or until a larger one can be had,
at a publish. Nothing is mended: a group that is over is replaced by a new one, with an id of its
own. A version belongs to the group that there is when it is published, or to none.

Every wait has an end: a member that is gone, is not ready, or does not take its chunk within the
time allowed ends the group, and what is in NCCL is aborted. The version is fetched then, as by all
who are not members: the file is there in any case. A broadcast reads the file, so that training
goes on meanwhile.

Use from the event loop.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import structlog

from services.common.recorder import Recorder
from services.trainer.weight_sending import (
    BUFFER_BYTES,
    Communicator,
    Tensor,
    TransferFailed,
    Transport,
    send_file,
    tensors_of,
)

ASK_S = 10.0
"""A generator that asks for a place has an answer by then, and asks again."""

GATHER_S = 60.0
"""How long the first that asks waits for the others; then those that are there form a group."""

LOOK_S = 0.1
"""How often it is seen whether all members are there."""

ABSENT_S = 2.0
"""A member whose watch of versions has been broken for so long is gone: one that is opened anew,
as each is from time to time, takes less."""

REST_S = (30.0, 600.0)
"""After a group has failed, no new one is formed for so long; twice as long each time, up to the
second. Each forming pauses the engines."""


class State(Enum):
    """What becomes of a version within a group; see transfer.proto."""

    BEGUN = 1
    OVERTAKEN = 2
    OVER = 3


@dataclass(frozen=True)
class Place:
    """A generator's place in a group that connects now."""

    group: str
    nccl_id: bytes
    world_size: int
    rank_offset: int
    after_version: int
    """Versions above it are sent to the group."""


@dataclass
class _Asking:
    num_workers: int
    place: "asyncio.Future[Place]"


@dataclass
class _Offer:
    """A version for a group."""

    version: int
    path: Path
    tensors: tuple[Tensor, ...]
    ready: set[str] = field(default_factory=set)
    gathered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all are ready, or it does not matter any more."""
    state: "asyncio.Future[State]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def decide(self, state: State) -> None:
        """Tell all members, once."""
        if not self.state.done():
            self.state.set_result(state)
        self.gathered.set()


@dataclass
class _Group:
    id: str
    members: frozenset[str]
    world_size: int
    communicator: Communicator | None = None
    given_up: threading.Event = field(default_factory=threading.Event)
    offer: _Offer | None = None
    offered: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None


class WeightGroup:
    """At most one group at a time, and those that ask for a place in the next one."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        replicas: int,
        timeout_s: float,
        present: Callable[[str], bool],
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """replicas: generators of a whole group. present: whether a generator watches versions."""
        self._recorder, self._replicas, self._present = recorder, replicas, present
        self.timeout_s, self.buffer_bytes = timeout_s, buffer_bytes
        self._transport: Transport | None = None
        self._group: _Group | None = None
        self._asking: dict[str, _Asking] = {}
        self._asking_since_s: dict[str, float] = {}
        self._version = 0
        self._rest_s, self._not_before_s = 0.0, 0.0
        self._aborts: set[asyncio.Task[None]] = set()

    def open(self, transport: Transport) -> None:
        """From now on form groups."""
        self._transport = transport

    async def close(self) -> None:
        """End the group."""
        self._transport = None
        if self._group is not None:
            self._end(self._group)
        await asyncio.gather(*self._aborts)

    @property
    def members(self) -> frozenset[str]:
        """Of the group that there is; empty without one."""
        return frozenset() if self._group is None else self._group.members

    # -- calls of generators

    async def join(self, name: str, *, num_workers: int) -> Place | None:
        """A place in a group that connects now; None when there is none within ASK_S."""
        if self._group is not None and name in self._group.members:
            self._fail(self._group, f"{name} has left it")
        asking = _Asking(num_workers, asyncio.get_running_loop().create_future())
        self._asking[name] = asking
        here = {each: since for each, since in self._asking_since_s.items() if self._present(each)}
        self._asking_since_s = {name: time.monotonic()} | here
        self._form()
        try:
            return await asyncio.wait_for(asking.place, ASK_S)
        except TimeoutError:
            return None
        finally:
            if self._asking.get(name) is asking:
                del self._asking[name]

    async def begin(
        self, name: str, *, group: str, version: int
    ) -> tuple[State, tuple[Tensor, ...]]:
        """A member waits for a version: what becomes of it, and the tensors that come."""
        own = self._group
        if own is None or own.id != group or name not in own.members or own.offer is None:
            return State.OVER, ()
        offer = own.offer
        if version < offer.version:
            return State.OVERTAKEN, ()
        if version > offer.version or offer.state.done():  # it was not there when it was sent
            self._fail(own, f"{name} asks for version {version} out of turn")
            return State.OVER, ()
        offer.ready.add(name)
        if offer.ready == own.members:
            offer.gathered.set()
        return await asyncio.shield(offer.state), offer.tensors

    # -- versions

    def offer(self, version: int, path: Path) -> tuple[str, bool]:
        """A version is about to be announced: the group that there is, empty for none; and whether
        the version is sent to it, as soon as all members are ready. Raises what the group has
        failed by that is no failure of a group."""
        self._version = version
        group = self._group
        if group is None:
            return "", False
        if group.task is not None and group.task.done():
            group.task.result()
        absent = [name for name in sorted(group.members) if not self._present(name)]
        if absent:
            self._fail(group, f"{', '.join(absent)} not here at a publish")
            return "", False
        if len(group.members) < self._replicas and self._asking:
            structlog.get_logger().info("transfer group ends for a larger one", group=group.id)
            self._end(group)
            return "", False
        if group.communicator is None:  # still connecting
            return group.id, False
        try:
            tensors = tensors_of(path)
        except TransferFailed as error:
            self._fail(group, str(error))
            return "", False
        if group.offer is not None:
            group.offer.decide(State.OVERTAKEN)
        group.offer = _Offer(version, path, tensors)
        group.offered.set()
        return group.id, True

    # -- a group

    def _form(self) -> None:
        """Form a group of those that ask, where it is time."""
        now_s = time.monotonic()
        asking = {
            name: each
            for name, each in self._asking.items()
            if self._present(name) and not each.place.done()
        }
        if self._transport is None or self._group is not None or now_s < self._not_before_s:
            return
        names = list(asking)[: self._replicas]
        if not names:
            return
        waited_s = now_s - min(self._asking_since_s.get(name, now_s) for name in names)
        if len(names) < self._replicas and waited_s < GATHER_S:
            return
        try:
            nccl_id, rank = self._transport.new_id(), 1
        except TransferFailed as error:
            self._rest(str(error), group=None)
            return
        world_size = 1 + sum(asking[name].num_workers for name in names)
        group = _Group(secrets.token_hex(8), frozenset(names), world_size)
        for name in names:
            place = Place(group.id, nccl_id, world_size, rank, self._version)
            asking[name].place.set_result(place)
            rank += asking[name].num_workers
            self._asking_since_s.pop(name, None)
        structlog.get_logger().info("transfer group", group=group.id, members=names)
        self._group = group
        group.task = asyncio.create_task(self._serve(group, self._transport, nccl_id))

    async def _serve(self, group: _Group, transport: Transport, nccl_id: bytes) -> None:
        """Connect, then send what is offered, until the group is over."""
        try:
            group.communicator = await asyncio.to_thread(
                transport.connect,
                nccl_id,
                world_size=group.world_size,
                timeout_s=self.timeout_s,
                given_up=group.given_up,
            )
            if self._group is not group:  # it ended meanwhile
                self._abort(group)
                return
            while True:
                await group.offered.wait()
                group.offered.clear()
                assert group.offer is not None
                if await self._all_ready(group, group.offer):
                    await self._send(group, group.offer, group.communicator)
        except (RuntimeError, OSError) as error:  # torch says so where a GPU has no room
            self._fail(group, str(error))

    async def _all_ready(self, group: _Group, offer: _Offer) -> bool:
        """Wait for the members; False when the version has been overtaken."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._unless_lost(group, offer.gathered.wait())
        except TimeoutError:
            late = ", ".join(sorted(group.members - offer.ready))
            raise TransferFailed(
                f"{late} not ready for version {offer.version} within {self.timeout_s:g} s"
            ) from None
        if offer.ready != group.members:
            return False
        offer.decide(State.BEGUN)
        return offer.state.result() is State.BEGUN

    async def _send(self, group: _Group, offer: _Offer, communicator: Communicator) -> None:
        begin_s = time.monotonic()
        sending = asyncio.to_thread(
            send_file, offer.path, offer.tensors, communicator, buffer_bytes=self.buffer_bytes
        )
        await self._unless_lost(group, sending)
        self._recorder.observe("perf/weight_broadcast_s", time.monotonic() - begin_s)
        self._rest_s = 0.0

    async def _unless_lost(self, group: _Group, work: Coroutine[Any, Any, Any]) -> None:
        """Do something that needs all members. Raises TransferFailed when one is gone."""
        working = asyncio.create_task(work)
        gone_s: dict[str, float] = {}
        try:
            while not working.done():
                for name in group.members:
                    if self._present(name):
                        gone_s.pop(name, None)
                    elif time.monotonic() - gone_s.setdefault(name, time.monotonic()) > ABSENT_S:
                        raise TransferFailed(f"{name} is gone")
                await asyncio.wait({working}, timeout=LOOK_S)
            working.result()
        finally:
            working.cancel()

    def _fail(self, group: _Group, why: str) -> None:
        """End a group because of a failure, and form none for a while."""
        if self._group is not group:
            return
        self._rest(why, group=group.id)
        self._end(group)

    def _rest(self, why: str, *, group: str | None) -> None:
        first_s, longest_s = REST_S
        self._rest_s = min(longest_s, max(first_s, 2 * self._rest_s))
        self._not_before_s = time.monotonic() + self._rest_s
        self._recorder.count("policy/nccl_failed_total")
        structlog.get_logger().error(
            "TRANSFER GROUP FAILED: versions are fetched over gRPC until there is a new one",
            group=group,
            why=why,
            rest_s=self._rest_s,
        )

    def _end(self, group: _Group) -> None:
        self._group = None
        group.given_up.set()
        if group.offer is not None:
            group.offer.decide(State.OVER)
        if group.communicator is not None:
            self._abort(group)
            if group.task is not None and group.task is not asyncio.current_task():
                group.task.cancel()

    def _abort(self, group: _Group) -> None:
        """End what is in the communicator; in a thread, since it may take seconds."""
        assert group.communicator is not None
        abort = asyncio.create_task(asyncio.to_thread(group.communicator.abort))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)
