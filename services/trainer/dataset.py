"""Prompts: the rows that training draws from, the rows that evaluation asks, and their order.

Torch-free. A row is made when it is asked for, so a generated task of a million rows costs nothing
to open; the prompts of files and datasets are all looked at before the run starts. Every mistake
in the data is a UserError that names the recipe's key.
"""

import datetime
import decimal
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.config import Recipe
from services.common.errors import UserError
from services.trainer import sources

ROLES = ("system", "user", "assistant", "tool")

ReadRow = Callable[[int], Mapping[str, Any]]
"""The columns of the row at a position."""


@dataclass(frozen=True)
class Row:
    """One prompt with everything its dataset says about it."""

    index: int
    """Position in its source, from 0."""
    messages: list[dict[str, str]]
    """The prompt: {role, content} each, as chat templates take them."""
    columns: dict[str, Any]
    """All columns, the prompt's included, as values that JSON can write."""


@dataclass(frozen=True)
class Prompt:
    """How a row's columns become the messages of a conversation."""

    column: str
    system_prompt: str | None

    def messages(self, value: object, *, index: int) -> list[dict[str, str]]:
        """The messages that the prompt column's `value` means.

        A text becomes one user message, with the system prompt before it; a list of {role, content}
        is taken as it is. Raises UserError for anything else.
        """
        where = f"data.prompt_column: column {self.column!r} of row {index}"
        if isinstance(value, str):
            messages = [{"role": "user", "content": value}]
            if self.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": self.system_prompt})
        elif isinstance(value, list) and value:
            messages = [_message(item, where=where) for item in value]
        else:
            raise UserError(
                f"{where} is {_short(value)}; it must be a text or a list of {{role, content}}"
            )
        for message in messages:
            if any("\ud800" <= character <= "\udfff" for character in message["content"]):
                raise UserError(f"{where} holds half a surrogate pair; write it as valid UTF-8")
        return messages


class Rows:
    """Rows at `positions` of one source, each made when it is asked for."""

    def __init__(self, read: ReadRow, *, positions: range, prompt: Prompt) -> None:
        self._read, self._positions, self._prompt = read, positions, prompt

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, number: int) -> Row:
        """Row `number` of these; its `index` is its position in the source."""
        index = self._positions[number]
        columns = self._read(index)
        if self._prompt.column not in columns:
            raise UserError(_no_column(self._prompt.column, columns, where=f"row {index}"))
        return Row(
            index=index,
            messages=self._prompt.messages(columns[self._prompt.column], index=index),
            columns={
                str(name): _jsonable(value, where=f"column {name!r} of row {index}")
                for name, value in columns.items()
            },
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))


@dataclass(frozen=True)
class Dataset:
    """What a run trains and is evaluated on."""

    training: Rows
    """At least one."""
    evaluation: Rows
    """None where the recipe turns evaluation off."""
    shuffle: bool
    seed: int

    def order(self, epoch: int) -> list[int]:
        """Positions in `training`, each once, in the order of this epoch (counted from 0).

        A function of seed and epoch alone, the same on every machine and Python: after a restart
        the cursor still means the same prompts.
        """
        numbers = range(len(self.training))
        if not self.shuffle:
            return list(numbers)
        # Only Random.random() is promised to give the same sequence in every Python; shuffle() is
        # not.
        draw = random.Random(f"{self.seed}:{epoch}")
        keys = [draw.random() for _ in numbers]
        return sorted(numbers, key=keys.__getitem__)


def load(recipe: Recipe) -> Dataset:
    """The rows that `data` and `evaluation` of the recipe describe.

    A file's or dataset's last `evaluation.size` rows are for evaluation and never trained on.
    Raises UserError for what cannot be read or makes no prompts.
    """
    if recipe.data.reasoning_gym is not None:
        training, evaluation = _generated(recipe)
    else:
        training, evaluation = _stored(recipe)
    return Dataset(
        training=training,
        evaluation=evaluation,
        shuffle=recipe.data.shuffle,
        seed=recipe.data.seed,
    )


