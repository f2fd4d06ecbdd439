"""The command line of a service, in real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import typer
from services.common import lifecycle
from services.common.command import service_command

async def main(invocation, state):
    lifecycle.announce(
        invocation.announce,
        producer=state.producer,
        run=invocation.recipe.run,
        max_steps=invocation.recipe.trainer.max_steps,
    )

typer.run(service_command("scorer", main, "Score groups."))
"""

RECIPE = """
run = "demo"
[data.reasoning_gym]
task = "chain_sum"
[trainer]
max_steps = 80
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_service_gets_its_recipe_its_name_and_where_to_announce(
    recipe_file: Path, tmp_path: Path
) -> None:
    place = tmp_path / "announced.json"
    overrides = ["--set", "trainer.max_steps=9", "--set", "run=other"]
    ended = command(recipe_file, *overrides, "--replica", "3", "--announce", place)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert json.loads(place.read_text()) == {
        "producer": "scorer-3",
        "run": "other",
        "max_steps": 9,
    }


def test_a_bad_recipe_is_a_line_a_mistake_and_status_2(recipe_file: Path) -> None:
    ended = command(recipe_file, "--set", "trainer.max_stepz=9", "--set", "run=No")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        "error: --set trainer.max_stepz: unknown key trainer.max_stepz; "
        "did you mean trainer.max_steps?\n"
    )


def test_a_missing_recipe_is_one_line_and_status_2(tmp_path: Path) -> None:
    ended = command(tmp_path / "missing.toml")
    assert ended.returncode == 2
    assert ended.stderr == f"error: {tmp_path}/missing.toml: no such recipe file\n"


def test_help_says_what_the_service_does() -> None:
    ended = command("--help")
    assert ended.returncode == 0
    assert "Score groups." in ended.stdout
    assert "--announce" in ended.stdout


def test_what_a_service_has_when_it_is_ready_is_spared_the_garbage_collector(
    recipe_file: Path,
) -> None:
    program = PROGRAM.replace(
        "    lifecycle.announce(",
        """    import gc
    counts = [gc.get_freeze_count()]
    for ready in (True, False, True):
        await state.set_ready(ready)
        counts.append(gc.get_freeze_count())
    print(*counts)
    lifecycle.announce(""",
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(recipe_file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    before, *after = map(int, ended.stdout.split())
    assert before == 0
    assert after[0] > 10_000
    assert after == [after[0]] * 3
