"""Where rows come from: reasoning-gym, JSONL and Parquet files, Hugging Face datasets.

Each is opened into a Source: its size, one row by position, one column from start to end. The
libraries are imported by the source that needs them: they take seconds.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.config import ReasoningGym
from services.common.errors import UserError

MISSING = object()
"""Stands for a value of a column that a row does not have."""

MAX_EXPRESSIONS = 20_000
"""Most expressions that `every_expression` makes: all of one and two digits are 16,400."""


@dataclass(frozen=True)
class Source:
    """An opened source of rows."""

    size: int
    """Rows."""
    read: Callable[[int], Mapping[str, Any]]
    """The columns of the row at a position from 0 to size - 1."""
    column: Callable[[str], Iterator[object]]
    """All values of one column in order; MISSING where a row does not have it."""


def _from_rows(rows: list[dict[str, Any]]) -> Source:
    return Source(
        size=len(rows),
        read=rows.__getitem__,
        column=lambda name: (row.get(name, MISSING) for row in rows),
    )


def reasoning_gym(spec: ReasoningGym, *, size: int, seed: int) -> Source:
    """`size` rows of a task with columns question, answer and metadata, each generated when read.

    Row i is a function of the task, its parameters and seed + i.
    """
    task = _open_task(spec, size=size, seed=seed)

    def read(index: int) -> Mapping[str, Any]:
        try:
            row: Mapping[str, Any] = task[index]
        except Exception as error:
            raise UserError(
                f"data.reasoning_gym: {spec.task} cannot make row {index} with "
                f"params = {spec.params}: {type(error).__name__}: {error}"
            ) from error
        return row

    return Source(
        size=size,
        read=read,
        column=lambda name: (read(index).get(name, MISSING) for index in range(size)),
    )


def every_expression(spec: ReasoningGym) -> Source:
    """Every expression that chain_sum of two terms can ask, once each, as the package renders it.

    One digit: 10 x 10 operands and two operators, 200 rows. Question and metadata are those of a
    row that the package itself made, with the expression replaced.
    """
    task = _open_task(spec, size=1, seed=spec.seed)
    settings = task.config
    if (settings.min_terms, settings.max_terms) != (2, 2):
        raise UserError(
            "evaluation.every_expression: needs data.reasoning_gym.params with min_terms = 2 and "
            f"max_terms = 2; they are {settings.min_terms} and {settings.max_terms}"
        )
    counted = 0
    found: dict[str, tuple[int, int]] = {}
    for digits in range(settings.min_digits, settings.max_digits + 1):
        greatest = 10**digits - 1
        least = 0 if digits == 1 else 10 ** (digits - 1)
        if settings.allow_negation:
            least = -greatest
        counted += 2 * (greatest - least + 1) ** 2
        if counted > MAX_EXPRESSIONS:
            raise UserError(
                f"evaluation.every_expression: {settings.max_digits} digits have more than "
                f"{MAX_EXPRESSIONS:,} expressions; lower params.max_digits, or set it to false"
            )
        for first in range(least, greatest + 1):
            for second in range(least, greatest + 1):
                # With negation the ranges of few and many digits overlap: the first one counts.
                found.setdefault(f"{first} + {second}", (first + second, digits))
                found.setdefault(f"{first} - {second}", (first - second, digits))
    model = task[0]
    rows = [
        {
            **model,
            "question": model["question"].replace(model["metadata"]["expression"], expression),
            "answer": str(answer),
            "metadata": {
                **model["metadata"],
                "source_index": index,
                "num_digits": digits,
                "expression": expression,
            },
        }
        for index, (expression, (answer, digits)) in enumerate(found.items())
    ]
    return _from_rows(rows)


def _open_task(spec: ReasoningGym, *, size: int, seed: int) -> Any:
    """The package's own dataset object."""
    import reasoning_gym as gym
    from reasoning_gym.factory import DATASETS

    if spec.task not in DATASETS:
        near = difflib.get_close_matches(spec.task, DATASETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(DATASETS))}"
        raise UserError(f"data.reasoning_gym.task: no task {spec.task!r} in reasoning-gym; {hint}")
    for name in ("size", "seed"):
        if name in spec.params:
            raise UserError(
                f"data.reasoning_gym.params.{name}: write it as data.reasoning_gym.{name}"
            )
    try:
        return gym.create_dataset(spec.task, size=size, seed=seed, **spec.params)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"data.reasoning_gym.params: {spec.task} does not take {spec.params}: {error}"
        ) from error


def file(name: str) -> Source:
    """A .jsonl file (one object a line; empty lines are skipped) or a .parquet file."""
    path = Path(name)
    readers = {".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}
    reader = readers.get(path.suffix)
    if reader is None:
        raise UserError(f"data.file: {name} must end in {', '.join(readers)}")
    if not path.is_file():
        raise UserError(f"data.file: no such file: {name}")
    try:
        return reader(path)
    except OSError as error:
        raise UserError(f"data.file: {name} cannot be read: {error}") from error


def _jsonl(path: Path) -> Source:
    rows = []
    try:
        # A byte order mark is part of no key. Lines end with a newline alone: texts may hold
        # U+2028, at which str.splitlines() would cut.
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise UserError(f"data.file: {path} line {number} is not a JSON object")
                rows.append(row)
    except UnicodeDecodeError as error:
        raise UserError(f"data.file: {path} is not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"data.file: {path} line {number} is not JSON: {error.msg}") from error
    return _from_rows(rows)


def _parquet(path: Path) -> Source:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"data.file: {path} is not a Parquet file: {error}") from error

    def column(name: str) -> Iterator[object]:
        if name not in table.column_names:
            return iter([MISSING] * table.num_rows)
        return (value.as_py() for value in table.column(name))

    return Source(
        size=table.num_rows,
        read=lambda index: table.slice(index, 1).to_pylist()[0],
        column=column,
    )


def dataset(name: str, *, split: str) -> Source:
    """A Hugging Face dataset: a folder (data files, or one that `save_to_disk` wrote), or a name on
    the hub.

    A folder is read without any network. What starts like a path is never looked up on the hub.
    """
    import datasets

    path = Path(name).expanduser()
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"data.dataset: no such folder: {name}")
    saved = any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            opened = datasets.load_from_disk(str(path))
            if isinstance(opened, datasets.DatasetDict):
                if split not in opened:
                    raise UserError(
                        f"data.split: {name} has no split {split!r}; it has {', '.join(opened)}"
                    )
                opened = opened[split]
        else:
            opened = datasets.load_dataset(str(path) if path.exists() else name, split=split)
    except UserError:
        raise
    except Exception as error:  # the library raises a dozen kinds, of which few say what was read
        first_line = next(iter(str(error).splitlines()), "")
        raise UserError(
            f"data.dataset: {name} (split {split}) cannot be loaded: "
            f"{type(error).__name__}: {first_line}"
        ) from error

    def column(wanted: str) -> Iterator[object]:
        if wanted not in opened.column_names:
            return iter([MISSING] * len(opened))
        return iter(opened[wanted])

    return Source(size=len(opened), read=lambda index: opened[index], column=column)
