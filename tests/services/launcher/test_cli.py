import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import redis

from services.common import config
from services.launcher import ports

RECIPE = """
run = "demo"
[model]
path = "model"
[data]
reasoning_gym = {task = "chain_sum"}
[rewards]
functions = [{function = "my_rewards:score"}]
[trainer]
max_steps = 3
[aggregator]
http_port = 0
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory with a recipe, a model folder and a reward function that are in order."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "my_rewards.py").write_text("def score(texts):\n    return [1.0] * len(texts)\n")
    return tmp_path


def headrace(here: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "services.launcher.cli", *arguments],
        cwd=here,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Exit status 2 and one line that says all of this; no traceback."""
    assert done.returncode == 2, done
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]
    assert "Traceback" not in done.stdout + done.stderr


def assert_nothing_started(here: Path) -> None:
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.max_step=3", ("unknown key trainer.max_step", "did you mean trainer.max_steps")),
        ("model.path=nowhere", ("model.path: no such folder: nowhere",)),
        (
            'rewards.functions=[{function="my_rewards:scor"}]',
            ("rewards.functions[0].function", "did you mean score?"),
        ),
        (
            'rewards.functions=[{function="no_such_module:f"}]',
            ("rewards.functions[0].function", "there is no module no_such_module"),
        ),
    ],
)
def test_a_mistake_in_the_recipe_is_one_line(
    here: Path, override: str, parts: tuple[str, ...]
) -> None:
    assert_refused(headrace(here, "run", "recipe.toml", "--set", override), *parts)
    assert_nothing_started(here)


def test_check_finds_what_run_finds(here: Path) -> None:
    done = headrace(here, "check", "recipe.toml", "--set", "model.path=.")
    assert_refused(done, "model.path: . has no config.json")


def test_a_recipe_that_is_not_there(here: Path) -> None:
    assert_refused(headrace(here, "run", "other.toml"), "other.toml: no such recipe file")


def test_a_queue_server_that_is_away(here: Path) -> None:
    (port,) = ports.choose(1, host="127.0.0.1")
    url = f"redis://127.0.0.1:{port}/0"
    done = headrace(here, "run", "recipe.toml", "--set", f"queue.url={url}")
    assert_refused(done, f"queue.url: no queue server answers at {url} (")
    assert_nothing_started(here)


def test_a_port_that_is_taken(here: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = headrace(here, "run", "recipe.toml", "--set", f"aggregator.http_port={port}")
    assert_refused(done, f"aggregator.http_port: port {port} on 127.0.0.1 is taken", "0 for a free")
    assert_nothing_started(here)


def test_a_queue_server_that_holds_another_run_of_this_name(here: Path, valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.set("hr:{demo}:clock", "1")
    done = headrace(here, "run", "recipe.toml", "--set", f"queue.url={valkey_url}")
    assert_refused(done, "already holds a run named demo", "--fresh")
    assert_nothing_started(here)


def test_another_experiment_under_the_name_of_a_stopped_run(here: Path) -> None:
    folder = here / "runs" / "demo"
    folder.mkdir(parents=True)
    recipe = (here / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(recipe + "[optimizer]\nlearning_rate = 0.5\n")
    done = headrace(here, "run", "recipe.toml")
    difference = "optimizer.learning_rate: 0.5 before, 1e-06 now"
    assert_refused(done, f"run demo in runs/demo has another recipe ({difference});", "--fresh")


def test_a_complete_run_is_left_as_it_is(here: Path) -> None:
    folder = here / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"complete": true}')
    done = headrace(here, "run", "recipe.toml")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "run demo is complete: see runs/demo/summary.json; --fresh starts it over"
    ]
    assert [file.name for file in folder.iterdir()] == ["summary.json"]


def test_check_prints_a_recipe_that_reads_back_equal(here: Path) -> None:
    done = headrace(here, "check", "recipe.toml", "--set", "trainer.max_steps=7")
    assert done.returncode == 0, done.stderr
    printed = here / "printed.toml"
    printed.write_text(done.stdout)
    expected = config.load(here / "recipe.toml", overrides=["trainer.max_steps=7"], environ={})
    assert config.load(printed, environ={}) == expected


def test_check_shows_no_password(here: Path) -> None:
    done = headrace(here, "check", "recipe.toml", HEADRACE_QUEUE__URL="redis://:secret@host:1/0")
    assert done.returncode == 0, done.stderr
    assert "host:1/0" in done.stdout
    assert "secret" not in done.stdout + done.stderr


def test_a_service_runs_under_the_command_as_under_its_module(here: Path) -> None:
    done = headrace(here, "scorer", "other.toml", "--replica", "7")
    assert_refused(done, "other.toml: no such recipe file")
    assert "--announce" in headrace(here, "scorer", "--help").stdout


def test_help_names_the_commands_and_an_example(here: Path) -> None:
    shown = headrace(here, "--help").stdout
    for command in (
        "run",
        "check",
        "tiny-model",
        "export",
        "generator",
        "scorer",
        "trainer",
        "aggregator",
    ):
        assert f" {command} " in shown
    assert "headrace run recipes/arithmetic.toml" in headrace(here, "run", "--help").stdout
    assert headrace(here, "version").stdout == f"headrace {version('headrace')}\n"


def test_errors_are_red_on_a_terminal_unless_no_colour_is_wanted(here: Path) -> None:
    coloured = headrace(here, "run", "other.toml", FORCE_COLOR="1", TERM="xterm")
    assert "\x1b[31m" in coloured.stderr
    plain = headrace(here, "run", "other.toml", FORCE_COLOR="1", TERM="xterm", NO_COLOR="1")
    assert "\x1b[" not in plain.stderr


def test_the_command_starts_without_heavy_imports(here: Path) -> None:
    code = (
        "import sys, services.launcher.cli, services.launcher.run\n"
        "heavy = {'torch', 'vllm', 'transformers', 'datasets', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
