"""Which version a replica serves: a fake engine, a real policy service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from structlog.testing import capture_logs

from services.common.lifecycle import cancel
from services.common.recorder import Recorder
from services.generator import serving as module
from services.generator import weight_links
from services.generator.proof import LoadNotProven
from services.generator.serving import MAX_LOADS, Serving
from services.generator.types import EngineDead, LoadTimes
from services.generator.weights import PolicyClient
from services.trainer.policy import PolicyServicer
from tests.services.generator.fakes import FakeEngine, recorder, values
from tests.services.generator.trainers import (
    ServicerOf,
    Trainer,
    client_of,
    perturbed,
    trainer,
    weights_of,
)
from tests.waiting import PATIENCE_S, until


@dataclass
class Replica:
    """A replica before its start, and the trainer that it follows."""

    trainer: Trainer
    client: PolicyClient
    engine: FakeEngine
    serving: Serving
    recorder: Recorder
    phases: list[str] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)
    given_back: list[bool] = field(default_factory=list)
    """At each failure: whether the engine was paused."""
    follow: "asyncio.Task[None] | None" = None

    async def start(self) -> None:
        await self.serving.start(self.phases.append)

    async def failed(self) -> None:
        self.given_back.append(self.engine.paused)

    def says(self, version: int) -> bool:
        """Whether the trainer has heard that this version is served."""
        return self.trainer.servicer.serving == {"generator-0": version}

    def go(self) -> None:
        self.follow = asyncio.create_task(self.serving.follow(self.failed))


@asynccontextmanager
async def replica_of(
    folder: Path,
    *,
    engine: FakeEngine | None = None,
    max_staleness: int = 2,
    dtype: str = "float32",
    servicer: ServicerOf = lambda: PolicyServicer(recorder()),
) -> AsyncIterator[Replica]:
    async with (
        trainer(folder, max_staleness=max_staleness, servicer=servicer) as made,
        client_of(made.port) as client,
    ):
        chosen = engine or FakeEngine()
        measured = recorder()
        details: dict[str, str] = {}
        serving = Serving(chosen, client, measured, dtype=dtype, details=details)
        replica = Replica(made, client, chosen, serving, measured, details=details)
        watch = asyncio.create_task(client.watch())
        try:
            yield replica
        finally:
            await cancel(*(task for task in (watch, replica.follow) if task is not None))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_links, "RETRY_S", (0.001, 0.01))


async def test_a_start_proves_the_load_path_before_any_work(tmp_path: Path) -> None:
    async with replica_of(tmp_path) as replica:
        serving, engine = replica.serving, replica.engine
        start = asyncio.create_task(replica.start())
        await until(lambda: replica.phases)
        assert not serving.may_take_work
        await replica.trainer.publish(1)
        await start
        # The perturbed copy first, labelled as no version, then the true weights.
        assert [version for _, version in engine.loads] == [0, 1]
        assert engine.loads[0][0] == "perturbed.safetensors"
        assert (serving.version, serving.proven, serving.behind) == (1, 1, 0)
        assert serving.may_take_work
        await until(partial(replica.says, 1))
        assert replica.phases == [
            "waiting for the first policy version",
            "fetching policy version 1",
            "proving the weight load path",
        ]
        found = values(replica.recorder)
        assert found["policy/served_version"] == (1, 1.0)
        assert found["policy/canary_gap"] == (1, 0.0)
        assert found["perf/weight_sync_pause_s"] == (1, 0.5)


async def test_an_engine_with_a_stale_tensor_never_gets_ready(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with replica_of(tmp_path, engine=engine) as replica:
        await replica.trainer.publish(1)
        seen = await replica.client.newer_than(0)
        await engine.load(await replica.client.fetch(seen), 0)
        engine.stale = True
        with pytest.raises(LoadNotProven, match="stale tensor"):
            await replica.start()
        assert not replica.serving.may_take_work
        assert replica.trainer.servicer.serving == {"generator-0": 0}


async def test_a_late_joiner_waits_for_the_perturbed_canary(tmp_path: Path) -> None:
    """C23: the trainer is at version 12 when it joins, and 12 is the first that it serves."""
    async with replica_of(tmp_path) as replica:
        for _ in range(12):
            await replica.trainer.publish(1, provable=False)
        await replica.client.newer_than(11)
        start = asyncio.create_task(replica.start())
        await replica.trainer.servicer.proof_wanted.wait()
        assert replica.trainer.servicer.proofs_wanted == [12]
        assert replica.engine.loads == []
        assert not replica.serving.may_take_work
        await replica.trainer.store.add_perturbed(12, perturbed(weights_of(1)))
        await start
        assert replica.serving.version == 12
        assert [version for _, version in replica.engine.loads] == [0, 12]


class Gated(PolicyServicer):
    """Sends weights only when it is told to, as over a slow link."""

    def __init__(self) -> None:
        super().__init__(recorder())
        self.go = asyncio.Event()
        self.asked = asyncio.Event()

    async def FetchWeights(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.set()
        await self.go.wait()
        async for piece in super().FetchWeights(request, context):
            yield piece


async def test_a_joiner_fetches_one_file_though_steps_are_faster_than_its_fetch(
    tmp_path: Path,
) -> None:
    """What overtakes its version while that is fetched, and while its proof is computed, comes
    when it serves."""
    sending = Gated()
    async with replica_of(tmp_path, servicer=lambda: sending) as replica:
        made, serving = replica.trainer, replica.serving
        one = await made.publish(1, provable=False)
        start = asyncio.create_task(replica.start())
        await asyncio.wait_for(sending.asked.wait(), PATIENCE_S)
        await made.publish(2, provable=False)  # while the first is on its way
        await replica.client.newer_than(1)
        sending.go.set()

        def whole() -> bool:
            held = replica.client.find_file(one.sha256)
            return held is not None and held.complete

        await until(whole)
        three = await made.publish(3, provable=False)  # and while its values are computed
        await replica.client.newer_than(2)
        assert replica.engine.loads == []
        assert made.servicer.proofs_wanted == [1]
        await made.store.add_perturbed(1, perturbed(weights_of(1)))
        await asyncio.wait_for(start, PATIENCE_S)
        assert replica.phases == [
            "waiting for the first policy version",
            "fetching policy version 1",
            "proving the weight load path",
        ]
        assert [version for _, version in replica.engine.loads] == [0, 1]
        assert (serving.version, serving.behind, serving.may_take_work) == (1, 2, True)
        size_bytes = one.file.pieces.size_bytes
        assert sending.sent_bytes == size_bytes

        # The newest one comes as to every replica, and needs no proof of its own.
        replica.go()
        await asyncio.wait_for(serving.wait_proven(3), PATIENCE_S)
        assert [version for _, version in replica.engine.loads] == [0, 1, 3]
        assert sending.sent_bytes == size_bytes + three.file.pieces.size_bytes
        await until(partial(replica.says, 3))
        assert made.servicer.proofs_wanted == []


@pytest.mark.parametrize("because", ["too old", "of a replaced attempt"])
async def test_a_joiner_begins_anew_when_its_version_cannot_be_served_any_more(
    tmp_path: Path, because: str
) -> None:
    async with replica_of(tmp_path, max_staleness=1) as replica:
        made = replica.trainer
        await made.publish(1, provable=False)
        start = asyncio.create_task(replica.start())
        await until(lambda: made.servicer.proofs_wanted == [1])
        if because == "of a replaced attempt":
            made.store._attempt = 2
        else:
            await made.publish(2, provable=False)
        await made.publish(3, provable=False)
        newest = made.store.version
        await until(lambda: newest in made.servicer.proofs_wanted)
        await made.store.add_perturbed(newest, perturbed(weights_of(3)))
        await asyncio.wait_for(start, PATIENCE_S)
        assert [version for _, version in replica.engine.loads] == [0, newest]
        assert replica.serving.may_take_work


async def test_another_precision_than_the_trainers_is_said_once(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with replica_of(tmp_path, dtype="bfloat16") as replica:
            await replica.trainer.publish(1)
            await replica.start()
            replica.go()
            await replica.trainer.publish(2, provable=False)
            await replica.serving.wait_proven(2)
            assert replica.details == {"dtype_mismatch": "engine bfloat16, trainer float32"}
    said = [log for log in logs if "DTYPE MISMATCH" in log["event"]]
    assert [log["log_level"] for log in said] == ["warning"]

    same = tmp_path / "same"
    same.mkdir()
    async with replica_of(same) as replica:
        await replica.trainer.publish(1)
        await replica.start()
        assert replica.details == {}


async def test_newer_versions_are_followed(tmp_path: Path) -> None:
    async with replica_of(tmp_path) as replica:
        await replica.trainer.publish(1)
        await replica.start()
        replica.go()
        for seed in (2, 3):
            await replica.trainer.publish(seed, provable=False)
            await replica.serving.wait_proven(seed)
            await until(partial(replica.says, seed))
        assert [version for _, version in replica.engine.loads] == [0, 1, 2, 3]
        assert replica.serving.take_paused_s() == 1.0
        assert replica.serving.take_paused_s() == 0.0
        assert replica.given_back == []


async def test_results_of_a_version_wait_for_its_canary(tmp_path: Path) -> None:
    goes_on = asyncio.Event()

    class Slow(FakeEngine):
        async def row_logprobs(self, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
            if self.loads[-1][1] == 2:
                await goes_on.wait()
            return await super().row_logprobs(rows)

    async with replica_of(tmp_path, engine=Slow()) as replica:
        await replica.trainer.publish(1)
        await replica.start()
        replica.go()
        await replica.serving.wait_proven(1)
        await replica.trainer.publish(2)
        waiting = asyncio.create_task(replica.serving.wait_proven(2))
        await until(lambda: replica.serving.version == 2)
        assert (replica.serving.proven, waiting.done()) == (1, False)
        goes_on.set()
        await waiting
        assert replica.serving.proven == 2


async def test_a_replica_too_far_behind_takes_no_work(tmp_path: Path) -> None:
    async with replica_of(tmp_path, max_staleness=2) as replica:
        await replica.trainer.publish(1)
        await replica.start()
        for version, may in ((2, True), (3, True), (4, False)):
            await replica.trainer.publish(version)
            await replica.client.newer_than(version - 1)
            assert replica.serving.behind == version - 1
            assert replica.serving.may_take_work is may
        replica.go()
        await replica.serving.wait_proven(4)
        assert replica.serving.may_take_work


async def test_what_an_earlier_attempt_published_is_no_work_to_take(tmp_path: Path) -> None:
    """A trainer that restored a checkpoint has left it behind: groups made with it are dropped."""
    async with replica_of(tmp_path) as replica:
        await replica.trainer.publish(1)
        await replica.start()
        assert replica.serving.may_take_work
        replica.trainer.store._attempt = 2
        await replica.trainer.publish(2)
        await replica.client.newer_than(1)
        assert replica.serving.behind == 1
        assert not replica.serving.may_take_work
        replica.go()
        await replica.serving.wait_proven(2)
        assert replica.serving.may_take_work


async def test_a_new_attempt_is_served_though_the_replaced_one_has_published_past_it(
    tmp_path: Path,
) -> None:
    async with replica_of(tmp_path) as replica:
        for version in (1, 2):
            await replica.trainer.publish(version)
        await replica.start()
        replica.go()
        await until(lambda: (replica.serving.version, replica.serving.attempt) == (2, 1))
        store, restored = replica.trainer.store, weights_of(3)
        store._attempt = 2
        save_file({"w": restored}, store.next_path())
        await store.publish(
            step=3,
            num_tensors=1,
            dtype="float32",
            canary_logprobs=restored,
            perturbed_logprobs=None,
            again=1,
        )
        await until(lambda: replica.serving.attempt == 2)
        assert replica.serving.version == 1
        assert replica.serving.may_take_work
        # Groups that were begun before are handed on, for the trainer to drop.
        await asyncio.wait_for(replica.serving.wait_proven(2), PATIENCE_S)


async def test_a_failed_load_gives_back_and_is_repeated(tmp_path: Path) -> None:
    async with replica_of(tmp_path) as replica:
        serving, engine = replica.serving, replica.engine
        await replica.trainer.publish(1)
        await replica.start()
        replica.go()
        engine.failing_loads = 1
        await replica.trainer.publish(2)
        await serving.wait_proven(2)
        assert replica.given_back == [True]
        assert [version for _, version in engine.loads] == [0, 1, 2, 2]
        assert not engine.paused
        assert serving.may_take_work
        assert values(replica.recorder)["policy/canary_failed_total"] == 1


async def test_a_failed_canary_stops_the_engine_until_a_load_is_proven(tmp_path: Path) -> None:
    """What a broken engine sampled would bear the label of a version that is proven later."""

    class Off(FakeEngine):
        async def load(self, path: Path, version: int) -> LoadTimes:
            times = await super().load(path, version)
            self.off = 0.01 if len(self.loads) == 3 else 0.0
            return times

    async with replica_of(tmp_path, engine=Off()) as replica:
        await replica.trainer.publish(1)
        await replica.start()
        replica.go()
        await replica.trainer.publish(2)
        await replica.serving.wait_proven(2)
        assert replica.given_back == [True]
        assert [version for _, version in replica.engine.loads] == [0, 1, 2, 2]


async def test_a_replica_whose_loads_keep_failing_gives_up(tmp_path: Path) -> None:
    async with replica_of(tmp_path) as replica:
        await replica.trainer.publish(1)
        await replica.start()
        replica.engine.failing_loads = MAX_LOADS
        replica.go()
        await replica.trainer.publish(2)
        assert replica.follow is not None
        with pytest.raises(LoadNotProven, match=r"3 loads in a row failed.*not written: w"):
            await replica.follow
        assert replica.given_back == [True] * MAX_LOADS
        assert not replica.serving.may_take_work
        assert values(replica.recorder)["policy/canary_failed_total"] == MAX_LOADS


async def test_a_load_that_succeeds_ends_the_row_of_failures(tmp_path: Path) -> None:
    async with replica_of(tmp_path) as replica:
        await replica.trainer.publish(1)
        await replica.start()
        replica.go()
        for version in (2, 3):
            replica.engine.failing_loads = MAX_LOADS - 1
            await replica.trainer.publish(version)
            await replica.serving.wait_proven(version)
        assert len(replica.given_back) == 2 * (MAX_LOADS - 1)


async def test_a_dead_engine_is_not_loaded_again(tmp_path: Path) -> None:
    class Dead(FakeEngine):
        async def load(self, path: Path, version: int) -> LoadTimes:
            if version == 2:
                raise EngineDead("gone")
            return await super().load(path, version)

    async with replica_of(tmp_path, engine=Dead()) as replica:
        await replica.trainer.publish(1)
        await replica.start()
        replica.go()
        await replica.trainer.publish(2)
        assert replica.follow is not None
        with pytest.raises(EngineDead):
            await replica.follow
        assert replica.given_back == []


async def test_a_version_that_cannot_be_fetched_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFETCH_S", 0.01)
    async with replica_of(tmp_path) as replica:
        store = replica.trainer.store
        published = await replica.trainer.publish(1)
        whole = published.path.read_bytes()
        published.path.write_bytes(whole[:-1] + b"?")
        start = asyncio.create_task(replica.start())
        await until(lambda: "policy/fetch_failed_total" in values(replica.recorder))
        assert store.current is published
        published.path.write_bytes(whole)
        await start
        assert replica.serving.may_take_work
