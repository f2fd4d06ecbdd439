"""Whole runs: the real launcher, aggregator and queue server around services without an engine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis

from tests.services.launcher.processes import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

RECIPE = """
run = "demo"
[model]
path = "model"
[data]
reasoning_gym = {task = "chain_sum"}
[trainer]
max_steps = 10
[aggregator]
http_port = 0
[recorder]
flush_s = 0.1
"""

LAUNCH = Path(__file__).with_name("launch.py")
PROJECT = Path(__file__).parents[3]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


@contextmanager
def launched(
    here: Path, *arguments: str, trainer: str = "train"
) -> Iterator[subprocess.Popen[str]]:
    """The launcher in a process of its own; at the end it is gone with all that it started."""
    process = subprocess.Popen(
        [sys.executable, str(LAUNCH), "recipe.toml", *arguments],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "FAKE_TRAINER": trainer},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
    wait_until(lambda: not running_in(here))


def running_in(folder: Path) -> list[psutil.Process]:
    """Processes that work in a folder or below it."""
    found = []
    for process in psutil.process_iter(["cwd", "status"]):
        cwd = process.info["cwd"]
        if cwd and process.info["status"] != psutil.STATUS_ZOMBIE:
            place = Path(cwd)
            if place == folder or folder in place.parents:
                found.append(process)
    return found


def all_up(here: Path) -> bool:
    """Whether every service has announced its ports, so that it listens to signals."""
    ports = here / "runs" / "demo" / "ports"
    names = ("aggregator-0", "scorer-0", "trainer-0", "generator-0")
    return all((ports / f"{name}.json").exists() for name in names)


def test_a_run_ends_with_a_summary_and_nothing_left(here: Path) -> None:
    with launched(here) as process:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert not running_in(here)
    lines = output.splitlines()
    assert any(line.startswith("scorer-0  ") for line in lines)
    assert any(line.startswith("step 10/10  reward ") for line in lines)
    assert "run demo: complete" in output
    assert "runs/demo/summary.json" in output
    summary = json.loads((here / "runs" / "demo" / "summary.json").read_text())
    expected = {
        "complete": True,
        "steps": 10,
        "reward_first": 0.1,
        "reward_last": 1.0,
        "eval_before": 0.5,
        "eval_after": 0.75,
        # Sent when the generator was told to stop: the summary waits for the last metrics.
        "generated_tokens": 100,
        "max_logprob_gap": 1e-6,
        "gap_tokens": 1000,
        "versions_published": 11,
        "staleness_max": 1,
    }
    assert expected.items() <= summary.items()
    assert summary["groups"]["dropped"] == {"run_ended": 2}
    assert summary["wall_s"] > 0
    assert (here / "runs" / "demo" / "recipe.toml").stat().st_mode & 0o077 == 0

    with launched(here) as again:
        output, _ = again.communicate(timeout=60)
        assert again.returncode == 0
        assert "run demo is complete" in output


def test_fresh_starts_over_and_clears_the_users_servers(here: Path, valkey_url: str) -> None:
    (here / "runs" / "demo").mkdir(parents=True)
    with redis.Redis.from_url(valkey_url) as client:
        client.set("hr:{demo}:clock", "an earlier run")
        external = [f"queue.url={valkey_url}", "aggregator.database=sqlite:///metrics.sqlite"]
        overrides = [word for override in external for word in ("--set", override)]
        with launched(here, "--fresh", *overrides) as process:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
        assert client.keys("hr:{demo}:*") == []
    assert (here / "runs" / "demo.1").is_dir()
    assert not (here / "runs" / "demo" / "queue").exists()


def test_a_signal_drains_and_leaves_no_process(here: Path) -> None:
    with launched(here, trainer="forever") as process:
        wait_until(lambda: all_up(here))
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, errors
        assert not running_in(here)
        assert "stopping; once more kills everything at once" in output
    assert errors == ""
    assert not (here / "runs" / "demo" / "summary.json").exists()


def test_nothing_outlives_a_killed_launcher(here: Path) -> None:
    with launched(here, trainer="forever") as process:
        wait_until(lambda: all_up(here))
        assert len(running_in(here)) >= 6
        process.kill()
        process.communicate()
        wait_until(lambda: not running_in(here))


def test_a_mistake_that_a_service_finds_ends_the_run_in_its_words(here: Path) -> None:
    with launched(here, trainer="mistake") as process:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2
        assert not running_in(here)
    assert errors == "error: data.file: there is no file rows.jsonl\n"


def test_a_trainer_that_keeps_failing_ends_the_run_with_one_line(here: Path) -> None:
    with launched(here, trainer="fail") as process:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 1
        assert not running_in(here)
    [line] = errors.splitlines()
    assert line.startswith("error: trainer-0 died 6 times within ")
    assert line.endswith(
        "failed: RuntimeError: the loss is not finite; log: runs/demo/logs/trainer-0.log"
    )


def test_a_run_goes_on_after_a_signal_and_after_a_kill(here: Path) -> None:
    """The trainer fails once in the end; the summary counts all launches together."""
    folder = here / "runs" / "demo"
    with launched(here, trainer="forever") as process:
        wait_until(lambda: all_up(here))
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    first_s = json.loads((folder / "launches.json").read_text())["wall_s"]
    assert first_s > 0
    with launched(here, trainer="forever") as process:
        wait_until(lambda: all_up(here))
        process.kill()
        process.communicate()
        wait_until(lambda: not running_in(here))
    (folder / "ports" / "trainer-0.json").unlink(missing_ok=True)
    with launched(here, trainer="fail once") as process:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert "run demo goes on" in output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["complete"] is True
    assert summary["restarts"]["trainer-0"] == 1
    assert summary["wall_s"] > first_s + 1
    # A longer run than this one is not complete.
    with launched(here, "--set", "trainer.max_steps=12") as process:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert "step 12/12  " in output
    assert json.loads((folder / "summary.json").read_text())["steps"] == 12
    assert not (here / "runs" / "demo.1").exists()
