"""Fetches over real connections, from the trainer alone: what comes, how often, what is refused."""

import asyncio
import random
import zlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.numpy import load_file

from services.common import weight_files
from services.common.lifecycle import cancel
from services.common.weight_files import Held, Pieces
from services.generator import weight_fetch, weight_links
from services.generator.weights import FetchFailed, TooOld
from tests.chaos.proxy import Proxy
from tests.conftest import free_port
from tests.services.generator.fakes import values
from tests.services.generator.fleet import Sending, Spoil, fleet, floats
from tests.services.generator.trainers import SHAPE, weights_of
from tests.waiting import until

CHUNK = 1000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, and files of many pieces."""
    monkeypatch.setattr(weight_links, "RETRY_S", (0.001, 0.01))
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", CHUNK)


def at_piece(number: int, act: Spoil) -> Spoil:
    """Do something to the piece that is sent as this one, counted from 0, and nothing else."""
    seen = -1

    def spoil(sending: Sending, piece: Any, context: Any) -> Any:
        nonlocal seen
        seen += 1
        return act(sending, piece, context) if seen == number else piece

    return spoil


async def cut(sending: Sending, piece: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")


def end(sending: Sending, piece: Any, context: Any) -> None:
    return None


def damage(sending: Sending, piece: Any, context: Any) -> Any:
    piece.data = bytes(len(piece.data))
    return piece


def forge(sending: Sending, piece: Any, context: Any) -> Any:
    """Whole in itself, and not what was announced."""
    piece.data = bytes(len(piece.data))
    piece.crc32 = zlib.crc32(piece.data)
    return piece


def shift(sending: Sending, piece: Any, context: Any) -> Any:
    piece.offset += 1
    return piece


async def test_a_version_is_fetched_whole_and_once(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        published = await here.publish({"w": weights_of(3)})
        path = await replica.fetch()
        assert path.read_bytes() == published.path.read_bytes()
        assert load_file(path)["w"].shape == SHAPE
        assert await replica.fetch() == path
        chunks = here.sending.chunks(published)
        assert len(chunks) > 3
        assert set(chunks) == {1}
        size = published.file.pieces.size_bytes
        found = values(replica.recorder)
        assert found["perf/weight_fetched_bytes/trainer"] == size
        assert found["perf/weight_fetched_bytes/generators"] == 0
        assert found["perf/weight_delta_frac"] == (0, size)


@pytest.mark.parametrize("act", [cut, end])
async def test_a_stream_that_breaks_goes_on_where_it_was_whole(tmp_path: Path, act: Spoil) -> None:
    """What had come is not sent again."""
    async with fleet(tmp_path, spoil=at_piece(30, act)) as here:
        replica = await here.join(port=0)
        published = await here.publish(floats(100 * CHUNK))
        path = await replica.fetch()
        assert path.read_bytes() == published.path.read_bytes()
        size = published.file.pieces.size_bytes
        assert values(replica.recorder)["perf/weight_fetched_bytes/trainer"] == size
        assert "policy/refused_chunks_total" not in values(replica.recorder)


@pytest.mark.parametrize("act", [damage, forge, shift])
async def test_a_chunk_that_is_not_as_announced_is_refused_and_fetched_again(
    tmp_path: Path, act: Spoil
) -> None:
    """That chunk, and no other; a checksum that was sent along counts for nothing."""
    async with fleet(tmp_path, spoil=at_piece(30, act)) as here:
        replica = await here.join(port=0)
        published = await here.publish(floats(100 * CHUNK))
        path = await replica.fetch()
        assert path.read_bytes() == published.path.read_bytes()
        assert values(replica.recorder)["policy/refused_chunks_total"] == 1
        assert sorted(here.sending.chunks(published))[-2:] == [1, 2]


async def test_a_chunk_that_is_damaged_at_the_trainer_fails_the_fetch(tmp_path: Path) -> None:
    """And what is here of the file serves the next one."""
    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        published = await here.publish(floats(20 * CHUNK))
        whole = published.path.read_bytes()
        published.path.write_bytes(whole[: 10 * CHUNK] + bytes(CHUNK) + whole[11 * CHUNK :])
        with pytest.raises(FetchFailed, match="version 1: chunk 10 is damaged at the trainer"):
            await replica.fetch()
        assert here.sending.chunks(published)[10] == weight_fetch.MAX_WHOLE
        published.path.write_bytes(whole)
        assert (await replica.fetch()).read_bytes() == whole
        sent = here.sending.chunks(published)
        assert sum(sent) <= len(sent) + weight_fetch.MAX_WHOLE + weight_links.NUM_STREAMS


async def test_a_file_that_never_has_its_digest_fails(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        published = await here.publish(floats(10 * CHUNK))
        pieces = published.file.pieces
        lying = Pieces("0" * 64, pieces.ends, pieces.crc32)
        published.file = Held(published.path, lying, whole=True)
        replica = await here.join(port=0)
        with pytest.raises(FetchFailed, match=r"version 1: digest .* was announced"):
            await replica.fetch()
        assert values(replica.recorder)["policy/refused_files_total"] == weight_fetch.MAX_WHOLE


async def test_a_fetch_that_is_cut_ten_times_ends_right_and_nothing_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connections end at ten random places, in the middle of messages too."""
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", 100_000)
    points = random.Random(9)
    async with fleet(tmp_path) as here:
        size = (await here.publish(floats(40_000_000))).file.pieces.size_bytes
        cuts = sorted(points.sample(range(size // 50, size - size // 50), 10))
        async with Proxy(free_port(), target=here.trainer.port) as proxy:
            direct, here.trainer.port = here.trainer.port, proxy.port
            replica = await here.join(port=0)
            here.trainer.port = direct
            target = await replica.client.newer_than(0)
            fetching = asyncio.create_task(replica.client.fetch(target))
            await until(lambda: replica.client.find_file(target.sha256))
            coming = replica.client.find_file(target.sha256)
            assert coming is not None
            for point in cuts:
                while size - coming.missing_bytes < point or not proxy.connections:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                assert await proxy.cut(), "in the middle of whatever is under way"
            path = await fetching
        published = here.trainer.store.current
        assert published is not None
        assert path.read_bytes() == published.path.read_bytes()
        found = values(replica.recorder)
        assert found["perf/weight_fetched_bytes/trainer"] == size
        assert "policy/refused_chunks_total" not in found


async def test_a_trainer_that_is_away_for_long_is_waited_for(tmp_path: Path) -> None:
    """However often the fetch is tried meanwhile: only its version's age ends it."""
    async with fleet(tmp_path) as here:
        await here.publish(floats(50 * CHUNK))
        async with Proxy(free_port(), target=here.trainer.port) as proxy:
            direct, here.trainer.port = here.trainer.port, proxy.port
            replica = await here.join(port=0)
            here.trainer.port = direct
            target = await replica.client.newer_than(0)
            await proxy.refuse()
            fetching = asyncio.create_task(replica.client.fetch(target))
            await asyncio.sleep(1.0)
            assert not fetching.done()
            await proxy.accept()
            assert (await fetching).exists()


async def test_a_version_that_is_gone_is_too_old(tmp_path: Path) -> None:
    """Kept are the current version and two before it."""
    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        await here.publish(floats(10 * CHUNK, 1))
        first = await replica.client.newer_than(0)
        for seed in (2, 3):
            await here.publish(floats(10 * CHUNK, seed))
        assert (await replica.client.fetch(first)).exists()
        await here.publish(floats(10 * CHUNK, 4))
        await replica.client.newer_than(3)
        replica.client.keep_only()
        replica.client.latest = first  # as if the announcements had not come
        with pytest.raises(TooOld, match="version 1 is no longer kept"):
            await replica.client.fetch(first)


async def test_a_fetch_is_abandoned_only_when_its_version_is_too_old(tmp_path: Path) -> None:
    """At most two behind may serve: a newer version alone does not end a fetch."""
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(sending: Sending, piece: Any, context: Any) -> Any:
        begun.set()
        await goes_on.wait()
        return piece

    async with fleet(tmp_path, spoil=slow) as here:
        replica = await here.join(port=0)
        for seed in (1, 2, 3):
            await here.publish(floats(10 * CHUNK, seed))
        target = await replica.client.newer_than(2)
        fetch = asyncio.create_task(replica.client.fetch(target))
        await begun.wait()
        for seed in (4, 5):
            await here.publish(floats(10 * CHUNK, seed))
        await replica.client.newer_than(4)
        goes_on.set()
        assert (await fetch).name.startswith("3-")

        begun.clear()
        goes_on.clear()
        fetch = asyncio.create_task(replica.client.fetch(await replica.client.newer_than(4)))
        await begun.wait()
        for seed in (6, 7, 8):
            await here.publish(floats(10 * CHUNK, seed))
        await replica.client.newer_than(7)
        goes_on.set()
        with pytest.raises(TooOld, match="version 5 is 3 behind"):
            await fetch
        left = {path.name[:1] for path in replica.client._folder.iterdir()}
        assert left == {".", "3"}, "what there was of version 5 is deleted"


async def test_a_full_disk_fails_the_fetch_and_not_the_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes, offset: int) -> None:
        raise OSError(28, "No space left on device")

    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        await here.publish(floats(10 * CHUNK))
        with monkeypatch.context() as patched:
            patched.setattr(weight_fetch, "_write_all", full)
            with pytest.raises(FetchFailed, match=r"version 1: .*No space left"):
                await replica.fetch()
        assert (await replica.fetch()).exists()


async def test_files_are_kept_until_told_and_gone_with_the_client(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        paths = []
        for seed in (1, 2):
            await here.publish(floats(10 * CHUNK, seed))
            paths.append(await replica.fetch(seed))
        assert all(path.exists() for path in paths)
        replica.client.keep_only(paths[1])
        assert [path.exists() for path in paths] == [False, True]
    assert not paths[1].parent.exists()


async def test_streams_of_a_trainer_are_bounded_and_the_others_wait(tmp_path: Path) -> None:
    """Five replicas that cannot have it from each other: twenty streams want what eight may."""
    held, goes_on = 0, asyncio.Event()

    async def count(sending: Sending, piece: Any, context: Any) -> Any:
        nonlocal held
        held += 1
        await goes_on.wait()
        return piece

    async with fleet(tmp_path, spoil=count) as here:
        await here.publish(floats(100 * CHUNK))
        replicas = [await here.join(port=0) for _ in range(5)]
        fetches = [asyncio.create_task(replica.fetch()) for replica in replicas]
        try:
            await until(lambda: held == 8)
            await asyncio.sleep(0.3)
            assert held == 8
            goes_on.set()
            for path in await asyncio.gather(*fetches):
                assert path.exists()
        finally:
            await cancel(*fetches)
