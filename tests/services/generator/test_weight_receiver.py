"""The real engine in a transfer group: what the trainer's sender broadcasts, vLLM's own receiver
loads, here by gloo and on CPUs (test_nccl_transfer.py has GPUs). Tied and untied."""

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from services.common import canary
from services.generator.types import EngineDead, LoadTimes
from services.trainer.weight_sending import Communicator, Transport, send_file, tensors_of
from tests.gloo_groups import GlooTransport
from tests.services.generator.references import VOCABULARY, Reference, make
from tests.services.generator.test_engine import EXACT, SETTINGS, prepared, prompt_of
from tests.waiting import until

if TYPE_CHECKING:
    from services.generator.engine import Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # An engine lives in one loop, and it takes half a minute to start: tests share both.
    pytest.mark.asyncio(loop_scope="module"),
]

EXTENSION = "tests.services.generator.gloo_extension.Extension"
BUFFER_BYTES = 40_000
"""Some tensors are smaller, some larger."""
TIMEOUT_S = 20.0
SENDER_TIMEOUT_S = 30.0


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@asynccontextmanager
async def started(folder: Path, **arguments: Any) -> "AsyncIterator[Engine]":
    from services.generator.engine import Engine

    with prepared():
        engine = await Engine.start(folder, settings=SETTINGS, **arguments)
        try:
            yield engine
        finally:
            engine.shutdown()


class Bench:
    """An engine, two models whose weights it may have, and the trainer's end of a group."""

    def __init__(self, engine: "Engine", transport: Transport, old: Reference, new: Reference):
        self.engine, self.transport, self.old, self.new = engine, transport, old, new
        self.version = 0

    async def connect(self, *, timeout_s: float = TIMEOUT_S) -> Communicator:
        """Form a group of the two; timeout_s: of the engine."""
        group_id, world_size = self.transport.new_id(), 1 + self.engine.weights.num_workers
        connecting = asyncio.to_thread(
            self.transport.connect,
            group_id,
            world_size=world_size,
            timeout_s=SENDER_TIMEOUT_S,
            given_up=threading.Event(),
        )
        joining = self.engine.weights.join_group(info(group_id, world_size), timeout_s=timeout_s)
        communicator, _ = await asyncio.gather(connecting, joining)
        return communicator

    async def transfer(
        self, communicator: Communicator, path: Path, *, announced: Path | None = None
    ) -> LoadTimes | None:
        """Broadcast a file, under the next version. `announced`: the file that the engine is told
        of, where it is another one."""
        self.version += 1
        sending: list[asyncio.Task[None]] = []

        async def begin() -> dict[str, Any]:
            assert await self.engine._llm.is_paused()
            send = asyncio.to_thread(
                send_file, path, tensors_of(path), communicator, buffer_bytes=BUFFER_BYTES
            )
            sending.append(asyncio.create_task(send))
            return update(announced or path)

        try:
            times = await self.engine.weights.receive(self.version, begin=begin)
        except Exception:
            communicator.abort()
            await asyncio.gather(*sending, return_exceptions=True)
            raise
        await asyncio.gather(*sending)
        return times

    async def gap(self, reference: Reference) -> float:
        """Of the engine's log-probabilities from a model's."""
        rows = canary.rows(VOCABULARY)
        return float(np.abs(await self.engine.row_logprobs(rows) - reference.rows(rows)).max())


def info(group_id: bytes, world_size: int) -> dict[str, Any]:
    return {
        "nccl_unique_id_b64": base64.b64encode(group_id).decode(),
        "rank_offset": 1,
        "world_size": world_size,
        "packed": True,
        "packed_buffer_size_bytes": BUFFER_BYTES,
    }


def update(path: Path) -> dict[str, Any]:
    tensors = tensors_of(path)
    return {
        "names": [each.name for each in tensors],
        "dtype_names": [each.dtype for each in tensors],
        "shapes": [list(each.shape) for each in tensors],
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["untied", "tied"])
async def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    folder, tied = tmp_path_factory.mktemp(request.param), request.param == "tied"
    old, new = make(folder, tied=tied, seed=1), make(folder, tied=tied, seed=2)
    async with started(folder, dtype="float32", extension=EXTENSION) as engine:
        yield Bench(engine, GlooTransport(), old, new)


async def test_what_is_broadcast_is_what_is_served(bench: Bench) -> None:
    """In several chunks, several times, over one group; files may come between."""
    await bench.engine.load(bench.old.path, 1000)
    communicator = await bench.connect()
    for reference in (bench.new, bench.old, bench.new):
        times = await bench.transfer(communicator, reference.path)
        assert times is not None
        assert times.pause_s >= times.load_s > 0
        assert await bench.gap(reference) <= EXACT
    assert await bench.gap(bench.old) > 0.1
    await bench.engine.load(bench.old.path, 1001)
    assert await bench.gap(bench.old) <= EXACT
    await bench.transfer(communicator, bench.new.path)
    assert await bench.gap(bench.new) <= EXACT
    await bench.engine.weights.leave_group()
    communicator.abort()


