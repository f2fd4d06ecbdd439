"""The way of a version over a real connection, and what goes wrong on it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.common import grpc_kit, weight_files
from services.common.config import Network
from services.common.errors import UserError
from services.common.lifecycle import Lifecycle, cancel
from services.generator import weight_links, weights
from services.generator.weights import Announcement, PolicyClient
from services.trainer import policy
from services.trainer.policy import PolicyServicer
from tests.conftest import free_port
from tests.services.generator.fakes import recorder
from tests.services.generator.trainers import (
    client_of,
    perturbed,
    trainer,
    weights_of,
)
from tests.waiting import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, and files of several pieces."""
    monkeypatch.setattr(weight_links, "RETRY_S", (0.001, 0.01))
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", 500)


@asynccontextmanager
async def watching(client: PolicyClient) -> AsyncIterator[None]:
    task = asyncio.create_task(client.watch())
    try:
        yield
    finally:
        await cancel(task)


async def announced(client: PolicyClient, version: int = 1) -> Announcement:
    async with watching(client):
        return await client.newer_than(version - 1)


# -- model files


async def test_model_files_are_fetched_once(tmp_path: Path) -> None:
    class Counting(PolicyServicer):
        pieces = 0

        async def FetchModelFiles(self, request: Any, context: Any) -> AsyncIterator[Any]:
            async for piece in super().FetchModelFiles(request, context):
                self.pieces += 1
                yield piece

    counting = Counting(recorder())
    async with (
        trainer(tmp_path, servicer=lambda: counting) as made,
        client_of(made.port) as client,
    ):
        folder = await client.model_files(tmp_path / "cache")
        for name in policy.MODEL_FILES:
            original = tmp_path / "model" / name
            assert (folder / name).exists() == original.exists()
            if original.exists():
                assert (folder / name).read_bytes() == original.read_bytes()
        whole = counting.pieces
        (folder / "config.json").write_text("mine")
        assert await client.model_files(tmp_path / "cache") == folder
        assert (folder / "config.json").read_text() == "mine"
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]
        assert whole > 4


async def test_model_files_of_another_model_are_another_folder(tmp_path: Path) -> None:
    async with trainer(tmp_path) as made, client_of(made.port) as client:
        first = await client.model_files(tmp_path / "cache")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}\n')
    async with trainer(tmp_path) as made, client_of(made.port) as client:
        assert await client.model_files(tmp_path / "cache") != first


