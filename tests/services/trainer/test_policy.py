"""The policy service over real gRPC on the loopback."""

import asyncio
import hashlib
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status
from headrace.v1 import policy_pb2 as wire
from headrace.v1 import policy_pb2_grpc

from services.common import grpc_kit, weight_files
from services.common.config import Network
from services.common.config import Recorder as RecorderSettings
from services.common.errors import Fenced, UserError
from services.common.lifecycle import Lifecycle, cancel
from services.common.partials import Observation
from services.common.recorder import Recorder
from services.trainer.attempts import Attempts
from services.trainer.policy import PolicyServicer, PolicyStore
from services.trainer.published import Published
from tests.waiting import until

CONFIG = {"config.json": b"{}", "tokenizer_config.json": b'{"a": 1}', "tokenizer.json": b"x" * 9000}


@dataclass
class House:
    """A policy service, its store, and a generator's view of it."""

    store: PolicyStore
    servicer: PolicyServicer
    recorder: Recorder
    stub: Any

    async def publish(self, content: bytes, *, proof: bool = False, step: int = 0) -> Published:
        self.store.next_path().write_bytes(content)
        rows = self.store.canary_rows
        values = np.full((rows.shape[0], rows.shape[1] - 1), -float(step + 1), np.float32)
        return await self.store.publish(
            step=step,
            num_tensors=3,
            dtype="float32",
            canary_logprobs=values,
            perturbed_logprobs=values * 2 if proof else None,
        )

    def watch(self, generator: str = "generator-0") -> Any:
        return self.stub.WatchPolicy(wire.WatchPolicyRequest(generator=generator), timeout=60)

    async def report(self, version: int, generator: str = "generator-0") -> None:
        request = wire.ReportServingRequest(generator=generator, version=version)
        await self.stub.ReportServing(request, timeout=60)

    async def find_source(self, sha256: str, generator: str = "generator-0") -> None:
        request = wire.FindSourceRequest(generator=generator, sha256=sha256)
        await self.stub.FindSource(request, timeout=60)

    async def fetch(
        self, published: Published, *, offset: int = 0, length: int = 0, sha256: str = ""
    ) -> list[Any]:
        request = wire.FetchWeightsRequest(
            version=published.version,
            sha256=sha256 or published.sha256,
            offset=offset,
            length=length,
        )
        return [piece async for piece in self.stub.FetchWeights(request, timeout=60)]

    def sync_lags(self) -> int:
        found = [
            partial
            for (key, _, _), partial in self.recorder.snapshot().items()
            if key == "perf/weight_sync_lag_s"
        ]
        return sum(partial.n for partial in found if isinstance(partial, Observation))


def make_store(checkpoints: Path, *, attempt: int = 1, max_staleness: int = 2) -> PolicyStore:
    return PolicyStore(
        checkpoints=checkpoints, attempt=attempt, vocab_size=50, max_staleness=max_staleness
    )


@asynccontextmanager
async def house(tmp_path: Path, *, is_open: bool = True, **store: Any) -> AsyncIterator[House]:
    for name, data in CONFIG.items():
        (tmp_path / name).write_bytes(data)
    recorder = Recorder(
        run="r", producer="t", service="trainer", settings=RecorderSettings(), channel=None
    )
    servicer, network = PolicyServicer(recorder), Network()
    kept = make_store(tmp_path, **store)
    if is_open:
        servicer.open(kept, tmp_path)
    add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
    served = await grpc_kit.serve(
        network, Lifecycle("trainer"), [(add, servicer, "headrace.v1.PolicyService")]
    )
    channel = grpc_kit.channel(f"127.0.0.1:{served.port}", network)
    try:
        yield House(kept, servicer, recorder, policy_pb2_grpc.PolicyServiceStub(channel))
    finally:
        await channel.close(None)
        await served.stop(0)
        kept.close()


