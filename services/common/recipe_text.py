"""The recipe as text: reading TOML, placing overrides, saying what is wrong where, writing TOML.

Knows pydantic models in general and not what the recipe holds; config.py holds that. Mistakes are
ValueErrors whose lines name the place (file, environment variable or option) and the key.
"""

import difflib
import json
import math
import re
import reprlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
"""TOML keys that need no quotes."""

ELSEWHERE_PENALTY = 0.2
"""A key of another section must be this much more similar to be the better guess."""

LEAST_SIMILARITY = 0.5
"""Of a guess worth making (difflib's ratio)."""


def read(path: Path) -> dict[str, Any]:
    """The tree in a TOML file. Raises ValueError that names the file and the line of bad TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such recipe file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error


@dataclass
class Source:
    """Where a recipe's values come from, to say so when one is wrong."""

    path: Path
    """The file."""
    model: type[BaseModel]
    """What the tree must be."""
    _origins: dict[str, str] = field(default_factory=dict)
    """Dotted key of each override, and who gave it."""

    def place(self, tree: dict[str, Any], keys: Sequence[str], text: str, *, origin: str) -> None:
        """Put an override into the tree; raises ValueError where the tree has no such place."""
        node: Any = tree
        for position, key in enumerate(keys[:-1]):
            node = _child(node, key)
            if not isinstance(node, dict | list):
                held = ".".join(keys[: position + 1])
                raise ValueError(f"{origin}: {held} is neither a section nor a list in {self.path}")
        last = keys[-1]
        value = _value_of(text, takes_text=self._takes_text(keys))
        if isinstance(node, dict):
            node[last] = value
        elif last.isdigit() and int(last) < len(node):
            node[int(last)] = value
        else:
            raise ValueError(f"{origin}: the list in {self.path} has {len(node)} elements")
        self._origins[".".join(keys)] = origin

    def explain(self, mistake: Mapping[str, Any]) -> list[str]:
        """The lines for one of pydantic's errors: place, key, what is wrong, what would be right.

        A line a mistake; a validator of the whole recipe may have found several.
        """
        location = [str(part) for part in mistake["loc"]]
        key, place, kind = ".".join(location), self._origin(location), mistake["type"]
        shown = reprlib.repr(mistake["input"])
        if kind == "extra_forbidden":
            return [f"{place}: unknown key {key}{self._hint(location)}"]
        if kind == "missing":
            return [f"{place}: {key} is missing"]
        if kind in ("model_type", "model_attributes_type"):
            return [f"{place}: {key} = {shown}: must be a table of keys"]
        if kind == "tuple_type":
            return [f"{place}: {key} = {shown}: must be a list"]
        message = mistake["msg"].removeprefix("Value error, ")
        if not location:
            return [f"{place}: {line}" for line in message.split("\n")]
        return [f"{place}: {key} = {shown}: {message[0].lower()}{message[1:]}"]

    def _origin(self, location: Sequence[str]) -> str:
        """Who gave the value at `location`, around it or in it: an override, or the file."""
        for length in range(len(location), 0, -1):
            found = self._origins.get(".".join(location[:length]))
            if found is not None:
                return found
        within = ".".join(location) + "."
        inner = (origin for key, origin in self._origins.items() if key.startswith(within))
        return next(inner, str(self.path))

    def _takes_text(self, keys: Sequence[str]) -> bool:
        _, model = _section_at(self.model, keys[:-1])
        found = model.model_fields.get(keys[-1]) if model else None
        return found is not None and found.annotation in (str, str | None)

    def _hint(self, location: Sequence[str]) -> str:
        """The nearest valid key: of the same section, or a much more similar one elsewhere."""
        here, _ = _section_at(self.model, location[:-1])
        best, best_score = "", LEAST_SIMILARITY
        for section, name in all_keys(self.model):
            likeness = difflib.SequenceMatcher(None, location[-1], name).ratio()
            score = likeness if section == here else likeness - ELSEWHERE_PENALTY
            if score > best_score:
                shown = location[:-1] if section == here else section
                best, best_score = ".".join([*shown, name]), score
        if best:
            return f"; did you mean {best}?"
        names = sorted(name for section, name in all_keys(self.model) if section == here)
        return f"; valid here: {', '.join(names)}" if names else ""


def _section_at(
    model: type[BaseModel], location: Sequence[str]
) -> tuple[tuple[str, ...], type[BaseModel] | None]:
    """A location without positions in lists and the user's own names in tables of sections; and the
    section's model, where it has one.
    """
    found: list[str] = []
    here: type[BaseModel] | None = model
    named = False
    for part in location:
        if named or part.isdigit():
            named = False
            continue
        found.append(part)
        field = here.model_fields.get(part) if here is not None else None
        here = section_in(field.annotation) if field is not None else None
        named = here is not None and field is not None and get_origin(field.annotation) is dict
    return tuple(found), here


def _child(node: Any, key: str) -> Any:
    """The element `key` of a section (made where it is missing) or of a list; None if neither."""
    if isinstance(node, dict):
        return node.setdefault(key, {})
    return node[int(key)] if key.isdigit() and int(key) < len(node) else None


def _value_of(text: str, *, takes_text: bool) -> Any:
    """An override's value: TOML, or the text itself where it is no TOML or a text is wanted."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if takes_text and not isinstance(value, str) else value


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `Section | None` or `tuple[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = section_in(argument)
        if found is not None:
            return found
    return None


def all_keys(
    model: type[BaseModel], section: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """All keys as (section, name), outer ones first: `((), "run")`, `(("trainer",), "seed")`, …"""
    for name in model.model_fields:
        yield section, name
    for name, found in model.model_fields.items():
        inner = section_in(found.annotation)
        if inner is not None:
            yield from all_keys(inner, (*section, name))


def write(tree: Mapping[str, Any]) -> str:
    """TOML of a tree without None: plain values first, then a table for each section."""
    plain = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_toml(value)}" for key, value in plain.items()]
    for key, value in tree.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(key)}]"]
            lines += [f"{_key(name)} = {_toml(inner)}" for name, inner in value.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _toml(key)


def _toml(value: Any) -> str:
    """One value; nested tables are written inline."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's, but TOML also wants DEL escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int():
            return str(value)
        case float():
            if math.isnan(value):
                return "nan"
            return repr(value) if math.isfinite(value) else ("inf" if value > 0 else "-inf")
        case datetime() | date() | time():
            return value.isoformat()
        case Mapping():
            inner = ", ".join(f"{_key(key)} = {_toml(held)}" for key, held in value.items())
            return f"{{{inner}}}"
        case list() | tuple():
            return f"[{', '.join(_toml(held) for held in value)}]"
    raise TypeError(f"{type(value).__name__} has no form in TOML")
