"""Tiny models: small Qwen3s that this machine makes by itself, for the demos and for tests.

`make()` writes a standard Hugging Face folder; `resolve()` turns a recipe's `model.path` into a
folder, where `tiny:NAME` means one kept in the user's cache. Nothing is downloaded.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from services.common.errors import UserError
from services.launcher import tiny_tasks

PREFIX = "tiny:"
TIED_SUFFIX = "-tied"
"""`tiny:arithmetic-tied` shares the embeddings with the output head, as many small models do."""

MARK_FILE = "tiny_model.json"
"""Says how the folder was made. Written last, so a folder that has it is complete."""

Progress = Callable[[float, str], None]
"""Called with the share done (0 to 1) and a line for people."""


@dataclass(frozen=True)
class Task:
    """What a model is warmed up on."""

    teach: Callable[[int], tiny_tasks.Lessons]
    """By seed."""
    target: float
    """Sampled accuracy at which the warm start ends: the format is learnt, and much is left."""
    batch_rows: int = 64
    """Demonstrations of one step."""
    parts: int = 1
    """Of such a batch, by length: how many go through the model one after the other."""


TASKS = {
    "arithmetic": Task(tiny_tasks.arithmetic, target=0.3),
    "calculator": Task(tiny_tasks.calculator, target=0.4, batch_rows=32, parts=2),
    "guess": Task(tiny_tasks.guess, target=0.25, batch_rows=32, parts=4),
}

CODE = ("tiny_tasks.py", "tiny_tokenizer.py", "tiny_training.py")
"""What decides the weights, beside the arguments."""


def resolve(
    model_path: str, *, cache: Path | None = None, progress: Progress | None = None
) -> Path:
    """The folder that a recipe's `model.path` means.

    `tiny:NAME` (NAME a key of TASKS, with TIED_SUFFIX or without) is made under `cache`, by default
    `default_cache()`, unless it is there already. Anything else is a folder that must exist: no
    model is looked up on a hub. Raises UserError.
    """
    if not model_path.startswith(PREFIX):
        folder = Path(model_path).expanduser()
        if not folder.is_dir():
            raise UserError(f"model.path: no such folder: {model_path}")
        if not (folder / "config.json").is_file():
            raise UserError(
                f"model.path: {model_path} has no config.json; give a Hugging Face model folder"
            )
        return folder
    name = model_path.removeprefix(PREFIX)
    task, tied = name.removesuffix(TIED_SUFFIX), name.endswith(TIED_SUFFIX)
    digest = _digest(task, _task(task, key="model.path"), tied=tied, seed=0)
    root = default_cache() if cache is None else cache
    return make(root / f"tiny-{name}-{digest}", task=task, tied=tied, progress=progress)


def make(
    directory: Path,
    *,
    task: str = "arithmetic",
    tied: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Make the model in `directory` and return that; nothing to do where the same one is already.

    The folder has config.json, generation_config.json, model.safetensors (float32), the tokenizer
    and its chat template. It is written beside `directory` and renamed, so that it is never there
    by half. The same arguments give the same model, up to float32 rounding between machines.
    Raises UserError for an unknown task and for a folder that holds something else.
    """
    chosen = _task(task, key="task")
    digest = _digest(task, chosen, tied=tied, seed=seed)
    if _holds(directory, digest):
        return directory
    partial = directory.parent / f".{directory.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"{directory} holds something else; name a new or an empty folder")
        partial.mkdir(parents=True)
        accuracy = _write(partial, chosen, tied=tied, seed=seed, progress=progress)
        mark = {"task": task, "tied": tied, "seed": seed, "digest": digest, **accuracy}
        (partial / MARK_FILE).write_text(json.dumps(mark, indent=2) + "\n")
        try:
            partial.rename(directory)
        except OSError:
            # Another process made the same model meanwhile.
            if not _holds(directory, digest):
                raise
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written: {error.strerror or error}; name another folder, or "
            "set XDG_CACHE_HOME to one for a model of the cache"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def default_cache() -> Path:
    """`headrace` in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache)."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification of these variables says that relative paths are to be ignored.
    if named.is_absolute():
        return named / "headrace"
    try:
        return Path.home() / ".cache" / "headrace"
    except RuntimeError:
        raise UserError(
            "model.path: no home folder to keep the tiny model in; set XDG_CACHE_HOME"
        ) from None


def _task(name: str, *, key: str) -> Task:
    if name not in TASKS:
        raise UserError(f"{key}: no tiny model {name!r}; there is {', '.join(TASKS)}")
    return TASKS[name]


def _digest(name: str, task: Task, *, tied: bool, seed: int) -> str:
    """Of all that decides the weights: the arguments and the code, so that no cache outlives it."""
    arguments = asdict(task) | {"teach": name, "tied": tied, "seed": seed}
    found = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode())
    for code in CODE:
        found.update(Path(__file__).with_name(code).read_bytes())
    return found.hexdigest()[:12]


def _holds(directory: Path, digest: str) -> bool:
    """Whether the folder has this model, complete."""
    try:
        found = json.loads((directory / MARK_FILE).read_text())["digest"] == digest
    except (OSError, ValueError, KeyError, TypeError):
        return False
    files = ("config.json", "model.safetensors", "tokenizer.json")
    return found and all((directory / name).is_file() for name in files)


def _write(
    directory: Path, task: Task, *, tied: bool, seed: int, progress: Progress | None
) -> dict[str, float]:
    """Warm up a model, save it into an existing folder, and say how well it answers."""
    # Here, since it takes seconds, and a launcher that finds the model in the cache needs none.
    from services.launcher import tiny_training

    if progress is not None:
        progress(0.0, "making the tiny model")
    schedule = tiny_training.Schedule(
        target=task.target,
        batch_rows=task.batch_rows,
        parts=task.parts,
    )
    accuracy = tiny_training.train_and_save(
        directory, task.teach(seed), schedule, tied=tied, seed=seed, progress=progress
    )
    return {"greedy_accuracy": accuracy.greedy, "sampled_accuracy": accuracy.sampled}
