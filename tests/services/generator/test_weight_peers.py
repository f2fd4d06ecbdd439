"""Replicas that fetch from each other: who sends what, and what happens when one fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import policy_pb2 as wire
from headrace.v1 import policy_pb2_grpc

from services.common import grpc_kit, weight_files
from services.common.config import Network
from services.generator import weight_fetch, weight_links
from tests.certificates import Authority, network_of
from tests.conftest import free_port
from tests.services.generator.fakes import values
from tests.services.generator.fleet import Fleet, Replica, fleet, floats
from tests.waiting import until

CHUNK = 1000
SIZE = 200 * CHUNK


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, and files of many pieces."""
    monkeypatch.setattr(weight_links, "RETRY_S", (0.001, 0.01))
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", CHUNK)


def from_generators(replica: Replica) -> float:
    found = values(replica.recorder)["perf/weight_fetched_bytes/generators"]
    assert isinstance(found, float)
    return found


async def all_know_version(here: Fleet, version: int = 1) -> None:
    for replica in here.replicas:
        await replica.client.newer_than(version - 1)


async def test_six_replicas_at_once_take_two_files_from_the_trainer(tmp_path: Path) -> None:
    """trainer -> a, b; a -> c, d; b -> e, f. Those below are sent what those above have by then."""
    async with fleet(tmp_path) as here:
        for _ in range(6):
            await here.join()
        published = await here.publish(floats(SIZE))
        await all_know_version(here)
        paths = await asyncio.gather(*(replica.fetch() for replica in here.replicas))
        assert {path.read_bytes() for path in paths} == {published.path.read_bytes()}
        assert here.sending.chunks(published) == [2] * published.file.pieces.num
        size = published.file.pieces.size_bytes
        assert sorted(map(from_generators, here.replicas)) == [0, 0, size, size, size, size]


async def test_a_fourth_replica_fetches_from_others_while_the_trainer_is_busy(
    tmp_path: Path,
) -> None:
    """Three serve the version; two late ones occupy the trainer, whose streams stand still."""
    goes_on = asyncio.Event()
    goes_on.set()

    async def held(sending: Any, piece: Any, context: Any) -> Any:
        await goes_on.wait()
        return piece

    async with fleet(tmp_path, spoil=held) as here:
        three = [await here.join() for _ in range(3)]
        published = await here.publish(floats(SIZE))
        for replica in three:
            await replica.fetch()
            await replica.serve(1)
        goes_on.clear()
        stuck = [await here.join(port=0) for _ in range(2)]
        fetching = [asyncio.create_task(replica.fetch()) for replica in stuck]
        tree = here.sending._sources._trees
        await until(lambda: tree[published.sha256]._num_children("") == 2)
        fourth = await here.join()
        path = await fourth.fetch()
        assert path.read_bytes() == published.path.read_bytes()
        assert from_generators(fourth) == published.file.pieces.size_bytes
        goes_on.set()
        await asyncio.gather(*fetching)