async def test_the_trainer_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    async with client_of(port) as client:
        waiting = asyncio.create_task(client.model_files(tmp_path / "cache"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        async with trainer(tmp_path, network=Network(grpc_port=port)):
            assert ((await waiting) / "tokenizer.json").exists()


# -- announcements


async def test_an_announcement_has_all_that_a_load_needs(tmp_path: Path) -> None:
    async with trainer(tmp_path) as made, client_of(made.port) as client:
        published = await made.publish(7)
        seen = await announced(client)
        assert (seen.version, seen.attempt, seen.step) == (1, 1, 7)
        assert (seen.sha256, seen.dtype, seen.max_staleness) == (published.sha256, "float32", 2)
        assert seen.size_bytes == published.path.stat().st_size
        assert np.array_equal(seen.canary_rows, made.store.canary_rows)
        assert np.array_equal(seen.canary_logprobs, weights_of(7))
        assert np.array_equal(seen.perturbed_logprobs, perturbed(weights_of(7)))


async def test_the_watch_finds_a_trainer_that_was_restarted(tmp_path: Path) -> None:
    """And says again what this replica serves: the new trainer knows nothing of it."""
    network = Network(grpc_port=free_port())
    async with client_of(network.grpc_port) as client, watching(client):
        async with trainer(tmp_path, network=network) as first:
            await first.publish(1)
            await client.newer_than(0)
            await client.report(version=1, pause_s=0.1, canary_gap=0.0)
            assert first.servicer.serving == {"generator-0": 1}
        async with trainer(tmp_path, attempt=2, network=network) as second:
            await second.publish(1)  # the same weights, under the next number
            seen = await client.newer_than(1)
            assert (seen.version, seen.attempt) == (2, 2)
            await until(lambda: second.servicer.serving == {"generator-0": 1})


async def test_a_replica_that_joins_late_waits_for_the_values_of_its_proof(tmp_path: Path) -> None:
    """The current version was announced without them, since nobody was new then."""
    async with trainer(tmp_path) as made, client_of(made.port) as client, watching(client):
        await made.publish(1, provable=False)
        target = await client.newer_than(0)
        assert target.perturbed_logprobs.size == 0
        await client.fetch(target)
        assert made.servicer.proof_wanted.is_set()
        waiting = asyncio.create_task(client.provable(target))
        # What comes of newer versions is no answer: their values are of other weights.
        await made.publish(2)
        await client.newer_than(1)
        assert not waiting.done()
        await made.store.add_perturbed(1, perturbed(weights_of(1)))
        seen = await waiting
        assert seen is not None
        assert seen.version == 1
        assert np.array_equal(seen.perturbed_logprobs, perturbed(weights_of(1)))
        assert client.latest is not None
        assert client.latest.version == 2


async def test_values_that_came_while_their_version_was_current_are_kept(tmp_path: Path) -> None:
    async with trainer(tmp_path) as made, client_of(made.port) as client, watching(client):
        await made.publish(1, provable=False)
        target = await client.newer_than(0)
        await made.store.add_perturbed(1, perturbed(weights_of(1)))
        await until(lambda: client.latest is not target)
        await made.publish(2, provable=False)
        await client.newer_than(1)
        seen = await client.provable(target)
        assert seen is not None
        assert (seen.version, seen.perturbed_logprobs.size > 0) == (1, True)


async def test_a_version_that_is_too_old_is_not_waited_for(tmp_path: Path) -> None:
    """Two may be overtaken by 3 and 4 with a staleness of 2; when 5 comes it cannot be served."""
    async with trainer(tmp_path) as made, client_of(made.port) as client, watching(client):
        for version in (1, 2):
            await made.publish(version, provable=False)
        target = await client.newer_than(1)
        waiting = asyncio.create_task(client.provable(target))
        for version in (3, 4):
            await made.publish(version, provable=False)
        await client.newer_than(3)
        assert not waiting.done()
        await made.publish(5, provable=False)
        assert await waiting is None


async def test_a_version_of_a_replaced_attempt_is_not_waited_for(tmp_path: Path) -> None:
    async with trainer(tmp_path) as made, client_of(made.port) as client, watching(client):
        await made.publish(1, provable=False)
        target = await client.newer_than(0)
        waiting = asyncio.create_task(client.provable(target))
        made.store._attempt = 2
        await made.publish(2, provable=False)
        assert await waiting is None


async def test_announcements_of_a_lower_attempt_are_ignored(tmp_path: Path) -> None:
    """A trainer that was replaced and does not know it goes on announcing."""

    class Contested(PolicyServicer):
        async def WatchPolicy(self, request: Any, context: Any) -> AsyncIterator[Any]:
            async for answer in super().WatchPolicy(request, context):
                mine = answer.version
                mine.attempt, mine.version, perturbed_bytes = 5, 10, mine.canary.perturbed_logprobs
                mine.canary.perturbed_logprobs = b""
                yield answer
                mine.attempt, mine.version = 4, 11
                yield answer
                mine.attempt, mine.version = 5, 10
                mine.canary.perturbed_logprobs = perturbed_bytes
                yield answer

    async with (
        trainer(tmp_path, servicer=lambda: Contested(recorder())) as made,
        client_of(made.port) as client,
        watching(client),
    ):
        await made.publish(1)
        assert (await client.newer_than(9)).version == 10
        # All three have arrived when the last has: the one between left no trace.
        await until(lambda: client.latest is not None and client.latest.perturbed_logprobs.size)
        assert client.latest is not None
        assert client.latest.version == 10


# -- what no retry mends


async def test_a_refused_token_is_the_users_mistake(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("river")
    wrong.write_text("stream")
    network = Network(token_file=str(right))
    async with trainer(tmp_path, network=network) as made:
        await made.publish(1)
        async with client_of(made.port, token_file=right) as client:
            target = await announced(client)
            assert (await client.fetch(target)).exists()
        for token_file in (wrong, None):
            async with client_of(made.port, token_file=token_file) as client:
                for call in (
                    client.model_files(tmp_path / "cache"),
                    client.watch(),
                    client.fetch(target),
                ):
                    with pytest.raises(UserError, match=r"network\.token_file: .*refuses") as error:
                        await call
                    assert "stream" not in str(error.value)


async def test_a_service_that_is_no_trainer_is_the_users_mistake(tmp_path: Path) -> None:
    served = await grpc_kit.serve(Network(), Lifecycle("scorer"))
    try:
        async with client_of(served.port) as client:
            with pytest.raises(UserError, match="no trainer"):
                await client.model_files(tmp_path / "cache")
    finally:
        await served.stop(0)


async def test_a_report_to_an_absent_trainer_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "UNARY_DEADLINE_S", 0.05)
    async with client_of(free_port()) as client:
        await client.report(version=1, pause_s=0.1, canary_gap=0.0)


async def test_a_version_on_its_way_is_expected_for_half_of_the_time_between_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are announced at 100, 110 and 200 s: the second is expected until 115 s, and the
    third no longer than 30 s. The same one again, with the values of the proof, changes nothing."""
    now_s = [0.0]
    monkeypatch.setattr(weights, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    async with trainer(tmp_path) as made, client_of(made.port) as client, watching(client):

        async def announced_at(moment_s: float, seed: int) -> None:
            now_s[0] = moment_s
            await made.publish(seed, provable=False)
            await client.newer_than(seed - 1)

        def expected(moment_s: float, *, served: int) -> bool:
            now_s[0] = moment_s
            return client.expects_newer_than(served)

        assert not expected(0, served=0), "nothing has been announced"
        await announced_at(100, 1)
        assert not expected(100, served=1)
        await announced_at(110, 2)
        now_s[0] = 114
        await made.store.add_perturbed(2, perturbed(weights_of(2)))
        await until(lambda: client.latest is not None and client.latest.perturbed_logprobs.size)
        assert expected(114.9, served=1)
        assert not expected(114.9, served=2)
        assert not expected(115, served=1)
        await announced_at(200, 3)
        assert expected(229.9, served=2)
        assert not expected(230, served=2)
