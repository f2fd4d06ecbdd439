"""Replicas in a transfer group of a real policy service: the engines are fakes whose receiver is
vLLM's, and the group is one by gloo."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from services.common.lifecycle import cancel
from services.common.recorder import Recorder
from services.generator import weight_group as member_module
from services.generator import weight_links
from services.generator.serving import Serving
from services.generator.types import LoadTimes
from services.generator.weight_group import GroupMember, member_of
from services.generator.weights import PolicyClient
from services.trainer import weight_group as module
from services.trainer.policy import PolicyServicer
from services.trainer.weight_group import WeightGroup
from tests.gloo_groups import GlooTransport
from tests.services.generator.fakes import FakeEngine, recipe_of, recorder, values
from tests.services.generator.trainers import Trainer, client_of, trainer, weights_of
from tests.waiting import until

TIMEOUT_S = 60.0


class Model:
    """What vLLM's receiver loads into."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        new = {name: tensor.clone() for name, tensor in weights}
        self.tensors |= new
        return set(new)


class Weights:
    """See engine_weights.EngineWeights."""

    num_workers = 1
    joins_groups = True

    def __init__(self, engine: "GroupEngine") -> None:
        from services.generator.weight_receiver import Receiver
        from tests.services.generator.gloo_engine import GlooEngine

        settings: Any = SimpleNamespace(parallel_config=SimpleNamespace(rank=0), model_config=None)
        device = torch.device("cpu")
        self._engine = engine
        self._model = Model()
        nothing: Any = None
        self._receiver = Receiver(lambda: GlooEngine(nothing, settings, device, nothing))

    async def join_group(self, info: dict[str, Any], *, timeout_s: float) -> None:
        await asyncio.to_thread(self._receiver.join, info, timeout_s=timeout_s)

    async def leave_group(self) -> None:
        await asyncio.to_thread(self._receiver.leave)

    async def receive(
        self, version: int, *, begin: Callable[[], Awaitable[dict[str, Any] | None]]
    ) -> LoadTimes | None:
        self._engine.paused = True
        tensors = await begin()
        if tensors is not None:
            await asyncio.to_thread(self._receiver.receive, tensors, self._model)
            self._engine._w = self._model.tensors["w"].numpy()
            self._engine.loads.append(("broadcast", version))
        self._engine.paused = False
        return None if tensors is None else LoadTimes(pause_s=0.5, load_s=0.25, inflight=0)


class GroupEngine(FakeEngine):
    """One that can be in a group."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = Weights(self)

    @property
    def ways(self) -> list[tuple[int, str]]:
        """How each version came, but for the proof's."""
        return [
            (version, "broadcast" if name == "broadcast" else "fetched")
            for name, version in self.loads
            if version
        ]


@dataclass
class Replica:
    name: str
    client: PolicyClient
    engine: GroupEngine
    member: GroupMember
    serving: Serving
    recorder: Recorder
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    given_back: int = 0

    async def start(self) -> None:
        self.tasks.append(asyncio.create_task(self.client.watch()))
        await self.serving.start(lambda phase: None)
        self.tasks.append(asyncio.create_task(self.serving.follow(self._failed)))

    async def end(self) -> None:
        await cancel(*self.tasks)
        await self.engine.weights.leave_group()

    async def _failed(self) -> None:
        self.given_back += 1


