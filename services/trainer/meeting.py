"""Rank 0's machine, node 0, as the other nodes of a trainer meet it: they join, stay, and end with
it (node.py is the other side).

    gathering    nodes join; whoever has another recipe or another folder is refused
    training     all are here: every node starts its ranks; one that is lost ends the trainer
    ended        every node hears the status with which the trainer ends

A node calls again and again. One that hangs up and does not come back within RETURN_S is lost, one
that is silent for SILENCE_S (its machine is gone, and nobody has told) too.

waits_for: all nodes, before the first rank is started. unblocked_by: their joining; a stop.
"""

import asyncio
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import structlog
from headrace.v1 import ranks_pb2 as wire
from headrace.v1 import ranks_pb2_grpc

from services.common import grpc_kit
from services.common.config import Recipe
from services.common.errors import UserError
from services.common.lifecycle import Lifecycle
from services.trainer.interfaces import interface_towards
from services.trainer.rank_ended import RankEnded, RankProcessEnded
from services.trainer.ranks import Place, open_place
from services.trainer.terms import differing, terms_of

SERVICE = "headrace.v1.RankService"

_REPLACED = "--node {}: another process has joined as this node"


@dataclass(frozen=True)
class Patience:
    """How long is waited for what; tests have less."""

    hold_s: float = 5.0
    """An answer that brings nothing new is held back for so long."""
    silence_s: float = 60.0
    """Whoever is not heard of for so long is gone, with the machine. Far above the longest pause of
    a process that is well, since all the others pay for a mistake."""
    return_s: float = 3.0
    """Whoever hangs up calls again within this."""
    heard_s: float = 5.0
    """At the end: how long nodes get to hear of it."""
    look_s: float = 0.2
    """How often is looked for silence."""


@dataclass
class _Member:
    """A node that has joined."""

    instance: str
    address: str
    heard_s: float
    shares_folder: bool = False
    calls: int = 0
    """In hand now. One that a node gives up and the next one may be seen in either order."""
    hung_up_s: float | None = None
    told: bool = False
    """It has heard of the end."""


