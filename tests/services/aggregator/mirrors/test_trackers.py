"""Trackers of others, as far as we call them: stand-ins take the place of their packages."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from services.aggregator.mirrors.feeding import mirrors_of
from services.aggregator.mirrors.types import StepValues
from services.common import config
from services.common.errors import UserError

RECIPE = """
run = "demo"
[data]
file = "prompts.jsonl"
[trainer]
max_steps = 10
[mirrors]
"""

STEPS = [StepValues(step=step, at_s=0.0, values={"loss": step / 2}) for step in (3, 4)]


class Package(ModuleType):
    """What a tracker's package does when it is used, as a list of calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, ...]] = []

    def init(self, **given: Any) -> "Package":
        self.calls.append(("init", given))
        return self

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.calls.append(("log", values, step))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Package:
    found = Package(request.param)
    monkeypatch.setitem(sys.modules, request.param, found)
    return found


def recipe(folder: Path, mirrors: str) -> config.Recipe:
    path = folder / "recipe.toml"
    path.write_text(f'folder = "{folder}"\n{RECIPE}{mirrors}\n')
    return config.load(path, environ={})


@pytest.mark.parametrize("package", ["wandb"], indirect=True)
def test_wandb_gets_steps_in_a_run_of_each_line(package: Package, tmp_path: Path) -> None:
    (mirror,) = mirrors_of(recipe(tmp_path, 'wandb = "team/grpo"'))
    mirror.open(began=1, step=3)
    mirror.write(STEPS)
    mirror.open(began=2, step=4)  # back: the run before it is finished first
    mirror.close()
    mirror.close()
    (_, first), *others = package.calls
    assert (first["entity"], first["project"], first["id"], first["group"], first["resume"]) == (
        *("team", "grpo", "demo-1", "demo", "allow"),
    )
    assert first["config"]["run"] == "demo"
    assert first["config"]["data"]["file"] == "prompts.jsonl"
    assert others[:3] == [("log", {"loss": 1.5}, 3), ("log", {"loss": 2.0}, 4), ("finish",)]
    assert others[3][1]["id"] == "demo-2"
    assert others[4:] == [("finish",)]


@pytest.mark.parametrize("package", ["trackio"], indirect=True)
def test_trackio_gets_the_same(package: Package, tmp_path: Path) -> None:
    (mirror,) = mirrors_of(recipe(tmp_path, 'trackio = "grpo"'))
    mirror.open(began=1, step=3)
    mirror.write(STEPS)
    mirror.close()
    (_, first), *others = package.calls
    assert (first["project"], first["name"], first["group"], first["resume"]) == (
        *("grpo", "demo-1", "demo", "allow"),
    )
    assert others == [("log", {"loss": 1.5}, 3), ("log", {"loss": 2.0}, 4), ("finish",)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_package_that_is_missing_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what import then raises is what it raises
    with pytest.raises(UserError, match=f"mirrors.{name}: the package {name} is not installed"):
        mirrors_of(recipe(tmp_path, f'{name} = "grpo"'))


def test_none_is_asked_for_by_default(tmp_path: Path) -> None:
    assert mirrors_of(recipe(tmp_path, "")) == []
    (found,) = mirrors_of(recipe(tmp_path, "tensorboard = true"))
    assert found.name == "tensorboard"