@dataclass
class Fleet:
    trainer: Trainer
    group: WeightGroup
    transport: GlooTransport
    recorder: Recorder
    replicas: list[Replica]

    async def connected(self, *members: Replica) -> None:
        """Wait until there is a group of these."""
        names = {each.name for each in members}

        def there() -> bool:
            own = self.group._group
            return own is not None and own.members == names and own.communicator is not None

        await until(there)

    async def publish(self, seed: int) -> None:
        await self.trainer.publish(seed, provable=False)

    async def served(self, version: int, *replicas: Replica) -> None:
        """Wait until they serve it, and are known to."""
        for each in replicas:
            await each.serving.wait_proven(version)
        known = self.trainer.servicer.serving
        await until(lambda: all(known.get(each.name) == version for each in replicas))
        for each in replicas:
            assert np.array_equal(each.engine._w, weights_of(version))
            assert not each.engine.paused

    @property
    def failures(self) -> object:
        return values(self.recorder).get("policy/nccl_failed_total", 0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.services.generator.gloo_engine import without_streams

    without_streams(monkeypatch.setattr)
    monkeypatch.setattr(weight_links, "RETRY_S", (0.001, 0.01))
    monkeypatch.setattr(member_module, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(module, "LOOK_S", 0.005)
    monkeypatch.setattr(module, "ABSENT_S", 0.1)
    monkeypatch.setattr(module, "REST_S", (0.0, 0.0))


@asynccontextmanager
async def fleet_of(
    folder: Path, *, replicas: int, members: int | None = None
) -> AsyncIterator[Fleet]:
    """A trainer whose group has `members` of the replicas; these have not started yet."""
    measured = recorder()

    def group_of(servicer: PolicyServicer) -> WeightGroup:
        return WeightGroup(
            measured,
            replicas=members or replicas,
            timeout_s=TIMEOUT_S,
            present=servicer.serving.__contains__,
            buffer_bytes=64,
        )

    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(trainer(folder, group_of=group_of))
        group, transport = made.servicer.group, GlooTransport()
        assert group is not None
        group.open(transport)
        fleet = Fleet(made, group, transport, measured, [])
        for number in range(replicas):
            name = f"generator-{number}"
            client = await stack.enter_async_context(client_of(made.port, name=name))
            engine, of_replica = GroupEngine(), recorder()
            member = GroupMember(engine.weights, client)
            serving = Serving(
                *(engine, client, of_replica), dtype="float32", details={}, group=member
            )
            replica = Replica(name, client, engine, member, serving, of_replica)
            stack.push_async_callback(replica.end)
            fleet.replicas.append(replica)
        yield fleet


async def started(fleet: Fleet, *replicas: Replica) -> None:
    """Publish version 1, and have them begin with it."""
    await fleet.trainer.publish(1)
    await asyncio.gather(*(each.start() for each in replicas))


async def test_versions_are_broadcast_once_the_load_path_is_proven(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, replicas=2) as fleet:
        first, second = fleet.replicas
        await started(fleet, first, second)
        await fleet.connected(first, second)
        for version in (2, 3):
            await fleet.publish(version)
            await fleet.served(version, first, second)
        for each in (first, second):
            assert each.engine.ways == [(1, "fetched"), (2, "broadcast"), (3, "broadcast")]
            found = values(each.recorder)
            assert found["perf/weight_sync_pause_s"] == (3, 1.5)
            assert "policy/canary_failed_total" not in found
        assert fleet.failures == 0
        # Nobody is sent to a member for a file that it does not have.
        current = fleet.trainer.store.current
        assert current is not None
        sources = fleet.trainer.servicer._sources
        assert sources.find("other", sha256=current.sha256, failed=()) == ""
        assert first.client.find_file(current.sha256) is None


async def test_a_replica_outside_the_group_fetches(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, replicas=3, members=2) as fleet:
        first, second, newcomer = fleet.replicas
        await started(fleet, first, second)
        await fleet.connected(first, second)
        await fleet.publish(2)
        await fleet.served(2, first, second)
        fetched = asyncio.create_task(newcomer.start())
        current = fleet.trainer.store.current
        assert current is not None
        await fleet.trainer.servicer.proof_wanted.wait()
        await fleet.trainer.store.add_perturbed(2, _perturbed(2))
        await fetched
        await fleet.publish(3)
        await fleet.served(3, first, second, newcomer)
        assert newcomer.engine.ways == [(2, "fetched"), (3, "fetched")]
        assert first.engine.ways[-1] == second.engine.ways[-1] == (3, "broadcast")


async def test_a_replica_that_dies_within_a_broadcast_costs_the_others_a_fetch(
    tmp_path: Path,
) -> None:
    """Nothing is given back, and with the next one there is a group again."""
    async with fleet_of(tmp_path, replicas=2) as fleet:
        first, second = fleet.replicas
        await started(fleet, first, second)
        await fleet.connected(first, second)
        fleet.transport.senders[0].goes_on.clear()
        await fleet.publish(2)
        own = fleet.group._group
        assert own is not None
        await until(lambda: own.offer is not None and own.offer.state.done())
        await cancel(*second.tasks)
        await fleet.served(2, first)
        assert first.engine.ways == [(1, "fetched"), (2, "fetched")]
        assert (first.given_back, fleet.failures) == (0, 1)
        assert "policy/canary_failed_total" not in values(first.recorder)
        second.tasks = []
        second.serving.proven = second.serving.version = 0
        again = asyncio.create_task(second.start())
        await fleet.trainer.servicer.proof_wanted.wait()
        await fleet.trainer.store.add_perturbed(2, _perturbed(2))
        await again
        await fleet.connected(first, second)
        await fleet.publish(3)
        await fleet.served(3, first, second)
        assert first.engine.ways[-1] == second.engine.ways[-1] == (3, "broadcast")


async def test_a_replica_that_dies_before_it_is_ready_costs_the_others_a_fetch(
    tmp_path: Path,
) -> None:
    async with fleet_of(tmp_path, replicas=2) as fleet:
        first, second = fleet.replicas
        await started(fleet, first, second)
        await fleet.connected(first, second)
        await cancel(second.tasks[1])  # it hears of versions and does nothing
        await fleet.publish(2)
        own = fleet.group._group
        assert own is not None
        await until(lambda: own.offer is not None and own.offer.ready == {first.name})
        await cancel(second.tasks[0])
        await fleet.served(2, first)
        assert first.engine.ways == [(1, "fetched"), (2, "fetched")]
        assert fleet.failures == 1


def receiving(replica: Replica) -> bool:
    """Whether its own end of the group is there, too."""
    return replica.engine.weights._receiver._engine is not None


async def test_a_trainer_that_falls_silent_costs_a_fetch(tmp_path: Path) -> None:
    """All are there, and nothing comes: each member gives up by itself."""
    async with fleet_of(tmp_path, replicas=2) as fleet:
        first, second = fleet.replicas
        await started(fleet, first, second)
        await fleet.connected(first, second)
        for each in (first, second):
            await until(partial(receiving, each))
            each.engine.weights._receiver._timeout_s = 0.5
        fleet.transport.senders[0].goes_on.clear()
        await fleet.publish(2)
        await fleet.served(2, first, second)
        assert first.engine.ways == second.engine.ways == [(1, "fetched"), (2, "fetched")]
        assert fleet.failures == 1
        await fleet.connected(first, second)
        await fleet.publish(3)
        await fleet.served(3, first, second)
        assert first.engine.ways[-1] == (3, "broadcast")


async def test_what_was_broadcast_and_is_not_proven_is_fetched(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, replicas=1) as fleet:
        [replica] = fleet.replicas
        await started(fleet, replica)
        await fleet.connected(replica)
        engine = replica.engine
        receive = engine.weights.receive

        async def off(version: int, **rest: Any) -> LoadTimes | None:
            times = await receive(version, **rest)
            engine._w = engine._w + np.float32(0.01)
            return times

        engine.weights.receive = off  # type: ignore[method-assign]
        await fleet.publish(2)
        await fleet.served(2, replica)
        assert engine.ways == [(1, "fetched"), (2, "broadcast"), (2, "fetched")]
        assert replica.given_back == 1
        assert values(replica.recorder)["policy/canary_failed_total"] == 1


async def test_a_trainer_that_has_no_groups_is_followed_all_the_same(tmp_path: Path) -> None:
    async with trainer(tmp_path) as made, client_of(made.port) as client:
        engine = GroupEngine()
        member = GroupMember(engine.weights, client)
        with capture_logs() as logs:
            await member.run()
        assert [log["event"] for log in logs] == [
            'versions are fetched: weights.transport is not "nccl" at the trainer'
        ]


def test_who_is_a_member() -> None:
    client: Any = None
    engine = GroupEngine()
    nccl = recipe_of(weights={"transport": "nccl"})
    assert member_of(recipe_of(), engine, client) is None
    assert member_of(nccl, FakeEngine(), client) is None
    assert isinstance(member_of(nccl, engine, client), GroupMember)
    engine.weights.joins_groups = False
    with capture_logs() as logs:
        assert member_of(nccl, engine, client) is None
    assert [log["event"] for log in logs] == ["versions are fetched: this engine has no NCCL"]


def _perturbed(seed: int) -> "np.ndarray[Any, Any]":
    from tests.services.generator.trainers import perturbed

    return perturbed(weights_of(seed))