class Meeting(ranks_pb2_grpc.RankServiceServicer):  # type: ignore[misc]
    """Node 0 of a trainer with several. Use from the event loop."""

    def __init__(self, recipe: Recipe, lifecycle: Lifecycle, patience: Patience | None = None):
        self._recipe, self._lifecycle = recipe, lifecycle
        self._patience = patience or Patience()
        self._nodes = recipe.trainer.nodes
        self._session = secrets.token_hex(8)
        self._stage: wire.Stage.ValueType = wire.STAGE_GATHERING
        self._status = 0
        self._terms: dict[str, str] | None = None
        self._members: dict[int, _Member] = {}
        self._news = asyncio.Event()
        """Something has changed that the trainer waits for."""
        self._stage_left = asyncio.Event()
        """Set for those who wait for the next stage; each stage has its own."""
        self._lost: RankEnded | None = None

    # -- what the trainer does with it

    async def gather(self) -> Place:
        """Rank 0's place, once every node is here and shares the run's folder; the nodes then start
        their ranks. Raises UserError for a folder or a port that cannot be used."""
        file = self._recipe.run_folder / self._file
        await asyncio.to_thread(_write, file, self._session)
        try:
            self._terms = await asyncio.to_thread(terms_of, self._recipe)
            while missing := self._missing():
                names = ", ".join(map(str, missing))
                self._lifecycle.enter(f"waiting for node {names} of {self._nodes}")
                await self._something()
                self._forget_the_lost()
            place = await asyncio.to_thread(self._open)
        finally:
            await asyncio.to_thread(file.unlink, missing_ok=True)
        self._enter(wire.STAGE_TRAINING)
        structlog.get_logger().info(
            "all nodes are here", nodes=self._nodes, interface=place.interface
        )
        return place

    async def watch(self) -> None:
        """Wait for ever; raises RankEnded once a node is lost, or one of its ranks."""
        while (lost := self.lost()) is None:
            await self._something()
        raise lost

    def lost(self) -> RankEnded | None:
        """Why the trainer has to end; None while all is well."""
        if self._lost is None:
            for node, member in sorted(self._members.items()):
                if why := self._gone(member):
                    self._lost = RankEnded(f"node {node} {why}", log=f"the log of node {node}")
        return self._lost

    async def end(self, status: int) -> None:
        """Tell the nodes that the trainer ends with this status, and wait until they know."""
        self._status = status
        self._enter(wire.STAGE_ENDED)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience.heard_s):
                while not all(each.told or self._gone(each) for each in self._members.values()):
                    await self._something()

    # -- what nodes call

    async def Join(self, request: wire.JoinRequest, context: Any) -> wire.JoinResponse:
        """A node offers its ranks."""
        node = request.node
        if self._terms is None or self._stage != wire.STAGE_GATHERING:
            await _later(context, "the trainer does not gather nodes now; ask again")
        if not 0 < node < self._nodes:
            await _never(
                context, f"--node {node}: trainer.nodes is {self._nodes}, and node 0 is the trainer"
            )
        if different := differing(self._terms, dict(request.terms)):
            why = f"not the same as on node 0: {', '.join(different)}"
            self._refuse(node, why)
            await _never(context, f"{why}; give every node the same recipe and the same files")
        with suppress(KeyError):
            del self._lifecycle.details[f"node {node}"]
        self._members[node] = _Member(request.instance, request.address, time.monotonic())
        structlog.get_logger().info("node joined", node=node, address=request.address)
        self._news.set()
        return wire.JoinResponse(session=self._session, file=self._file)

    async def Stay(self, request: wire.StayRequest, context: Any) -> wire.StayResponse:
        """A node is there."""
        member = await self._member(request, context)
        member.heard_s, member.hung_up_s = time.monotonic(), None
        member.calls += 1
        self._hear(request, member)
        try:
            if request.stage == self._stage:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._patience.hold_s):
                        await self._stage_left.wait()
        except asyncio.CancelledError:
            if member.calls == 1:
                member.hung_up_s = time.monotonic()
            raise
        finally:
            member.calls -= 1
        member = await self._member(request, context)  # it may have been replaced meanwhile
        member.heard_s = time.monotonic()
        if self._stage == wire.STAGE_ENDED:
            member.told = True
            self._news.set()
        return wire.StayResponse(stage=self._stage, status=self._status)

    async def _member(self, request: wire.StayRequest, context: Any) -> _Member:
        member = self._members.get(request.node)
        if request.session != self._session or member is None:
            await grpc_kit.abort(
                context, grpc.StatusCode.NOT_FOUND, "OTHER_SESSION", "join first: not known here"
            )
        if member.instance != request.instance:
            await _never(context, _REPLACED.format(request.node))
        return member

    def _hear(self, request: wire.StayRequest, member: _Member) -> None:
        """Take in what a node says beside that it is there."""
        if request.shares_folder != member.shares_folder:
            member.shares_folder = request.shares_folder
            self._news.set()
        if request.stopping and not self._lifecycle.stopping.is_set():
            structlog.get_logger().info("a node is asked to stop", node=request.node)
            self._lifecycle.enter("draining")
            self._lifecycle.stopping.set()
        if request.HasField("ended") and self._lost is None:
            self._lost = RankProcessEnded(
                request.ended.rank, request.ended.status, node=request.node
            )
            self._news.set()

    # -- its state

    @property
    def _file(self) -> str:
        return f".nodes-{self._session}"

    def _missing(self) -> list[int]:
        found = {node for node, member in self._members.items() if member.shares_folder}
        return [node for node in range(1, self._nodes) if node not in found]

    def _gone(self, member: _Member) -> str:
        """Why a node is lost; empty while it is not."""
        now = time.monotonic()
        if member.hung_up_s is not None and now - member.hung_up_s > self._patience.return_s:
            return "has hung up and not come back"
        if now - member.heard_s > self._patience.silence_s:
            return f"has not been heard of for {self._patience.silence_s:g} s"
        return ""

    def _forget_the_lost(self) -> None:
        """Before the first rank is started a node may come and go."""
        for node, member in list(self._members.items()):
            if why := self._gone(member):
                structlog.get_logger().warning(f"node {why}", node=node)
                del self._members[node]

    def _refuse(self, node: int, why: str) -> None:
        self._lifecycle.details[f"node {node}"] = f"refused: {why}"
        structlog.get_logger().error("NODE REFUSED", node=node, why=why)

    def _open(self) -> Place:
        address = self._recipe.network.ranks
        assert address is not None, "checked with the recipe"
        try:
            interface = interface_towards(self._members[1].address)
        except OSError as error:
            raise UserError(
                f"network.ranks: node 1 says that it is at {self._members[1].address!r}, which "
                f"cannot be reached: {error.strerror}"
            ) from error
        return open_place(
            self._recipe.trainer.ranks,
            listen=self._recipe.network.host,
            port=int(address.rpartition(":")[2]),
            nodes=self._nodes,
            interface=interface,
            session=self._session,
        )

    def _enter(self, stage: "wire.Stage.ValueType") -> None:
        self._stage = stage
        self._stage_left.set()
        self._stage_left = asyncio.Event()

    async def _something(self) -> None:
        """Return at news, or after a moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience.look_s):
                await self._news.wait()
        self._news.clear()


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for old in file.parent.glob(".nodes-*"):  # of trainers that were killed
            old.unlink(missing_ok=True)
        file.write_text(text)
    except OSError as error:
        raise UserError(f"folder: {file} cannot be written: {error.strerror}") from error


async def _never(context: Any, why: str) -> NoReturn:
    await grpc_kit.abort(context, grpc.StatusCode.FAILED_PRECONDITION, "NODE_REFUSED", why)


async def _later(context: Any, why: str) -> NoReturn:
    await grpc_kit.abort(context, grpc.StatusCode.UNAVAILABLE, "NOT_GATHERING", why)
