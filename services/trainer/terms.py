"""What has to be the same on all nodes of a trainer, as digests by name: each node reads a recipe
and a model of its own, and ranks that differ in them would train on, to no good."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from services.common.config import IDENTITY, Recipe

SECTIONS = (*IDENTITY, "trainer", "checkpoint")
"""Of the recipe. What else there is says how a process finds others, or is no rank's business."""

HEAD_BYTES = 1 << 20
"""Of a weights file, read whole: its table of tensors."""

BLOCKS, BLOCK_BYTES = 256, 4096
"""Of what follows, looked at evenly all over the file. Other weights differ nearly everywhere; to
read a large model twice would double the time to start."""


def terms_of(recipe: Recipe) -> dict[str, str]:
    """Name -> hex digest: "run", sections of the recipe, "the model's files" and "software". Reads
    files: not for an event loop."""
    found = {name: _digest(getattr(recipe, name).model_dump(mode="json")) for name in SECTIONS}
    found["run"] = _digest(recipe.run)
    # Rank 0 names files to the others: the folder has one path everywhere.
    found["folder"] = _digest(str(recipe.run_folder.absolute()))
    found["token budgets"] = _digest([recipe.token_budget, recipe.trained_token_budget])
    found["files of model.path"] = _digest(_files(Path(recipe.model.path)))
    if recipe.loss.reference is not None:
        found["files of loss.reference"] = _digest(_files(Path(recipe.loss.reference)))
    found["software"] = _digest([version("headrace"), torch.__version__])
    return found


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of what is not the same, sorted.

    Example: `differing({"loss": "a", "run": "b"}, {"loss": "c", "run": "b"})` is ["loss"].
    """
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _files(folder: Path) -> list[list[str]]:
    """Name and digest of a model's configuration and weights; none where there is no such folder,
    which every rank says for itself."""
    paths = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])
    return [[path.name, _sampled(path)] for path in paths]


def _sampled(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset in _offsets(path.stat().st_size):
            file.seek(offset)
            digest.update(file.read(BLOCK_BYTES if offset else HEAD_BYTES))
    digest.update(str(path.stat().st_size).encode())
    return digest.hexdigest()


def _offsets(size: int) -> Iterator[int]:
    """Where to read: at the head, then evenly spread up to the end."""
    yield 0
    rest = size - HEAD_BYTES
    if rest > 0:
        last = max(0, rest - BLOCK_BYTES)
        yield from (HEAD_BYTES + last * block // (BLOCKS - 1) for block in range(BLOCKS))