def _generated(recipe: Recipe) -> tuple[Rows, Rows]:
    """Rows of a reasoning-gym task."""
    spec, evaluation = recipe.data.reasoning_gym, recipe.evaluation
    assert spec is not None
    # "prompt", the default of the key, names no column of that package.
    column = recipe.data.prompt_column
    prompt = Prompt("question" if column == "prompt" else column, recipe.data.system_prompt)

    def rows(source: sources.Source) -> Rows:
        return Rows(source.read, positions=range(source.size), prompt=prompt)

    source = sources.reasoning_gym(spec, size=spec.size, seed=spec.seed)
    training = rows(source)
    training[0]  # mistakes show now and not in the middle of the run
    if not evaluation.enabled:
        return training, Rows(source.read, positions=range(0), prompt=prompt)
    if evaluation.every_expression:
        return training, rows(sources.every_expression(spec))
    # The package makes row i of seed s from s + i: overlapping ranges are the same rows.
    first, last = evaluation.seed, evaluation.seed + evaluation.size
    if first < spec.seed + spec.size and spec.seed < last:
        raise UserError(
            f"evaluation.seed: {first} makes rows that training has too (data.reasoning_gym seed "
            f"{spec.seed}, size {spec.size}); take {spec.seed + spec.size} or more"
        )
    return training, rows(sources.reasoning_gym(spec, size=evaluation.size, seed=first))


def _stored(recipe: Recipe) -> tuple[Rows, Rows]:
    """Rows of a file or a dataset, its prompts all checked."""
    data, evaluation = recipe.data, recipe.evaluation
    if data.file is not None:
        key, source = "data.file", sources.file(data.file)
        name = data.file
    else:
        assert data.dataset is not None
        key, source = "data.dataset", sources.dataset(data.dataset, split=data.split)
        name = data.dataset
    prompt = Prompt(data.prompt_column, data.system_prompt)
    if source.size == 0:
        raise UserError(f"{key}: {name} has no rows")
    held_out = evaluation.size if evaluation.enabled else 0
    if held_out >= source.size:
        raise UserError(
            f"evaluation.size: {held_out} leaves nothing to train on of the {source.size} rows of "
            f"{name}; lower it, or set evaluation.enabled = false"
        )
    cut = source.size - held_out
    training = Rows(source.read, positions=range(cut), prompt=prompt)
    training[0]  # its other columns too; of the rest only the prompts are looked at, for speed
    for index, value in enumerate(_column(source, data.prompt_column)):
        prompt.messages(value, index=index)
    return training, Rows(source.read, positions=range(cut, source.size), prompt=prompt)


def _column(source: sources.Source, name: str) -> Iterable[object]:
    for index, value in enumerate(source.column(name)):
        if value is sources.MISSING:
            raise UserError(_no_column(name, source.read(index), where=f"row {index}"))
        yield value


def _no_column(name: str, columns: Iterable[str], *, where: str) -> str:
    return (
        f"data.prompt_column: {where} has no column {name!r}; it has {', '.join(map(str, columns))}"
    )


def _message(item: object, *, where: str) -> dict[str, str]:
    """One {role, content}; keys that hold nothing (a table gives every row all keys) are let go."""
    if not isinstance(item, dict):
        raise UserError(f"{where} has the message {_short(item)}; write {{role, content}}")
    present = {name: value for name, value in item.items() if value is not None}
    if set(present) != {"role", "content"} or not isinstance(present["content"], str):
        raise UserError(f"{where} has the message {_short(item)}; it must be {{role, content}}")
    if present["role"] not in ROLES:
        raise UserError(
            f"{where} has a message with role {present['role']!r}; roles are {', '.join(ROLES)}"
        )
    return present


def _jsonable(value: Any, *, where: str) -> Any:
    """`value` as JSON can write it: dates as ISO texts, decimals as texts, NaN and infinities as
    null, tuples as lists. Raises UserError for what JSON has no form for, such as images.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item, where=where) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item, where=where) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return _jsonable(value.tolist(), where=where)
    raise UserError(
        f"data: {where} is a {type(value).__name__}, which JSON cannot hold; reward functions get "
        "columns as JSON: drop or convert the column"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
