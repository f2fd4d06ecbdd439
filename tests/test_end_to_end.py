"""A whole run through the command line: real queue server, vLLM, gRPC, torch, aggregator.

Two generator replicas; in mid-run one of them and the scorer are killed with SIGKILL. What they
held is taken over, they are started again, the late generator begins with the current version, and
the books balance.
"""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.aggregator.catalogue import CATALOGUE
from tests.emitted import disagreements, emitted
from tests.launching import launched, metrics_of

RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic.toml"

STEPS = 130

SETTINGS = {
    "trainer.max_steps": STEPS,
    "trainer.groups_per_step": 8,
    "generation.num_generations": 4,
    "generator.replicas": 2,
    "generator.max_inflight": 64,
    "queue.claim_after_s": 3,
    "recorder.flush_s": 0.5,
    "aggregator.http_port": 0,
}
"""Small steps."""

REWARDS = """
import asyncio

async def slow(texts, answer):
    await asyncio.sleep(0.75)
    return [float(text == right) for text, right in zip(texts, answer)]
"""
"""Holds a step up to three quarters of a second: a killed generator is back before the last."""

LIMIT_S = 280
"""Patience with the whole run, two starts of vLLM included."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S * 2)]


def children_of(process: psutil.Process, service: str, replica: int) -> list[psutil.Process]:
    """The processes of one replica: its service and what that has started."""
    found = []
    for child in process.children(recursive=True):
        try:
            command = child.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if f"services.{service}" in command and str(replica) in command:
            found.append(child)
    return found


def log_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The JSON lines of a log."""
    path = folder / "e2e" / "logs" / f"{name}.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{")]


def wait_for_version(folder: Path, version: int, process: subprocess.Popen[str]) -> None:
    """Return when the trainer has published `version`."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        published = [line["version"] for line in log_of(folder, "trainer-0") if "version" in line]
        if published and max(published) >= version:
            return
        assert process.poll() is None, "the run ended too early"
        time.sleep(0.1)
    raise AssertionError(f"version {version} was not published in time")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run is, once it has survived the deaths and ended."""
    folder = tmp_path_factory.mktemp("e2e")
    (folder / "slow_reward.py").write_text(REWARDS)
    with launched(
        RECIPE,
        folder=folder,
        run="e2e",
        settings=SETTINGS,
        more=['rewards.functions=[{function = "slow_reward:slow"}]'],
        cwd=folder,
    ) as process:
        launcher = psutil.Process(process.pid)
        wait_for_version(folder, 4, process)
        [generator] = children_of(launcher, "generator", 1)
        workers = generator.children(recursive=True)
        generator.kill()
        [scorer] = children_of(launcher, "scorer", 0)
        scorer.kill()
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive, "vLLM's processes outlived their generator"
    assert re.search(r"run e2e: complete", output)
    return folder


def test_a_run_survives_the_death_of_a_generator_and_a_scorer(folder: Path) -> None:
    summary = json.loads((folder / "e2e" / "summary.json").read_text())
    groups = summary["groups"]
    assert summary["steps"] == STEPS
    assert groups["trained"] == STEPS * 8
    assert groups["trained_twice"] == groups["in_flight"] == groups["rolled_back"] == 0
    settled = groups["trained"] + sum(groups["dropped"].values()) + groups["given_up"]
    assert groups["dispatched"] == settled
    assert summary["versions_published"] <= STEPS + 1
    assert summary["max_logprob_gap"] <= 1e-3
    assert summary["gap_tokens"] > 0
    assert summary["staleness_max"] <= 2
    assert summary["eval_before"] is not None
    assert summary["eval_after"] is not None
    assert summary["restarts"]["generator-1"] == 1
    assert summary["restarts"]["scorer-0"] == 1
    assert summary["generated_tokens"] >= summary["trained_tokens"]

    # The generator that was started late began with the version that was current then.
    fetched = [
        int(line["phase"].rsplit(" ", 1)[1])
        for line in log_of(folder, "generator-1")
        if line["event"] == "phase" and line["phase"].startswith("fetching policy version")
    ]
    # One start fetches one version, whatever is published before the values of its proof come.
    first, *late = fetched
    assert first == 1
    assert len(late) == 1
    assert late[0] > 4


def test_both_replicas_produced(folder: Path) -> None:
    with metrics_of(folder, "e2e") as client:
        answer = client.get(
            "/api/v1/runs/e2e/metrics/rollout/generated_tok_s",
            params={"reduce": "sum", "group_by": "producer", "max_points": 1},
        )
    by_producer = answer.json()["by_producer"]
    totals = {name: points[0]["value"] for name, points in by_producer.items()}
    assert set(totals) == {"generator-0", "generator-1"}
    assert all(total > 0 for total in totals.values())


def test_what_it_has_measured_is_what_is_declared(folder: Path) -> None:
    """A key that nobody emits, that is not declared, or that another service sends, fails here."""
    with metrics_of(folder, "e2e") as client:
        found = list(disagreements(CATALOGUE, emitted(client, "e2e")))
    assert not found, "\n".join(found)
