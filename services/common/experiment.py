"""Whether a run that is started again is still the same experiment, and what differs if not."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.common.config import Recipe
from services.common.errors import UserError

ABSENT = "not given"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ, one line each.

    Example: `differences({"loss": {"clip_low": 0.2}}, {"loss": {"clip_low": 0.3}})` is
    `["loss.clip_low: 0.2 before, 0.3 now"]`.
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    return [
        f"{key}: {_shown(old, key)} before, {_shown(new, key)} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) or (key in old) != (key in new)
    ]


def plain(recipe: Recipe) -> dict[str, Any]:
    """A recipe's experiment as JSON gives it back."""
    content: dict[str, Any] = json.loads(json.dumps(recipe.experiment(), default=str))
    return content


def check_same(before: Mapping[str, Any], recipe: Recipe, *, place: Path) -> None:
    """Raises UserError, with what differs, when the run in `place` was another experiment."""
    lines = differences(before, plain(recipe))
    if lines:
        raise UserError(
            f"run {recipe.run} in {place} has another recipe ({'; '.join(lines)}); choose another "
            "run name, or start over with --fresh"
        )


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key, list elements by position."""
    inner: Any = None
    if isinstance(tree, Mapping):
        inner = tree.items()
    elif isinstance(tree, list | tuple):
        inner = enumerate(tree)
    if not tree or inner is None:
        yield prefix.removesuffix("."), tree
        return
    for key, value in inner:
        yield from _flat(value, f"{prefix}{key}.")


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return ABSENT
    text = json.dumps(values[key], default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
