"""Node 0 and another node of a trainer, over gRPC in one process; a rank that is hosted is a real
process, which waits for a rank 0 that never comes."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from headrace.v1 import ranks_pb2 as wire
from headrace.v1 import ranks_pb2_grpc

from services.common import grpc_kit
from services.common.background import guarded
from services.common.config import Network, Recipe
from services.common.errors import STOPPED_STATUS, UserError
from services.common.lifecycle import Lifecycle, cancel
from services.trainer import meeting as meetings
from services.trainer import node as nodes
from services.trainer.meeting import Meeting, Patience
from services.trainer.node import Node, TrainerGone
from services.trainer.rank_ended import RankEnded
from services.trainer.terms import differing, terms_of
from tests.conftest import free_port
from tests.services.trainer.folders import make_folder
from tests.services.trainer.ranked import recipe_for
from tests.waiting import until

SHORT = Patience(hold_s=0.2, silence_s=30.0, return_s=0.5, heard_s=20.0, look_s=0.02)

pytestmark = pytest.mark.timeout(180)


def recipe_of(folder: Path, *, port: int, num_nodes: int = 2) -> Recipe:
    model = folder / "model"
    recipe = recipe_for(
        model if model.exists() else make_folder(model), ranks=num_nodes, nodes=num_nodes
    )
    network = Network(trainer=f"127.0.0.1:{port}", ranks=f"127.0.0.1:{free_port()}")
    return recipe.model_copy(update={"folder": str(folder), "network": network})


class World:
    """Node 0, and a channel to it."""

    def __init__(self, recipe: Recipe, patience: Patience, channel: grpc.aio.Channel) -> None:
        self.recipe, self.patience, self.channel = recipe, patience, channel
        self.lifecycle = Lifecycle("trainer")
        self.served: grpc_kit.Served | None = None

    def node(self, number: int = 1, *, recipe: Recipe | None = None) -> Node:
        self.other = Lifecycle("trainer")
        recipe = recipe or self.recipe
        return Node(recipe, number, self.other, self.channel, self.patience)

    async def serve(self) -> None:
        """Start node 0; in the place of one before, whose port and name it has."""
        if self.served is not None:
            await self.served.stop(0)
        self.meeting = Meeting(self.recipe, self.lifecycle, self.patience)
        port = int(self.recipe.network.trainer.rpartition(":")[2])
        add = ranks_pb2_grpc.add_RankServiceServicer_to_server
        register = [(add, self.meeting, meetings.SERVICE)]
        self.served = await grpc_kit.serve(Network(grpc_port=port), self.lifecycle, register)


@asynccontextmanager
async def world_of(
    folder: Path, *, patience: Patience = SHORT, **keys: Any
) -> AsyncIterator[World]:
    recipe = recipe_of(folder, port=free_port(), **keys)
    channel = grpc_kit.channel(recipe.network.trainer, recipe.network)
    world = World(recipe, patience, channel)
    await world.serve()
    try:
        yield world
    finally:
        await channel.close(None)
        assert world.served is not None
        await world.served.stop(0)


def hosted() -> list[psutil.Process]:
    """Rank processes of this one; one that has ended has no command line any more."""
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one too
            if "services.trainer.rank" in each.cmdline():
                found.append(each)
    return found


async def until_hosted() -> psutil.Process:
    await until(lambda: len(hosted()) == 1)
    return hosted()[0]


async def test_all_hear_how_it_ends(tmp_path: Path) -> None:
    async with world_of(tmp_path, num_nodes=3) as world:
        node, second = world.node(1), world.node(2)
        running = [asyncio.create_task(node.run()), asyncio.create_task(second.run())]
        place = await world.meeting.gather()
        assert (place.rank, place.size, place.nodes, place.interface) == (0, 3, 3, "lo")
        await until(lambda: len(hosted()) == 2)
        await guarded(asyncio.sleep(1.0), world.meeting.watch())  # several calls of each
        await world.meeting.end(75)
        async with asyncio.timeout(30):
            assert await asyncio.gather(*running) == [75, 75]
        assert hosted() == []
        assert not list(world.recipe.run_folder.glob(".nodes-*"))


async def test_a_rank_that_ends_there_is_known_here(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        running = asyncio.create_task(world.node().run())
        await world.meeting.gather()
        (await until_hosted()).send_signal(signal.SIGKILL)
        with pytest.raises(RankEnded, match=r"^rank 1 on node 1 ended with status -9; ") as raised:
            await world.meeting.watch()
        assert raised.value.status == 1
        await world.meeting.end(1)
        assert await running == 1


async def test_a_stop_there_is_a_stop_of_the_run(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        running = asyncio.create_task(world.node().run())
        await world.meeting.gather()
        await until_hosted()
        world.other.stopping.set()
        await asyncio.wait_for(world.lifecycle.stopping.wait(), 10)
        await guarded(asyncio.sleep(0.5), world.meeting.watch())
        assert not running.done(), "it ends only with the trainer"
        await world.meeting.end(STOPPED_STATUS)
        assert await running == STOPPED_STATUS


async def test_a_trainer_that_is_gone_ends_the_node(tmp_path: Path) -> None:
    patience = replace(SHORT, silence_s=0.5)
    async with world_of(tmp_path, patience=patience) as world:
        running = asyncio.create_task(world.node().run())
        await world.meeting.gather()
        await until_hosted()
        await world.serve()  # another start of the trainer, which knows nothing of this node
        assert await running == 1
        assert hosted() == []


async def test_silence_and_hanging_up_are_losses(tmp_path: Path) -> None:
    patience = replace(SHORT, silence_s=0.3)
    async with world_of(tmp_path, patience=patience) as world:
        gathering = asyncio.create_task(world.meeting.gather())
        request = await joined(world)
        call = stub(world).Stay(request)
        await gathering
        await call
        with pytest.raises(RankEnded, match=r"^node 1 has not been heard of for 0.3 s; "):
            await world.meeting.watch()

    async with world_of(tmp_path, patience=replace(SHORT, hold_s=20.0)) as world:
        gathering = asyncio.create_task(world.meeting.gather())
        request = await joined(world)
        await stub(world).Stay(request)
        await gathering
        request.stage = wire.STAGE_TRAINING
        for _ in range(2):
            # One call follows the other at once: that is no loss.
            call = stub(world).Stay(request)
            await asyncio.sleep(0.1)
            call.cancel()
        call = stub(world).Stay(request)
        await guarded(asyncio.sleep(1.0), world.meeting.watch())
        call.cancel()
        with pytest.raises(RankEnded, match=r"^node 1 has hung up and not come back; "):
            await world.meeting.watch()


def stub(world: World) -> Any:
    return ranks_pb2_grpc.RankServiceStub(world.channel)


async def joined(world: World, *, instance: str = "a") -> wire.StayRequest:
    """A node of the test's own has joined; how it stays."""
    request = wire.JoinRequest(
        node=1, instance=instance, terms=terms_of(world.recipe), address="127.0.0.1"
    )
    async with asyncio.timeout(30):
        while True:
            try:
                answer = await stub(world).Join(request)
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE  # noqa: PT017 - or asked again
                await asyncio.sleep(0.01)
    return wire.StayRequest(
        session=answer.session,
        node=1,
        instance=instance,
        stage=wire.STAGE_GATHERING,
        shares_folder=True,
    )


