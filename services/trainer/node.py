"""`headrace trainer RECIPE --node N` with N > 0: a machine that only hosts ranks. It has neither
queue nor policy service; the trainer is node 0 (meeting.py is that side).

    waiting -> joined -> its ranks train -> it ends with the trainer, and with the same status

Any node may start first. Until all are there a node may come and go, and so may the trainer; after
that the end of one is the end of all.

Asked to stop, it tells the trainer, which ends its step, writes a checkpoint and ends; only then
does this node. A machine that is taken away in order costs no step.

waits_for: the trainer. unblocked_by: its word, or its silence (Patience.silence_s).
"""

import asyncio
import os
import secrets
import time
from pathlib import Path
from typing import Any, NoReturn

import grpc
import structlog
from headrace.v1 import ranks_pb2 as wire
from headrace.v1 import ranks_pb2_grpc

from services.common import grpc_kit
from services.common.background import unless
from services.common.command import Invocation
from services.common.config import Recipe
from services.common.errors import STOPPED_STATUS, EndedWith, UserError
from services.common.lifecycle import Lifecycle, announce
from services.trainer.interfaces import interface_towards, own_address
from services.trainer.meeting import Patience
from services.trainer.rank_ended import RankProcessEnded
from services.trainer.rank_processes import RankProcesses
from services.trainer.ranks import Place
from services.trainer.terms import terms_of

RETRY_S = 1.0
"""Between two tries to reach the trainer."""

SEEN_WITHIN_S = 10.0
"""A file that node 0 has written must be here after so long: file systems over a network cache."""

TOLD_WITHIN_S = 15.0
"""A node that has lost a rank waits so long for the trainer to say how it ends."""

HOPELESS = (
    *(grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED),
    *(grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED),
)
"""Answers that stay what they are until somebody changes something."""


class TrainerGone(RuntimeError):
    """The trainer that this node belonged to is no more, or is another one."""


async def main(invocation: Invocation, lifecycle: Lifecycle) -> None:
    """Host ranks until the trainer ends. Raises UserError, and EndedWith for any end of the trainer
    but that of the run."""
    recipe, node = invocation.recipe, invocation.node
    if not node < recipe.trainer.nodes:
        raise UserError(
            f"--node {node}: nodes are counted from 0, and trainer.nodes is {recipe.trainer.nodes}"
        )
    served = await grpc_kit.serve(recipe.network, lifecycle)
    announce(
        invocation.announce,
        grpc_port=served.port,
        health_port=served.health_port,
        pid=os.getpid(),
    )
    channel = grpc_kit.channel(recipe.network.trainer, recipe.network)
    try:
        status = await Node(recipe, node, lifecycle, channel).run()
    finally:
        await lifecycle.set_ready(False)
        await channel.close(None)
        await served.stop(0)
    if status:
        raise EndedWith(status, f"node {node} ends with its trainer")