async def test_a_watcher_gets_the_current_version_at_once_and_then_each_new_one(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as here:
        first = await here.publish(b"one", proof=True)
        watch = here.watch()
        answer = await watch.read()
        version = answer.version
        assert (version.version, version.attempt, version.step) == (1, 1, 0)
        assert (version.size_bytes, version.num_tensors, version.dtype) == (3, 3, "float32")
        # Of the digests of the file's chunks, here one.
        digest = hashlib.sha256(hashlib.sha256(b"one").digest()).hexdigest()
        assert version.sha256 == digest == first.sha256
        assert answer.max_staleness == 2
        rows = np.frombuffer(version.canary.token_ids, "<u4").reshape(-1, version.canary.row_tokens)
        assert (rows == here.store.canary_rows).all()
        assert set(np.frombuffer(version.canary.logprobs, "<f4")) == {-1.0}
        assert set(np.frombuffer(version.canary.perturbed_logprobs, "<f4")) == {-2.0}
        for number in (2, 3):
            await here.publish(b"more", step=number)
            answer = await watch.read()
            assert (answer.version.version, answer.version.step) == (number, number)
            assert answer.version.canary.perturbed_logprobs == b""


async def test_a_watcher_from_before_the_first_version_waits_for_it(tmp_path: Path) -> None:
    async with house(tmp_path, is_open=False) as here:
        watch = here.watch()
        here.servicer.open(here.store, tmp_path)
        await until(lambda: here.servicer.serving)
        await here.publish(b"one", proof=True)
        assert (await watch.read()).version.version == 1


async def test_a_slow_watcher_gets_the_newest_and_not_all(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        for number in range(5):
            await here.publish(b"x", step=number)
        watch = here.watch()
        assert (await watch.read()).version.version == 5


async def test_a_late_joiner_is_announced_the_version_again_with_its_proof(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.publish(b"one")
        watch = here.watch()
        first = (await watch.read()).version
        assert first.canary.perturbed_logprobs == b""
        assert not here.servicer.proof_wanted.is_set()
        await here.find_source(first.sha256)
        assert here.servicer.proof_wanted.is_set()
        assert here.servicer.proofs_wanted == [1]
        values = np.full((64, 15), -7.0, np.float32)
        await here.store.add_perturbed(1, values)
        again = await watch.read()
        assert again.version.version == 1
        assert again.version.canary.perturbed_logprobs == values.tobytes()
        await here.report(1)
        assert here.servicer.proofs_wanted == []
        # Who serves fetches on: that is no beginning.
        here.servicer.proof_wanted.clear()
        second = await here.publish(b"two")
        await here.find_source(second.sha256)
        assert not here.servicer.proof_wanted.is_set()


async def test_the_proof_of_a_version_that_was_overtaken_comes_to_the_one_that_fetches_it(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as here:
        one = await here.publish(b"one")
        joiner, other = here.watch("joiner"), here.watch("other")
        for watch in (joiner, other):
            assert (await watch.read()).version.version == 1
        await here.report(1, "other")
        await here.find_source(one.sha256, "joiner")
        two = await here.publish(b"two", step=1)
        for watch in (joiner, other):
            assert (await watch.read()).version.version == 2
        values = np.full((64, 15), -7.0, np.float32)
        await here.store.add_perturbed(1, values)
        again = (await joiner.read()).version
        assert (again.version, again.sha256) == (1, one.sha256)
        assert again.canary.perturbed_logprobs == values.tobytes()
        # Told once, and nobody else: next is what is published next.
        await here.publish(b"three", step=2)
        for watch in (joiner, other):
            assert (await watch.read()).version.version == 3

        # Another one that fetches it gets it as well, once it is looked after.
        late = here.watch("late")
        assert (await late.read()).version.version == 3
        await here.find_source(one.sha256, "late")
        await here.store.add_perturbed(1, values)
        assert (await late.read()).version.version == 1
        # Files that are no version's, or no longer kept, are nobody's beginning.
        await here.find_source("0" * 64, "joiner")
        assert here.servicer.proofs_wanted == [1]
        await here.publish(b"four", step=3)
        await here.find_source(two.sha256, "joiner")
        assert here.servicer.proofs_wanted == [2]


async def test_a_joiner_whose_stream_broke_still_gets_what_it_fetches(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        one = await here.publish(b"one")
        watch = here.watch()
        await watch.read()
        await here.find_source(one.sha256)
        watch.cancel()
        await until(lambda: not here.servicer.serving)
        await here.publish(b"two", step=1)
        again = here.watch()
        assert (await again.read()).version.version == 2
        await here.store.add_perturbed(1, np.zeros((64, 15), np.float32))
        assert (await again.read()).version.version == 1


async def test_a_file_stays_while_a_proof_is_made_with_it(tmp_path: Path) -> None:
    async with house(tmp_path, max_staleness=1) as here:
        one = await here.publish(b"one")
        with here.store.in_use(1) as held:
            assert held is one
            for number in range(3):
                await here.publish(b"more", step=1 + number)
            assert one.path.read_bytes() == b"one"
        await here.publish(b"last", step=9)
        assert not one.path.exists()
        with here.store.in_use(1) as held:
            assert held is None
        await here.store.add_perturbed(1, np.zeros((64, 15), np.float32))  # of no use to anybody


async def test_no_announcement_is_missed_between_two_that_come_close(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        watches = [here.watch(f"generator-{number}") for number in range(5)]
        await until(lambda: len(here.servicer.serving) == 5)
        for number in range(1, 6):
            await asyncio.gather(
                here.publish(b"x"), here.store.add_perturbed(number - 1, np.zeros(1, np.float32))
            )
        for watch in watches:
            seen = 0
            while seen < 5:
                seen = (await asyncio.wait_for(watch.read(), 60)).version.version


async def test_weights_come_in_checked_pieces_and_from_an_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", 4)
    async with house(tmp_path) as here:
        published = await here.publish(b"0123456789")
        pieces = await here.fetch(published)
        assert [(p.offset, p.data) for p in pieces] == [(0, b"0123"), (4, b"4567"), (8, b"89")]
        assert all(zlib.crc32(piece.data) == piece.crc32 for piece in pieces)
        rest = await here.fetch(published, offset=7)
        assert [(p.offset, p.data) for p in rest] == [(7, b"7"), (8, b"89")]
        assert all(zlib.crc32(piece.data) == piece.crc32 for piece in rest)
        part = await here.fetch(published, offset=3, length=3)
        assert [(p.offset, p.data) for p in part] == [(3, b"3"), (4, b"45")]
        assert await here.fetch(published, offset=10) == []


async def test_a_fetch_that_runs_when_its_version_is_deleted_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", 1 << 10)
    async with house(tmp_path, max_staleness=0) as here:
        content = bytes(range(256)) * 4 * 4096  # more than fits the buffers of a connection
        old = await here.publish(content)
        request = wire.FetchWeightsRequest(version=1, sha256=old.sha256)
        call = aiter(here.stub.FetchWeights(request, timeout=60))
        received = [(await anext(call)).data]
        for _ in range(3):
            await here.publish(b"new")
        assert not old.path.exists()
        received += [piece.data async for piece in call]
        assert b"".join(received) == content


async def refusal(work: Any) -> tuple[grpc.StatusCode, Any]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await work
    status = rpc_status.from_call(raised.value)  # type: ignore[arg-type]
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return raised.value.code(), info


async def test_versions_are_kept_as_long_as_a_generator_may_want_them(tmp_path: Path) -> None:
    async with house(tmp_path, max_staleness=2) as here:
        published = [await here.publish(f"v{number}".encode()) for number in range(1, 6)]
        assert [p.path.exists() for p in published] == [False, False, True, True, True]
        for kept in published[2:]:
            assert (await here.fetch(kept))[0].data == f"v{kept.version}".encode()
        code, info = await refusal(here.fetch(published[1]))
        assert code is grpc.StatusCode.NOT_FOUND
        assert (info.reason, info.domain) == ("VERSION_GONE", "headrace")
        assert info.metadata["version"] == "2"
        code, _ = await refusal(here.fetch(published[4], sha256="0" * 64))
        assert code is grpc.StatusCode.NOT_FOUND
    assert not published[4].path.parent.exists()


async def test_without_staleness_the_version_before_is_kept_all_the_same(tmp_path: Path) -> None:
    """The torch thread may be about to read it for a generator that has just joined."""
    async with house(tmp_path, max_staleness=0) as here:
        published = [await here.publish(b"x") for _ in range(3)]
        assert [p.path.exists() for p in published] == [False, True, True]


async def test_a_number_is_never_used_twice_over_attempts(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        assert [(await here.publish(b"x")).version for _ in range(2)] == [1, 2]
    async with house(tmp_path, attempt=2) as here:
        assert here.store.version == 0
        # What is numbered and never announced is not used again either.
        here.store._claim_number()
        published = await here.publish(b"y")
        assert (published.version, published.attempt, here.store.version) == (4, 2, 4)
        assert here.store.step_of == {4: 0}


async def test_a_trainer_that_was_replaced_publishes_nothing_more(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.publish(b"one")
        Attempts(tmp_path).begin(2)
        with pytest.raises(Fenced):
            await here.publish(b"two", step=1)
        assert here.store.version == 1
        assert int((tmp_path / "last_version").read_text()) == 1


async def test_waiting_until_all_generators_serve_a_version(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.publish(b"one")
        assert not await here.servicer.wait_served(1, timeout_s=0.01)  # nobody is there
        watches = [here.watch(name) for name in ("a", "b")]
        for watch in watches:
            await watch.read()
        waiting = asyncio.create_task(here.servicer.wait_served(1, timeout_s=60))
        await here.report(1, "a")
        assert not waiting.done()
        await here.report(1, "b")
        assert await waiting
        assert here.servicer.serving == {"a": 1, "b": 1}
        assert not await here.servicer.wait_served(2, timeout_s=0.01)


async def test_a_generator_that_goes_away_is_forgotten_and_not_waited_for(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.publish(b"one")
        staying, leaving = here.watch("a"), here.watch("b")
        for watch in (staying, leaving):
            await watch.read()
        await here.report(1, "a")
        waiting = asyncio.create_task(here.servicer.wait_served(1, timeout_s=60))
        leaving.cancel()
        assert await waiting
        assert here.servicer.serving == {"a": 1}
        await here.report(1, "b")  # a report on its way when it left
        assert here.servicer.serving == {"a": 1}


async def test_a_generator_that_came_again_outlives_its_broken_stream(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.publish(b"one")
        broken = here.watch("a")
        await broken.read()
        again = here.watch("a")
        await again.read()
        await here.report(1, "a")
        broken.cancel()
        marker = here.watch("b")  # on the same connection, so behind the cancellation
        await marker.read()
        marker.cancel()
        await until(lambda: "b" not in here.servicer.serving)
        assert here.servicer.serving == {"a": 1}
        await here.publish(b"two")
        assert (await again.read()).version.version == 2


async def test_the_lag_of_a_version_is_measured_once_by_the_slowest(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.publish(b"one")
        watches = [here.watch(name) for name in ("a", "b")]
        for watch in watches:
            await watch.read()
        await here.report(1, "a")
        assert here.sync_lags() == 0
        await here.report(1, "b")
        await here.report(1, "b")
        assert here.sync_lags() == 1
        late = here.watch("late")
        await late.read()
        await here.report(1, "late")
        assert here.sync_lags() == 1


async def test_model_files_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", 4096)
    (tmp_path / "generation_config.json").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"weights are no model file")
    async with house(tmp_path, is_open=False) as here:
        call = here.stub.FetchModelFiles(wire.FetchModelFilesRequest(), timeout=60)
        here.servicer.open(here.store, tmp_path)
        found: dict[str, bytes] = {}
        digests = set()
        async for piece in call:
            found[piece.name] = found.get(piece.name, b"") + piece.data
            digests.add(piece.set_sha256)
        assert found == {**CONFIG, "generation_config.json": b""}
        assert len(digests) == 1


async def test_model_files_that_are_missing_are_the_users_mistake(tmp_path: Path) -> None:
    async with house(tmp_path, is_open=False) as here:
        (tmp_path / "tokenizer_config.json").unlink()
        with pytest.raises(UserError, match=r"^model\.path: .* lacks"):
            here.servicer.open(here.store, tmp_path)


async def test_weights_before_the_store_is_open_are_gone(tmp_path: Path) -> None:
    async with house(tmp_path, is_open=False) as here:
        published = await here.publish(b"one")
        code, _ = await refusal(here.fetch(published))
        assert code is grpc.StatusCode.NOT_FOUND


async def test_watchers_of_a_server_that_stops_are_ended(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        watch = asyncio.create_task(_drain(here.watch()))
        await until(lambda: here.servicer.serving)
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await watch
    await cancel(watch)


async def _drain(call: Any) -> None:
    async for _ in call:
        pass
