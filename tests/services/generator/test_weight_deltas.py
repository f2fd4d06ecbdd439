"""Differences on their way: chosen, applied, refused, and had from other replicas."""

import asyncio
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.common import weight_delta, weight_files
from services.generator import weight_fetch, weight_links
from services.trainer import delta_maker
from services.trainer.delta_maker import DeltaMaker
from services.trainer.published import Published
from tests.services.generator.fakes import recorder, values
from tests.services.generator.fleet import Fleet, Replica, fleet, floats, stepped, words

CHUNK = 4_000
NUM = 200_000
"""Weights: 100 chunks."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, and files of many pieces."""
    monkeypatch.setattr(weight_links, "RETRY_S", (0.001, 0.01))
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", CHUNK)


async def two_versions(here: Fleet, *replicas: Replica, share: float = 0.04) -> Published:
    """The first, which the replicas serve, and the second with its difference, announced to all."""
    before = words(NUM)
    await here.publish_words(before, step=1)
    for replica in replicas:
        await replica.fetch()
        await replica.serve(1)
    published = await here.publish_words(stepped(before, share=share, seed=1), step=2)
    await here.make_delta(published)
    for replica in replicas:
        await replica.announced(lambda seen: seen.version == 2 and seen.delta is not None)
    return published


def fetched(replica: Replica) -> dict[str, float]:
    """Bytes that the last fetches brought, by source, and those of differences."""
    found: dict[str, Any] = values(replica.recorder)
    return {
        "trainer": found["perf/weight_fetched_bytes/trainer"],
        "generators": found["perf/weight_fetched_bytes/generators"],
        "delta": found["perf/weight_delta_frac"][0],
    }


async def test_what_a_difference_makes_is_the_whole_file(tmp_path: Path) -> None:
    """Of it and of the base; and much less is sent."""
    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        published = await two_versions(here, replica)
        before = fetched(replica)
        path = await replica.fetch(2)
        assert path.read_bytes() == published.path.read_bytes()
        assert set(here.sending.chunks(published)) == {0}
        assert published.delta is not None
        size = published.delta.pieces.size_bytes
        assert size < published.file.pieces.size_bytes / 8
        after = fetched(replica)
        assert after["trainer"] - before["trainer"] == after["delta"] == size
        made = values(here.sending._recorder)
        assert made["perf/weight_delta_size_frac"] == (size, published.file.pieces.size_bytes)
        assert made["perf/weight_delta_s"][0] == 1  # type: ignore[index]


