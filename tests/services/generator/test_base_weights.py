"""The frozen weights of a run with adapters, over a real connection."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.common import adapter_files, weight_files
from services.generator import base_weights, weight_links
from services.generator.base_weights import engine_folder
from services.trainer.policy import PolicyStore
from tests.services.generator.trainers import Trainer, client_of, model_folder, trainer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, and files of several pieces."""
    monkeypatch.setattr(weight_links, "RETRY_S", (0.001, 0.01))
    monkeypatch.setattr(base_weights, "REFETCH_S", 0.01)
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", 500)


WEIGHTS = {"w": np.arange(2000, dtype=np.float32)}
CONFIG = b'{"r": 4}'


async def with_adapters(made: Trainer, tmp_path: Path) -> None:
    """Let the trainer be one whose versions are adapters."""
    save_file(WEIGHTS, made.store.base_path)
    base = await made.store.keep_base()
    more = {adapter_files.CONFIG: CONFIG, adapter_files.BASE: base.to_json()}
    made.servicer.open(made.store, model_folder(tmp_path / "model"), more)


async def test_an_engine_starts_on_the_frozen_weights_which_are_then_deleted(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    async with trainer(tmp_path) as made, client_of(made.port) as client:
        await with_adapters(made, tmp_path)
        await made.publish(1)
        folder = await client.model_files(tmp_path / "cache")
        async with engine_folder(folder, client, said.append) as place:
            assert np.array_equal(load_file(place / "model.safetensors")["w"], WEIGHTS["w"])
            assert (place / adapter_files.CONFIG).read_bytes() == CONFIG
            assert (place / "config.json").read_text() == (folder / "config.json").read_text()
        assert said == ["fetching the frozen weights"]
        assert not (place / "model.safetensors").exists()
        left = await asyncio.to_thread(lambda: [*place.parent.glob("*.safetensors")])
        assert left == []


async def test_without_adapters_it_starts_on_the_models_files(tmp_path: Path) -> None:
    async with trainer(tmp_path) as made, client_of(made.port) as client:
        folder = await client.model_files(tmp_path / "cache")
        async with engine_folder(folder, client, pytest.fail) as place:
            assert place == folder


async def test_frozen_weights_stay_however_many_versions_there_are(tmp_path: Path) -> None:
    """And those that are not there yet, or for a moment, are waited for."""
    async with trainer(tmp_path, max_staleness=1) as made, client_of(made.port) as client:
        await with_adapters(made, tmp_path)
        folder = await client.model_files(tmp_path / "cache")
        for seed in range(1, 6):
            await made.publish(seed)
        watching = asyncio.create_task(client.watch())
        await client.newer_than(4)
        away: Any = made.store._base
        made.store._base = None
        said: list[str] = []
        held = engine_folder(folder, client, said.append)
        entering = asyncio.create_task(held.__aenter__())
        await asyncio.wait({entering}, timeout=0.1)
        assert not entering.done()
        made.store._base = away
        place = await entering
        assert np.array_equal(load_file(place / "model.safetensors")["w"], WEIGHTS["w"])
        await held.__aexit__(None, None, None)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_version_is_never_taken_for_the_frozen_weights(tmp_path: Path) -> None:
    from headrace.v1 import policy_pb2 as wire

    async with trainer(tmp_path) as made:
        await with_adapters(made, tmp_path)
        published = await made.publish(1)
        store: PolicyStore = made.store

        def find(version: int, sha256: str) -> Any:
            return store.find_file(wire.FetchWeightsRequest(version=version, sha256=sha256))

        base = store._base
        assert base is not None
        assert find(adapter_files.BASE_VERSION, base.pieces.sha256) is base
        assert find(adapter_files.BASE_VERSION, published.sha256) is None
        assert find(published.version, base.pieces.sha256) is None
