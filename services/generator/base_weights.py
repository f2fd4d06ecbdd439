"""The folder that an engine starts on: the model's files, and with adapters its frozen weights.

Versions that are adapters belong to weights that never change: they are fetched once, before the
engine starts, and read by it as those of any model.
"""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import structlog

from services.common import adapter_files
from services.generator.announcement import Announcement
from services.generator.weights import FetchFailed, PolicyClient, TooOld

REFETCH_S = 1.0
"""Pause before weights that could not be fetched are tried again."""

NEVER = 1 << 62
"""Versions behind the newest at which frozen weights are too old."""


@asynccontextmanager
async def engine_folder(
    folder: Path, client: PolicyClient, say: Callable[[str], None]
) -> AsyncIterator[Path]:
    """The folder to start the engine on: `folder` itself where versions are whole weights, else
    one with the same files and the frozen weights, which are deleted when the engine has them."""
    if not (folder / adapter_files.BASE).is_file():
        yield folder
        return
    say("fetching the frozen weights")
    weights = await _fetched(folder, client)
    made = weights.parent / "model"
    await asyncio.to_thread(_fill, made, folder, weights)
    try:
        yield made
    finally:
        client.keep_only()
        await asyncio.to_thread(shutil.rmtree, made)


async def _fetched(folder: Path, client: PolicyClient) -> Path:
    """The file, as soon as it is here whole."""
    base = adapter_files.BaseWeights.from_json((folder / adapter_files.BASE).read_bytes())
    none = np.empty((0, 1), np.float32)
    target = Announcement(
        version=adapter_files.BASE_VERSION,
        attempt=0,
        step=0,
        file=base.file,
        dtype="",
        canary_rows=none.astype(np.int64),
        canary_logprobs=none,
        perturbed_logprobs=none,
        max_staleness=NEVER,
        publishes=0,
        delta=None,
    )
    while True:
        try:
            return await client.fetch(target)
        except (FetchFailed, TooOld) as error:  # a trainer that starts anew has it soon
            structlog.get_logger().error("frozen weights not fetched", why=str(error))
            await asyncio.sleep(REFETCH_S * random.uniform(0.5, 1.5))


def _fill(made: Path, folder: Path, weights: Path) -> None:
    made.mkdir()
    for path in folder.iterdir():
        if path.name != adapter_files.BASE:
            (made / path.name).symlink_to(path.absolute())
    (made / "model.safetensors").hardlink_to(weights)