async def test_requests_go_on_over_a_broadcast(bench: Bench) -> None:
    """With each token under the label of the weights that made it."""
    bench.version = 2000
    await bench.engine.load(bench.old.path, bench.version)
    communicator = await bench.connect()
    sampled: list[int] = []
    running = asyncio.create_task(
        bench.engine.generate(
            prompt_of(20),
            temperature=1.0,
            max_tokens=300,
            stop_token_ids=[],
            sampled=sampled.append,
        )
    )
    await until(lambda: bench.engine.running)
    await bench.engine.generate(
        prompt_of(3), temperature=1.0, max_tokens=8, stop_token_ids=[], sampled=sampled.append
    )
    await bench.transfer(communicator, bench.new.path)
    generated = await running
    assert [span.version for span in generated.spans] == [2000, 2001]
    communicator.abort()


async def test_nothing_comes_and_all_is_as_before(bench: Bench) -> None:
    await bench.engine.load(bench.old.path, 3000)

    async def begin() -> None:
        return None

    assert await bench.engine.weights.receive(3001, begin=begin) is None
    assert await bench.gap(bench.old) <= EXACT


async def test_a_group_that_does_not_connect_leaves_the_engine_as_it_was(bench: Bench) -> None:
    """The others never come: an error within the limit, and the engine goes on."""
    await bench.engine.load(bench.old.path, 4000)
    group_id = bench.transport.new_id()
    with pytest.raises(Exception, match=r"not connected|method failed"):
        await bench.engine.weights.join_group(info(group_id, 3), timeout_s=0.5)
    assert await bench.gap(bench.old) <= EXACT
    with pytest.raises(Exception, match=r"in no group|method failed"):
        await bench.transfer(_Nobody(), bench.new.path)
    await bench.engine.load(bench.new.path, 4001)
    assert await bench.gap(bench.new) <= EXACT


async def test_a_trainer_that_falls_silent_is_given_up(bench: Bench) -> None:
    """It sends one chunk and no more, its connection open: the engine is free within the limit, and
    loads a file then."""
    await bench.engine.load(bench.old.path, 5000)
    communicator = await bench.connect(timeout_s=5.0)
    with pytest.raises(Exception, match=r"broadcast failed|method failed") as error:
        await bench.transfer(Falling(communicator, after=1), bench.new.path)
    assert not isinstance(error.value, EngineDead)
    assert await bench.engine._llm.is_paused()
    await bench.engine.load(bench.new.path, 5001)
    assert await bench.gap(bench.new) <= EXACT
    await bench.transfer(await bench.connect(), bench.old.path)
    assert await bench.gap(bench.old) <= EXACT


async def test_a_trainer_that_is_gone_is_noticed(bench: Bench) -> None:
    await bench.engine.load(bench.old.path, 6000)
    communicator = await bench.connect()

    async def begin() -> dict[str, Any]:
        communicator.abort()
        return update(bench.new.path)

    with pytest.raises(Exception, match=r"broadcast failed|method failed"):
        await bench.engine.weights.receive(6001, begin=begin)
    await bench.engine.load(bench.new.path, 6002)
    assert await bench.gap(bench.new) <= EXACT


async def test_a_version_that_lacks_a_tensor_is_refused(bench: Bench, tmp_path: Path) -> None:
    await bench.engine.load(bench.old.path, 7000)
    tensors = load_file(bench.new.path)
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    partial = tmp_path / "partial.safetensors"
    save_file(tensors, partial)
    communicator = await bench.connect()
    with pytest.raises(Exception, match=r"were not written|method failed"):
        await bench.transfer(communicator, partial)
    await bench.engine.load(bench.new.path, 7001)
    assert await bench.gap(bench.new) <= EXACT


async def test_tensors_that_do_not_fit_the_model_are_an_error(bench: Bench, tmp_path: Path) -> None:
    await bench.engine.load(bench.old.path, 8000)
    tensors = load_file(bench.new.path)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    turned = tmp_path / "turned.safetensors"
    save_file(tensors, turned)
    communicator = await bench.connect()
    with pytest.raises(Exception, match=r"broadcast failed|method failed") as error:
        await bench.transfer(communicator, turned)
    assert not isinstance(error.value, EngineDead)
    await bench.engine.load(bench.new.path, 8001)
    assert await bench.gap(bench.new) <= EXACT


async def test_a_worker_that_dies_within_a_broadcast_is_a_dead_engine(tmp_path: Path) -> None:
    """As gloo's does when more comes than it has room for: an error, and no endless wait."""
    old, new = make(tmp_path, tied=True, seed=1), make(tmp_path, tied=True, seed=2)
    tensors = load_file(new.path)
    name = "model.embed_tokens.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name]])
    more = tmp_path / "more.safetensors"
    save_file(tensors, more)
    async with started(tmp_path, dtype="float32", extension=EXTENSION) as engine:
        bench = Bench(engine, GlooTransport(), old, new)
        await engine.load(old.path, 1)
        communicator = await bench.connect()
        with pytest.raises(EngineDead):
            await bench.transfer(communicator, more, announced=new.path)


class _Nobody:
    """A group without ranks."""

    def send(self, tensors: Any) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class Falling:
    """Sends so many chunks, and no more."""

    def __init__(self, communicator: Communicator, *, after: int) -> None:
        self._communicator, self._left = communicator, after

    def send(self, tensors: Any) -> None:
        if self._left:
            self._left -= 1
            self._communicator.send(tensors)

    def finish(self) -> None: ...

    def abort(self) -> None:
        self._communicator.abort()