async def test_a_node_may_come_and_go_before_the_first_rank(tmp_path: Path) -> None:
    async with world_of(tmp_path, num_nodes=3) as world:
        gathering = asyncio.create_task(world.meeting.gather())
        request = await joined(world)
        call = stub(world).Stay(request)
        await until(lambda: world.lifecycle.phase == "waiting for node 2 of 3")
        call.cancel()
        await until(lambda: world.lifecycle.phase == "waiting for node 1, 2 of 3")
        # It comes again, twice: the second one is the node.
        request = await joined(world)
        await joined(world, instance="b")
        with pytest.raises(grpc.aio.AioRpcError, match="another process has joined as this node"):
            await stub(world).Stay(request)
        await cancel(gathering)


async def test_another_trainer_in_the_meantime_is_joined_again(tmp_path: Path) -> None:
    async with world_of(tmp_path, num_nodes=3) as world:
        gathering = asyncio.create_task(world.meeting.gather())
        first = world.node(1)
        waiting = [asyncio.create_task(first._until_training())]
        await until(lambda: world.lifecycle.phase == "waiting for node 2 of 3")
        await cancel(gathering)
        await world.serve()
        waiting.append(asyncio.create_task(world.node(2)._until_training()))
        await world.meeting.gather()
        heard = await asyncio.gather(*waiting)
        assert [each.stage for each in heard] == [wire.STAGE_TRAINING] * 2