async def test_a_version_is_had_from_who_serves_it_and_not_from_who_has_deleted_it(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as here:
        first = await here.join()
        one = await here.publish(floats(SIZE, 1))
        await first.fetch()
        await first.serve(1)
        sources = here.sending._sources
        two = await here.publish(floats(SIZE, 2))
        # Whoever is not done with version 1 may still have it from the first.
        full = [sources.find(f"x{n}", sha256=one.sha256, failed=()) for n in range(3)]
        assert full == ["", "", f"127.0.0.1:{first.port}"]
        await first.fetch(2)
        await first.serve(2)
        found = [sources.find(f"y{n}", sha256=one.sha256, failed=()) for n in range(3)]
        assert f"127.0.0.1:{first.port}" not in found
        found = [sources.find(f"z{n}", sha256=two.sha256, failed=()) for n in range(3)]
        assert found == ["", "", f"127.0.0.1:{first.port}"]


def occupy(here: Fleet, sha256: str) -> None:
    """The trainer has as many children as it takes: who asks next is sent to others."""
    for number in range(2):
        here.sending._sources.find(f"child-{number}", sha256=sha256, failed=())


@asynccontextmanager
async def silent_server() -> AsyncIterator[int]:
    """Takes connections and says nothing; its port."""
    writers: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:  # else gRPC waits for their handshakes
            writer.close()


@pytest.mark.parametrize("kind", ["dead", "silent"])
async def test_a_peer_that_does_not_answer_is_left_and_the_trainer_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(weight_fetch, "PEER_STALL_S", 0.3)
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(fleet(tmp_path))
        silent = await stack.enter_async_context(silent_server())
        gone = await here.join(port=silent if kind == "silent" else free_port())
        published = await here.publish(floats(SIZE))
        await gone.fetch()
        await gone.serve(1)
        occupy(here, published.sha256)
        replica = await here.join()
        path = await replica.fetch()
        assert path.read_bytes() == published.path.read_bytes()
        found = values(replica.recorder)
        assert found["policy/sources_left_total"] == 1
        assert found["perf/weight_fetched_bytes/trainer"] == published.file.pieces.size_bytes


async def test_a_peer_that_dies_in_the_middle_is_left_and_what_came_is_kept(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as here:
        first = await here.join()
        published = await here.publish(floats(SIZE))
        await first.fetch()
        await first.serve(1)
        held = first.client.find_file(published.sha256)
        assert held is not None
        # From here on the first does as if these had not come yet; then it dies.
        held._here[100:] = bytes(len(held._here) - 100)
        held._missing = len(held._here) - 100
        occupy(here, published.sha256)
        replica = await here.join()
        fetching = asyncio.create_task(replica.fetch())
        await until(
            lambda: (
                (coming := replica.client.find_file(published.sha256)) is not None
                and coming.missing_bytes <= published.file.pieces.size_bytes - 50 * CHUNK
            )
        )
        await first.served.stop(0)
        path = await fetching
        assert path.read_bytes() == published.path.read_bytes()
        assert from_generators(replica) >= 50 * CHUNK
        found = values(replica.recorder)
        assert found["policy/sources_left_total"] == 1
        trainer, peers = (
            found[f"perf/weight_fetched_bytes/{source}"] for source in ("trainer", "generators")
        )
        assert isinstance(trainer, float)
        assert isinstance(peers, float)
        assert trainer + peers == published.file.pieces.size_bytes


async def test_a_peer_that_sends_something_else_is_left(tmp_path: Path) -> None:
    """Nothing of it gets in: each chunk is checked against what the trainer has announced."""
    async with fleet(tmp_path) as here:
        liar = await here.join()
        published = await here.publish(floats(SIZE))
        path = await liar.fetch()
        await liar.serve(1)
        path.write_bytes(bytes(published.file.pieces.size_bytes))
        occupy(here, published.sha256)
        replica = await here.join()
        path = await replica.fetch()
        assert path.read_bytes() == published.path.read_bytes()
        found = values(replica.recorder)
        assert found["policy/sources_left_total"] == 1
        refused = found["policy/refused_chunks_total"]
        assert isinstance(refused, float)
        assert refused >= weight_fetch.MAX_REFUSED


async def test_a_peer_that_trickles_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never silent for long, and far below what a link carries."""
    monkeypatch.setattr(weight_fetch, "PEER_STALL_S", 0.5)
    async with fleet(tmp_path) as here:
        first = await here.join()
        published = await here.publish(floats(SIZE))
        await first.fetch()
        await first.serve(1)
        held = first.client.find_file(published.sha256)
        assert held is not None
        wait = held.wait

        async def trickle(piece: int) -> None:
            await asyncio.sleep(0.1)
            await wait(piece)

        monkeypatch.setattr(held, "wait", trickle)
        occupy(here, published.sha256)
        replica = await here.join()
        path = await replica.fetch()
        assert path.read_bytes() == published.path.read_bytes()
        found = values(replica.recorder)
        assert found["policy/sources_left_total"] == 1
        assert 0 < from_generators(replica) < published.file.pieces.size_bytes


async def test_what_a_replica_is_still_fetching_and_gives_up_is_gone_for_others(
    tmp_path: Path,
) -> None:
    goes_on = asyncio.Event()

    async def held(sending: Any, piece: Any, context: Any) -> Any:
        await goes_on.wait()
        return piece

    async with fleet(tmp_path, spoil=held) as here:
        first = await here.join()
        published = await here.publish(floats(SIZE))
        fetching = asyncio.create_task(first.fetch())
        await until(lambda: first.client.find_file(published.sha256))
        channel = grpc_kit.channel(f"127.0.0.1:{first.port}", Network())
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        request = wire.FetchWeightsRequest(version=1, sha256=published.sha256)
        reading = asyncio.ensure_future(stub.FetchWeights(request, timeout=60).read())
        await asyncio.sleep(0.1)
        assert not reading.done()
        first.client.keep_only()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await reading
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        await channel.close(None)
        fetching.cancel()
        goes_on.set()


async def test_peers_ask_for_token_and_certificate_as_all_do(tmp_path: Path) -> None:
    """The certificate names the generators, and peers are called by address."""
    authority = Authority()
    token = tmp_path / "token"
    token.write_text("river")
    own = network_of(authority.write(tmp_path / "trainer"), token_file=token)
    tls = network_of(
        authority.write(tmp_path / "generator", name="generator", hosts=["generator"]),
        token_file=token,
    ).model_copy(update={"peer_name": "generator"})
    async with fleet(tmp_path, network=own) as here:
        first = await here.join(network=tls)
        published = await here.publish(floats(SIZE))
        await first.fetch()
        await first.serve(1)
        occupy(here, published.sha256)
        second = await here.join(network=tls)
        path = await second.fetch()
        assert path.read_bytes() == published.path.read_bytes()
        assert from_generators(second) == published.file.pieces.size_bytes
        request = wire.FetchWeightsRequest(version=1, sha256=published.sha256)
        for network, code in (
            (tls.model_copy(update={"token_file": None}), grpc.StatusCode.UNAUTHENTICATED),
            (Network(token_file=str(token)), grpc.StatusCode.UNAVAILABLE),
        ):
            channel = grpc_kit.channel(
                f"127.0.0.1:{first.port}", network, server_name="generator", own_connection=True
            )
            stub = policy_pb2_grpc.PolicyServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.FetchWeights(request, timeout=10).read()
            assert raised.value.code() is code
            await channel.close(None)


async def test_a_generator_answers_nothing_else_of_the_policy_service(tmp_path: Path) -> None:
    async with fleet(tmp_path) as here:
        first = await here.join()
        channel = grpc_kit.channel(f"127.0.0.1:{first.port}", Network())
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ReportServing(wire.ReportServingRequest(), timeout=10)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await channel.close(None)