class Node:
    """One of the nodes from 1 on."""

    def __init__(
        self,
        recipe: Recipe,
        node: int,
        lifecycle: Lifecycle,
        channel: grpc.aio.Channel,
        patience: Patience | None = None,
    ) -> None:
        self._recipe, self._node, self._lifecycle = recipe, node, lifecycle
        self._stub: Any = ranks_pb2_grpc.RankServiceStub(channel)
        self._patience = patience or Patience()
        self._instance = secrets.token_hex(8)
        self._session = self._interface = ""
        self._why_waiting = ""

    async def run(self) -> int:
        """Wait for the trainer, host its ranks; the status with which it ended. Raises UserError
        when this node can never belong to it."""
        stopping = self._lifecycle.stopping
        began = await unless(stopping, self._until_training())
        if began is None:
            return STOPPED_STATUS
        if began.stage == wire.STAGE_ENDED:
            return began.status
        ranks = await RankProcesses.host(self._recipe, self._place(), self._node)
        self._lifecycle.enter(f"hosting ranks {ranks.numbers}")
        await self._lifecycle.set_ready(True)
        try:
            ended = await ranks.beside(self._after(wire.STAGE_TRAINING))
            return ended.status
        except RankProcessEnded as error:
            structlog.get_logger().error("RANK LOST", why=str(error))
            return await self._tell(error)
        except TrainerGone as error:
            structlog.get_logger().error("TRAINER LOST", why=str(error))
            return 1
        finally:
            await self._lifecycle.set_ready(False)
            await ranks.end()

    # -- until all are there

    async def _until_training(self) -> wire.StayResponse:
        """Join, again where that trainer goes away, until the nodes are complete; what came then.
        An end of the trainer in the meantime is one, too."""
        self._terms = await asyncio.to_thread(terms_of, self._recipe)
        while True:
            joined = await self._join()
            self._session = joined.session
            self._lifecycle.enter("looking for the trainer's file")
            await asyncio.to_thread(self._check_folder, joined)
            self._lifecycle.enter("waiting for the other nodes")
            try:
                return await self._after(wire.STAGE_GATHERING)
            except TrainerGone as error:
                self._say_waiting(str(error))

    async def _join(self) -> wire.JoinResponse:
        request = wire.JoinRequest(node=self._node, instance=self._instance, terms=self._terms)
        while True:
            try:
                request.address = await asyncio.to_thread(own_address, self._host)
                self._interface = await asyncio.to_thread(interface_towards, self._host)
                joined: wire.JoinResponse = await self._stub.Join(
                    request, timeout=grpc_kit.UNARY_DEADLINE_S
                )
                return joined
            except OSError as error:  # its name may be known later
                self._say_waiting(f"network.ranks: {self._host}: {error.strerror}")
            except grpc.aio.AioRpcError as error:
                self._give_up_if_hopeless(error)
                self._say_waiting(error.details() or error.code().name)
            await asyncio.sleep(RETRY_S)

    def _say_waiting(self, why: str) -> None:
        self._lifecycle.enter(f"waiting for the trainer at {self._recipe.network.trainer}")
        if why != self._why_waiting:
            structlog.get_logger().info("the trainer is not there", why=why)
            self._why_waiting = why

    def _check_folder(self, joined: wire.JoinResponse) -> None:
        """Raises UserError unless the run's folder is the trainer's, and can be written to."""
        folder = self._recipe.run_folder.absolute()
        deadline_s = time.monotonic() + SEEN_WITHIN_S
        while not _holds(folder / joined.file, joined.session):
            if time.monotonic() > deadline_s:
                raise UserError(
                    f"folder: {folder} is not the folder of node 0, since a file that node 0 has "
                    "written there is not here; nodes of a trainer need one shared file system at "
                    "the same path (in Kubernetes: a ReadWriteMany volume)"
                )
            time.sleep(0.1)
        own = folder / f"{joined.file}.{self._node}"
        try:
            own.write_text(joined.session)
            own.unlink()
        except OSError as error:
            raise UserError(
                f"folder: {folder} cannot be written to by node {self._node}: {error.strerror}"
            ) from error

    # -- from then on

    async def _after(self, stage: "wire.Stage.ValueType") -> wire.StayResponse:
        """Stay until the trainer is at another stage. Raises TrainerGone, and UserError when this
        node is told to go."""
        heard_s = time.monotonic()
        while True:
            try:
                answer = await self._stay(stage)
                heard_s = time.monotonic()
                if answer is not None and answer.stage != stage:
                    return answer
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    raise TrainerGone("the trainer has been started again") from error
                self._give_up_if_hopeless(error)
                if time.monotonic() - heard_s > self._patience.silence_s:
                    raise TrainerGone(
                        f"the trainer has not been heard of for {self._patience.silence_s:g} s"
                    ) from error
                await asyncio.sleep(RETRY_S)

    async def _stay(
        self, stage: "wire.Stage.ValueType", ended: wire.EndedRank | None = None
    ) -> wire.StayResponse | None:
        """One call; None when it was broken off, since there is something new to say."""
        stopping = self._lifecycle.stopping
        request = wire.StayRequest(
            session=self._session,
            node=self._node,
            instance=self._instance,
            stage=stage,
            shares_folder=True,
            stopping=stopping.is_set(),
            ended=ended,
        )
        call = self._call(request)
        return await (call if stopping.is_set() else unless(stopping, call))

    async def _call(self, request: wire.StayRequest) -> wire.StayResponse:
        timeout_s = self._patience.hold_s + grpc_kit.UNARY_DEADLINE_S / 2
        answer: wire.StayResponse = await self._stub.Stay(request, timeout=timeout_s)
        return answer

    async def _tell(self, error: RankProcessEnded) -> int:
        """Say that a rank is gone; the status with which the trainer ends, where it still says."""
        ended = wire.EndedRank(rank=error.rank, status=error.process_status)
        deadline_s = time.monotonic() + TOLD_WITHIN_S
        while time.monotonic() < deadline_s:
            try:
                answer = await self._stay(wire.STAGE_TRAINING, ended)
            except grpc.aio.AioRpcError:
                break  # it has gone first, and the rank with it
            if answer is not None and answer.stage == wire.STAGE_ENDED:
                return answer.status
        return error.status

    def _give_up_if_hopeless(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            self._refused("it has trainer.nodes = 1")
        if error.code() in HOPELESS:
            self._refused(error.details() or error.code().name)

    def _refused(self, why: str) -> NoReturn:
        raise UserError(
            f"the trainer at {self._recipe.network.trainer} refuses node {self._node}: {why}"
        )

    # -- where

    @property
    def _host(self) -> str:
        """Of rank 0."""
        address = self._recipe.network.ranks
        assert address is not None, "checked with the recipe"
        return address.rpartition(":")[0].strip("[]")

    def _place(self) -> Place:
        """Of this node's first rank."""
        address, trainer = self._recipe.network.ranks, self._recipe.trainer
        assert address is not None, "checked with the recipe"
        return Place(
            self._node * (trainer.ranks // trainer.nodes),
            trainer.ranks,
            int(address.rpartition(":")[2]),
            self._host,
            nodes=trainer.nodes,
            interface=self._interface,
            session=self._session,
        )


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_text() == text
    except OSError:  # not yet here, or a folder that is not here at all
        return False
