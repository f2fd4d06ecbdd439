"""What an image holds: the wheel is complete, and a service's lock file is enough for it."""

import ast
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT, SERVICES

ALSO = {"trainer": ["services.launcher.tiny_model"]}
"""Modules that an image runs beside its service: the model of the demo."""


COMMANDS = (
    "services.launcher.cli",
    "services.launcher.cli_asking",
    "services.launcher.cli_dead_letters",
)
"""Modules of commands: what a command needs it imports inside."""


def normalise(name: str) -> str:
    """The form in which package names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_modules(service: str) -> set[str]:
    """Top-level modules of the packages in the service's lock file, with the standard library."""
    lock = (ROOT / "requirements" / f"{service}.txt").read_text()
    locked = {normalise(name) for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)}
    found = set(sys.stdlib_module_names)
    for package in distributions(path=[sysconfig.get_path("purelib")]):
        if normalise(package.name) in locked:
            found |= {Path(file.parts[0]).stem.split(".")[0] for file in package.files or ()}
    return found


def imports(file: Path, *, lazy: bool) -> Iterator[str]:
    """Modules that a file imports; with `lazy` also those that its functions import."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(module: str) -> Path | None:
    """The source of one of our modules."""
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.exists()), None)


@pytest.mark.parametrize("service", SERVICES)
def test_the_lock_file_is_enough(service: str) -> None:
    available = locked_modules(service)
    # The command's other commands are not run in the image, so what they import does not matter.
    todo = ["services.launcher.cli", f"services.{service}.__main__", *ALSO.get(service, [])]
    seen: set[str] = set()
    while todo:
        module = todo.pop()
        file = file_of(module)
        if module in seen or file is None:
            continue
        seen.add(module)
        for name in imports(file, lazy=module not in COMMANDS):
            top = name.split(".")[0]
            if top == "services":
                todo.append(name)
            else:
                assert top in available | {"headrace"}, f"{module} imports {name}"
    assert f"services.{service}.service" in seen


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    # Built from a copy, since setuptools leaves folders beside its sources.
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "services", "protos/python"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.split()
    for name in [*tracked, "pyproject.toml", "README.md", "LICENSE"]:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    options = ["--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", *options, "."],
        check=True,
        cwd=source,
    )
    (wheel,) = tmp_path.glob("headrace-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert {name.removeprefix("protos/python/") for name in tracked} <= held