async def test_a_trainer_that_is_silent_ends_the_node(tmp_path: Path) -> None:
    async with world_of(tmp_path, patience=replace(SHORT, silence_s=0.5)) as world:
        gathering = asyncio.create_task(world.meeting.gather())
        node = world.node()
        waiting = asyncio.create_task(node._until_training())
        await gathering
        await waiting
        assert world.served is not None
        await world.served.stop(0)
        with pytest.raises(TrainerGone, match=r"has not been heard of for 0\.5 s"):
            await node._after(wire.STAGE_TRAINING)


async def test_who_has_another_recipe_is_refused(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        gathering = asyncio.create_task(world.meeting.gather())
        other = world.recipe.model_copy(
            update={
                "run": "other",
                "loss": world.recipe.loss.model_copy(update={"clip_high": 0.5}),
                "network": world.recipe.network.model_copy(update={"grpc_port": 7}),
            }
        )
        with pytest.raises(UserError, match="refuses node 1: not the same as on node 0: ") as said:
            await world.node(recipe=other).run()
        assert "node 0: folder, loss, run;" in str(said.value)
        assert world.lifecycle.details["node 1"].startswith("refused: ")
        with pytest.raises(UserError, match=r"--node 2: trainer.nodes is 2"):
            await world.node(2).run()
        await cancel(gathering)


def test_the_terms_are_the_recipe_and_the_files(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, port=1)
    before = terms_of(recipe)
    assert terms_of(recipe) == before
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    assert differing(before, terms_of(recipe)) == ["files of model.path"]


async def test_a_node_with_another_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "SEEN_WITHIN_S", 0.2)
    async with world_of(tmp_path) as world:
        answer, node = wire.JoinResponse(session="s", file=".nodes-s"), world.node()
        folder = world.recipe.run_folder
        for text in (None, "of an older start"):
            if text is not None:
                folder.mkdir()
                (folder / answer.file).write_text(text)
            with pytest.raises(UserError, match=f"^folder: {folder} is not the folder of node 0"):
                node._check_folder(answer)
        (folder / answer.file).write_text("s")
        node._check_folder(answer)
        (folder / f"{answer.file}.1").mkdir()
        with pytest.raises(UserError, match="cannot be written to by node 1"):
            node._check_folder(answer)


async def test_a_trainer_with_one_node_says_so(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, port=free_port())
    port = int(recipe.network.trainer.rpartition(":")[2])
    served = await grpc_kit.serve(Network(grpc_port=port), Lifecycle("trainer"))
    channel = grpc_kit.channel(recipe.network.trainer, recipe.network)
    try:
        with pytest.raises(UserError, match=r"refuses node 1: it has trainer.nodes = 1"):
            await Node(recipe, 1, Lifecycle("trainer"), channel, SHORT).run()
    finally:
        await channel.close(None)
        await served.stop(0)


async def test_who_has_no_token_joins_nothing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    recipe = recipe_of(tmp_path, port=free_port())
    port = int(recipe.network.trainer.rpartition(":")[2])
    network = Network(grpc_port=port, token_file=str(token))
    meeting = Meeting(recipe, Lifecycle("trainer"), SHORT)
    add = ranks_pb2_grpc.add_RankServiceServicer_to_server
    served = await grpc_kit.serve(network, Lifecycle("trainer"), [(add, meeting, meetings.SERVICE)])
    gathering = asyncio.create_task(meeting.gather())
    try:
        for own in (recipe.network, network):
            channel = grpc_kit.channel(recipe.network.trainer, own)
            waiting = asyncio.create_task(
                Node(recipe, 1, Lifecycle("trainer"), channel, SHORT)._until_training()
            )
            if own is network:
                assert (await waiting).stage == wire.STAGE_TRAINING
            else:
                with pytest.raises(UserError, match=r"refuses node 1: .*token"):
                    await waiting
            await channel.close(None)
    finally:
        await cancel(gathering)
        await served.stop(0)
