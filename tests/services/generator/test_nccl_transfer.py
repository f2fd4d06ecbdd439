"""Versions by NCCL, from one GPU to another: the trainer's communicator, and a real engine."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from services.generator.types import EngineDead
from services.trainer.nccl import NcclTransport
from services.trainer.weight_sending import TransferFailed, send_file, tensors_of
from tests.services.generator.references import make
from tests.services.generator.test_weight_receiver import BUFFER_BYTES, Bench, Falling, started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

WITH_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WITH_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

GAP = 0.05
"""Of log-probabilities between CPU and GPU in float32; other weights are far above it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("nccl")
    old, new = make(folder, tied=True, seed=1), make(folder, tied=True, seed=2)
    transport = NcclTransport(torch.device("cuda", 0))
    torch.cuda.init()  # type: ignore[no-untyped-call]  # before this process has but one
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        async with started(folder, dtype="float32") as engine:
            yield Bench(engine, transport, old, new)


@WITH_TWO
async def test_what_is_broadcast_is_what_is_served(bench: Bench) -> None:
    await bench.engine.load(bench.old.path, 1000)
    communicator = await bench.connect()
    for reference in (bench.new, bench.old, bench.new):
        await bench.transfer(communicator, reference.path)
        assert await bench.gap(reference) <= GAP
    assert await bench.gap(bench.old) > 2 * GAP
    await bench.engine.weights.leave_group()
    communicator.abort()


@WITH_TWO
async def test_a_trainer_that_falls_silent_is_given_up(bench: Bench) -> None:
    await bench.engine.load(bench.old.path, 2000)
    communicator = await bench.connect(timeout_s=2.0)
    with pytest.raises(Exception, match=r"broadcast failed|method failed") as error:
        await bench.transfer(Falling(communicator, after=1), bench.new.path)
    assert not isinstance(error.value, EngineDead)
    await bench.engine.load(bench.new.path, 2001)
    assert await bench.gap(bench.new) <= GAP


@WITH_TWO
async def test_an_engine_that_does_not_receive_is_given_up(bench: Bench) -> None:
    """It has connected, and takes nothing."""
    await bench.engine.load(bench.old.path, 3000)
    communicator = await bench.connect()
    path = bench.new.path
    with pytest.raises(TransferFailed, match="took more than"):
        await asyncio.to_thread(
            send_file, path, tensors_of(path), communicator, buffer_bytes=BUFFER_BYTES
        )
    communicator.abort()
    await bench.engine.load(path, 3001)
    assert await bench.gap(bench.new) <= GAP


@WITH_GPU
async def test_a_group_that_nobody_joins_is_given_up(tmp_path: Path) -> None:
    transport = NcclTransport(torch.device("cuda", 0))
    with pytest.raises(TransferFailed, match="took more than 2 s"):
        await asyncio.to_thread(
            transport.connect,
            transport.new_id(),
            world_size=2,
            timeout_s=2.0,
            given_up=threading.Event(),
        )
