"""Write the documents that come from code: `python docs/generate.py [--check]`.

recipe.md comes from the models of the recipe, logged-metrics.md from the catalogue of metrics. With
`--check` nothing is written: the exit status is 1 when a file is not what the code says.
"""

import difflib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from services.aggregator import documentation
from services.common import config

FOLDER = Path(__file__).parent

METRICS_ORIGIN = """<!-- Written by docs/generate.py from services/aggregator: declared/*.py, and
reading.md for the text; `make docs` writes it anew. -->"""

HEAD = """# The recipe

<!-- Written by docs/generate.py from services/common/config.py; `make docs` writes it anew. -->

One TOML file describes a whole run, and every service reads the same one. A key that is not listed
here is an error that names the nearest one that is. Later wins: the defaults below, the file, the
environment, the command line.

| where | how |
|---|---|
| the file | `max_steps = 80` under `[trainer]` |
| the environment | `HEADRACE_TRAINER__MAX_STEPS=80` |
| the command line | `--set trainer.max_steps=80`, as often as needed |

`headrace check RECIPE` validates a recipe and prints it with every default filled in.
"""

COMPARISONS: dict[type, str] = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}


def type_name(annotation: Any) -> str:
    """A type as a reader of TOML names it: `integer`, `text`, `"a" or "b"`, `list of tables`.

    Example: `type_name(int | None)` is `integer`; its default tells that it may be left out.
    """
    plain = {str: "text", int: "integer", float: "number", bool: "true or false"}
    if annotation in plain:
        return plain[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    arguments = [a for a in get_args(annotation) if a is not type(None)]
    origin = getattr(annotation, "__origin__", None)
    if hasattr(annotation, "__metadata__"):
        return type_name(origin)
    if origin is dict:
        return "table"
    if origin in (tuple, list):
        inner = type_name(arguments[0])
        if Ellipsis in arguments:
            return f"list of {inner}s"
        return f"list of {len(arguments)} {inner}s"
    if all(isinstance(argument, str | int | float) for argument in arguments):
        # Literal[1.0, 1] is one choice to a reader.
        written = {f'"{a}"' if isinstance(a, str) else f"{float(a):g}": None for a in arguments}
        return " or ".join(written)
    return " or ".join(dict.fromkeys(type_name(argument) for argument in arguments))


def bounds(metadata: list[Any]) -> str:
    """The limits of a number: `>= 1, <= 65535`."""
    found = []
    for item in metadata:
        for kind, sign in COMPARISONS.items():
            if isinstance(item, kind):
                found.append(f"{sign} {getattr(item, kind.__name__.lower()):,}")
        found += [b for b in [bounds(getattr(item, "metadata", []))] if b]
    return ", ".join(found)


def limits(field: FieldInfo) -> str:
    """The limits of a field, also where it may be left out."""
    inner = [bounds(list(getattr(a, "__metadata__", ()))) for a in get_args(field.annotation)]
    return ", ".join(dict.fromkeys(found for found in [bounds(field.metadata), *inner] if found))


def default(field: FieldInfo) -> str:
    """A default as TOML, `needed` where there is none, a dash where a key is absent by default."""
    if field.is_required():
        return "needed"
    return "-" if field.default is None else f"`{toml(field.default)}`"


def toml(value: Any) -> str:
    """A value as TOML writes it.

    Example: `toml((0.9, 0.999))` is `[0.9, 0.999]`, `toml(True)` is `true`.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, int) and abs(value) >= 100_000:
        return f"{value:_}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in sorted(value.model_fields_set)}
    if isinstance(value, dict):
        inside = ", ".join(f"{key} = {toml(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return str(value)


def sections(name: str, model: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    """A section and the sections inside it, with the names of their tables."""
    found = [(name, model)]
    for key, field in model.model_fields.items():
        inner = nested(field.annotation)
        if inner is not None:
            found += sections(f"{name}.{key}".lstrip("."), inner)
    return found


def nested(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as `Section | None` or `tuple[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for a in get_args(annotation) if (found := nested(a)) is not None), None)


def origin(name: str) -> Any:
    """`tuple` for a section that is a list of tables, `dict` for one of tables by name."""
    model: type[BaseModel] = config.Recipe
    found = None
    for part in name.split("."):
        field = model.model_fields[part]
        found = getattr(field.annotation, "__origin__", None)
        model = nested(field.annotation) or model
    return found


def is_list(name: str) -> bool:
    """Whether `[[name]]` is written, not `[name]`."""
    return origin(name) is tuple


def brackets(name: str) -> str:
    """How a section begins in TOML: `[name]`, `[[name]]`, or `[name.KEY]`."""
    if name and is_list(name):
        return f"[[{name}]]"
    return f"[{name}.KEY]" if name and origin(name) is dict else f"[{name}]"


def text(cell: str) -> str:
    """A docstring as one line of a table."""
    return " ".join(cell.split()).replace("|", "\\|")


def recipe_page() -> str:
    """The whole of recipe.md."""
    lines = [HEAD]
    for name, model in sections("", config.Recipe):
        heading = f"## `{brackets(name)}`"
        lines += [heading if name else "## At the top", ""]
        lines += [text(inspect.getdoc(model) or ""), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, field in model.model_fields.items():
            inner = nested(field.annotation)
            if inner is not None and not is_list(f"{name}.{key}".lstrip(".")):
                continue
            kind = ", ".join(part for part in (type_name(field.annotation), limits(field)) if part)
            meaning = text(field.description or "")
            lines.append(f"| `{key}` | {kind} | {default(field)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def metrics_page() -> str:
    """The whole of logged-metrics.md; the aggregator shows the same at /docs/metrics."""
    title, rest = documentation.markdown().split("\n", 1)
    return f"{title}\n\n{METRICS_ORIGIN}\n{rest}"


PAGES: dict[str, Callable[[], str]] = {
    "recipe.md": recipe_page,
    "logged-metrics.md": metrics_page,
}


def is_current(name: str, wanted: str) -> bool:
    """Whether a document is what it should be; if not, the differences are printed."""
    path = FOLDER / name
    present = path.read_text() if path.exists() else ""
    if present == wanted:
        return True
    changes = difflib.unified_diff(present.splitlines(), wanted.splitlines(), "is", "should be")
    print("\n".join(changes))
    print(f"docs/{name} is not what the code says: run `make docs`")
    return False


def main() -> int:
    """Write the documents, or compare them; the exit status."""
    pages = {name: page() for name, page in PAGES.items()}
    if "--check" in sys.argv[1:]:
        current = [is_current(name, wanted) for name, wanted in pages.items()]
        return 0 if all(current) else 1
    for name, wanted in pages.items():
        (FOLDER / name).write_text(wanted)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
