"""The recipes that runs had: what an aggregator was started with, kept without its secrets.

An aggregator knows the recipe of its own run and says so to the store when it starts; where several
runs share a database, so do all of them. A recipe that has changed since stands beside the one
before, with the time from which it held.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select

from services.aggregator import schema
from services.aggregator.store import Store
from services.common import config
from services.common.config import Recipe

Value = str | int | float | bool | list[Any]
"""A value of TOML as JSON has it; a list has no tables in it, except a mixed one."""

HIDDEN = "***"

SECRET_KEY = re.compile(r"(?i)(^|[_.-])(api_?key|key|token|password|passwd|secret|credentials?)$")
"""Keys that hold a secret by their name. The recipe itself has none such; the `params` that go to
users' own functions and environments may.
"""

MAX_RECIPES = 100
"""Changes of one run's recipe that are answered, the latest."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A recipe as it is kept."""

    since_s: float
    """When an aggregator first said it, in seconds since 1970."""
    values: dict[str, Value]
    """By dotted key, defaults included: {"trainer.max_steps": 150}. A key whose value is none is
    not there."""
    given: list[str]
    """Of these, what the recipe, the environment or the command line gives."""


def shown(recipe: Recipe) -> tuple[dict[str, Value], list[str]]:
    """The values of a recipe without its secrets, and which of them are no defaults.

    Example: `queue.url` of "redis://me:pw@host" is "redis://me:***@host", an `api_key` among the
    params of a reward function is "***".
    """
    tree = tomllib.loads(config.dump_toml(recipe, hide_passwords=True))
    values = {key: _hidden(key, value) for key, value in _flat(tree)}
    given = [key for key, _ in _flat(recipe.model_dump(exclude_none=True, exclude_unset=True))]
    return values, [key for key in given if key in values]


def remember(store: Store, recipe: Recipe, *, now_s: float) -> bool:
    """Keep the recipe of its run; False where the one kept last is the same. Blocking, for the
    writer's thread.
    """
    values, given = shown(recipe)
    content = json.dumps({"values": values, "given": given}, sort_keys=True, default=str)
    table = schema.recipes
    with store.write() as writing:
        latest = writing.connection.scalar(
            select(table.c.content)
            .where(table.c.run_name == recipe.run)
            .order_by(table.c.since_s.desc(), table.c.id.desc())
            .limit(1)
        )
        if latest == content:
            return False
        writing.connection.execute(
            insert(table).values(run_name=recipe.run, since_s=now_s, content=content)
        )
    return True


def recipes_of(connection: Connection, run: str) -> list[Kept]:
    """All that are kept of a run, the latest first; none where no aggregator of it said one."""
    table = schema.recipes
    rows = connection.execute(
        select(table.c.since_s, table.c.content)
        .where(table.c.run_name == run)
        .order_by(table.c.since_s.desc(), table.c.id.desc())
        .limit(MAX_RECIPES)
    )
    return [Kept(since_s=row.since_s, **json.loads(row.content)) for row in rows]


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; tables in a list are numbered, as `--set` names them."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        tables = isinstance(value, list | tuple) and any(isinstance(e, Mapping) for e in value)
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        elif tables and all(isinstance(each, Mapping) for each in value):
            for index, each in enumerate(value):
                yield from _flat(each, f"{key}.{index}.")
        else:
            yield key, value


def _hidden(key: str, value: Any) -> Any:
    """The value without what must not be shown."""
    if SECRET_KEY.search(key):
        return HIDDEN
    if isinstance(value, str):
        return config.without_passwords(value)
    if isinstance(value, list):
        return [_hidden(key, each) for each in value]
    if isinstance(value, Mapping):  # a table in a mixed list
        return {name: _hidden(f"{key}.{name}", each) for name, each in value.items()}
    return value