async def test_a_newcomer_gets_whole_tensors(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        published = await two_versions(here)
        replica = await here.join(port=0)
        path = await replica.fetch(2)
        assert path.read_bytes() == published.path.read_bytes()
        assert fetched(replica)["delta"] == 0
        assert set(here.sending.chunks(published)) == {1}


async def test_float32_has_none(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        for seed in (1, 1):
            published = await here.publish(floats(10 * CHUNK, seed), step=seed)
        await here.make_delta(published)
        assert published.delta is None
        assert not list(published.path.parent.glob("*.delta"))


async def test_a_difference_that_comes_in_the_middle_of_a_fetch_makes_the_rest(
    tmp_path: Path,
) -> None:
    """Some chunks are here when it is announced: they stay."""
    goes_on, some = asyncio.Event(), asyncio.Event()
    num = 0

    async def held(sending: Any, piece: Any, context: Any) -> Any:
        nonlocal num
        num += 1
        if num > 120:  # the first version's 101, and some of the second's
            some.set()
            await goes_on.wait()
        return piece

    async with fleet(tmp_path, spoil=held) as here:
        replica = await here.join(port=0)
        before = words(NUM)
        await here.publish_words(before, step=1)
        await replica.fetch()
        await replica.serve(1)
        published = await here.publish_words(stepped(before, share=0.04, seed=1), step=2)
        fetching = asyncio.create_task(replica.fetch(2))
        await some.wait()
        await here.make_delta(published)
        await replica.announced(lambda seen: seen.delta is not None)
        goes_on.set()
        path = await fetching
        assert path.read_bytes() == published.path.read_bytes()
        chunks = here.sending.chunks(published)
        assert 19 <= sum(chunks) < len(chunks)
        assert max(chunks) == 1
        assert fetched(replica)["delta"] > 0


async def damaged(published: Published, *frames: int) -> None:
    """Some frames of a difference, on the trainer's side."""
    assert published.delta_file is not None
    content = bytearray(published.delta_file.path.read_bytes())
    for frame in frames:
        begin, end = published.delta_file.pieces.bounds(frame)
        content[begin + 12 : end] = bytes(end - begin - 12)
    published.delta_file.path.write_bytes(content)


async def test_a_damaged_frame_is_refused_and_its_chunk_fetched_whole(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        published = await two_versions(here, replica)
        await damaged(published, 40)
        path = await replica.fetch(2)
        assert path.read_bytes() == published.path.read_bytes()
        chunks = here.sending.chunks(published)
        assert [piece for piece, num in enumerate(chunks) if num] == [40]
        assert values(replica.recorder)["policy/refused_chunks_total"] == 1


async def test_a_difference_that_is_damaged_is_left_alone(tmp_path: Path) -> None:
    """After a few frames: what they would have made comes whole."""
    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        published = await two_versions(here, replica)
        await damaged(published, *range(published.file.pieces.num))
        path = await replica.fetch(2)
        assert path.read_bytes() == published.path.read_bytes()
        assert set(here.sending.chunks(published)) == {1}
        refused = values(replica.recorder)["policy/refused_chunks_total"]
        assert isinstance(refused, float)
        # What each stream had asked for when it was left alone is refused as well.
        assert weight_fetch.MAX_BAD_FRAMES <= refused < published.file.pieces.num


async def test_a_base_that_is_not_what_it_was_makes_nothing(tmp_path: Path) -> None:
    """Each chunk of it is another one than was announced, so the file comes whole."""
    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        published = await two_versions(here, replica)
        assert replica.path is not None
        replica.path.write_bytes(bytes(replica.path.stat().st_size))
        path = await replica.fetch(2)
        assert path.read_bytes() == published.path.read_bytes()
        assert set(here.sending.chunks(published)) == {1}


async def test_a_difference_to_a_version_that_is_not_here_is_of_no_use(tmp_path: Path) -> None:
    """A replica that has slept through a version gets the next one whole."""
    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        before = words(NUM)
        await here.publish_words(before, step=1)
        await replica.fetch()
        await replica.serve(1)
        for step in (2, 3):
            before = stepped(before, share=0.04, seed=step)
            published = await here.publish_words(before, step=step)
        await here.make_delta(published)
        await replica.announced(lambda seen: seen.version == 3 and seen.delta is not None)
        path = await replica.fetch(3)
        assert path.read_bytes() == published.path.read_bytes()
        assert fetched(replica)["delta"] == 0


async def test_a_difference_that_is_gone_from_the_trainer_is_done_without(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        published = await two_versions(here, replica)
        published.delta_file = None
        path = await replica.fetch(2)
        assert path.read_bytes() == published.path.read_bytes()


async def test_a_wrong_digest_of_what_differences_made_takes_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums of chunks may be right by chance: the digest decides, and it is counted."""
    async with fleet(tmp_path) as here:
        replica = await here.join(port=0)
        published = await two_versions(here, replica)
        decode = weight_delta.decode
        right = zlib.crc32

        def other(frame: bytes, base: bytes) -> bytes:
            return bytes(len(decode(frame, base)))

        monkeypatch.setattr(weight_delta, "decode", other)

        def forged(chunk: bytes) -> int:
            return right(chunk) if any(chunk) else Anything()

        monkeypatch.setattr(weight_fetch, "zlib", type("", (), {"crc32": staticmethod(forged)}))
        path = await replica.fetch(2)
        assert path.read_bytes() == published.path.read_bytes()
        assert set(here.sending.chunks(published)) == {1}
        assert values(replica.recorder)["policy/refused_files_total"] == 1


class Anything(int):
    """A checksum that happens to be right."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


async def test_differences_travel_from_replica_to_replica_too(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        replicas = [await here.join() for _ in range(4)]
        published = await two_versions(here, *replicas)
        paths = await asyncio.gather(*(replica.fetch(2) for replica in replicas))
        assert {path.read_bytes() for path in paths} == {published.path.read_bytes()}
        assert published.delta is not None
        size = published.delta.pieces.size_bytes
        sent = sum(num for (sha, _), num in here.sending.sent.items() if sha == published.sha256)
        assert sent == 0
        assert [fetched(replica)["delta"] for replica in replicas] == [size] * 4
        first = published.file.pieces.size_bytes
        from_others = [fetched(replica)["generators"] % first for replica in replicas]
        assert sorted(from_others) == [0, 0, size, size]


async def test_who_has_only_a_part_of_a_difference_does_not_send_it(tmp_path: Path) -> None:
    """A damaged frame does not come: who waits for it has it from somebody else."""
    async with fleet(tmp_path) as here:
        replicas = [await here.join() for _ in range(3)]
        published = await two_versions(here, *replicas)
        await damaged(published, 40)
        paths = await asyncio.gather(*(replica.fetch(2) for replica in replicas))
        assert {path.read_bytes() for path in paths} == {published.path.read_bytes()}


# -- making them


async def test_one_that_is_overtaken_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[int] = []

    async def announce(version: int, delta: Any, path: Path) -> bool:
        announced.append(version)
        return True

    async with fleet(tmp_path) as here:
        before = words(NUM)
        versions = []
        for step in (1, 2, 3):
            versions.append(await here.publish_words(before, step=step))
            before = stepped(before, share=0.04, seed=step)
        maker = DeltaMaker(recorder(), announce=announce)
        for base, published in pairwise(versions):
            maker.make(wanted(base, published))
        await asyncio.gather(*maker._tasks)
        assert announced == [3]
        names = {path.name for path in versions[-1].path.parent.glob("*.delta")}
        assert names == {"3.delta"}


async def test_no_room_for_one_is_no_failure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said and counted; any other failure is the run's, at the next version."""
    failures: list[Exception] = [OSError(28, "No space left on device"), ValueError("a mistake")]

    def fail(*_: Any) -> None:
        raise failures.pop(0)

    monkeypatch.setattr(delta_maker, "_write", fail)
    async with fleet(tmp_path) as here:
        before = words(NUM)
        versions = [await here.publish_words(before, step=step) for step in (1, 2)]
        measured = recorder()

        async def announce(*_: Any) -> bool:
            raise AssertionError("nothing was made")

        maker = DeltaMaker(measured, announce=announce)
        maker.make(wanted(*versions))
        await asyncio.gather(*maker._tasks)
        assert values(measured)["policy/delta_failed_total"] == 1
        maker.make(wanted(*versions))
        await asyncio.gather(*maker._tasks, return_exceptions=True)
        with pytest.raises(ValueError, match="a mistake"):
            maker.make(wanted(*versions))


def wanted(base: Published, published: Published) -> delta_maker.Wanted:
    return delta_maker.Wanted(
        published.version,
        published.path,
        published.file.pieces,
        base.version,
        base.sha256,
        base.path,
    )


async def test_one_that_comes_too_late_is_not_announced_and_not_kept(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        before = words(NUM)
        one, two = [await here.publish_words(before, step=step) for step in (1, 2)]
        maker = DeltaMaker(recorder(), announce=here.trainer.store.add_delta)
        maker.make(wanted(one, two))
        await here.publish_words(before, step=3)
        await asyncio.gather(*maker._tasks)
        if two.delta is None:  # else it was faster than the version
            assert not list(two.path.parent.glob("2.delta"))
        assert here.trainer.store.current is not None
        assert here.trainer.store.current.delta is None
