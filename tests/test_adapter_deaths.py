"""A run that trains an adapter loses its generator and then its trainer to SIGKILL: both are
started again, the frozen weights travel again to who has none, and the books balance."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launching import launched
from tests.test_adapter_run import SETTINGS, log_of

RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic.toml"

STEPS, GROUPS = 40, 8

DEATHS = {"trainer.max_steps": STEPS, "checkpoint.every_steps": 4, "queue.claim_after_s": 3}

LIMIT_S = 400
"""Patience with the whole run: vLLM starts twice, the trainer twice."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S * 2)]


def service_of(launcher: int, service: str) -> psutil.Process:
    """The one process of a service that the launcher has started."""
    [found] = [
        child
        for child in psutil.Process(launcher).children()
        if f"services.{service}" in child.cmdline()
    ]
    return found


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return log_of(run, name) if (run / "logs" / f"{name}.log").exists() else []


def published(run: Path) -> int:
    """The newest version in the trainer's log."""
    lines = [line for line in events(run, "trainer-0") if line["event"] == "published"]
    return max((int(line["version"]) for line in lines), default=0)


def wait_for(version: int, run: Path, process: "subprocess.Popen[str]") -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while published(run) < version:
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline_s, f"version {version} was not published in time"
        time.sleep(0.05)


def test_an_adapters_run_survives_the_death_of_its_generator_and_its_trainer(
    tmp_path: Path,
) -> None:
    run = tmp_path / "lora"
    settings = SETTINGS | DEATHS
    with launched(RECIPE, folder=tmp_path, run="lora", settings=settings) as process:
        wait_for(4, run, process)
        service_of(process.pid, "generator").kill()
        # Groups of as many steps as are outstanding can still be trained; further it comes only
        # with the generator that was started again.
        wait_for(16, run, process)
        service_of(process.pid, "trainer").kill()
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output

    summary = json.loads((run / "summary.json").read_text())
    groups = summary["groups"]
    assert summary["steps"] == STEPS
    assert (summary["restarts"]["generator-0"], summary["restarts"]["trainer-0"]) == (1, 1)
    assert groups["trained"] == STEPS * GROUPS
    assert groups["trained_twice"] == groups["in_flight"] == 0
    settled = groups["trained"] + groups["rolled_back"] + groups["given_up"]
    assert groups["dispatched"] == settled + sum(groups["dropped"].values())
    # Also behind the restored adapter: tokens are labelled with what made them.
    assert summary["max_logprob_gap"] <= 1e-3
    assert summary["gap_tokens"] > 0

    lines = events(run, "generator-0")
    assert [line["event"] for line in lines].count("load path proven") == 2
    assert [line.get("phase") for line in lines].count("fetching the frozen weights") == 2
    resumed = [line for line in events(run, "trainer-0") if line["event"] == "resumed"]
    assert [line["attempt"] for line in resumed] == [2]
    assert 0 < resumed[0]["step"] < STEPS
