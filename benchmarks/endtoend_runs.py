"""Runs of benchmarks/endtoend.py: the demo until its reward has reached a level, and how long that
took from when training could begin.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import demo
import httpx
from levels import SMOOTHED_STEPS, reached_step

STOP_WITHIN_S = 60.0


@dataclass(frozen=True)
class Case:
    """One way to make the demo harder to overlap."""

    name: str
    title: str
    settings: Mapping[str, Any]
    target: float
    """Speed-up that asynchrony is meant to bring; 0 for none."""


CASES = (
    Case("plain", "the demo as it is", {}, target=0.0),
    Case(
        "slow_reward",
        "each group's reward takes 0.2 s",
        {
            # With the 8 groups at a time that are the default, rewards take 0.8 s of each step, and
            # the verdict of either run says so: its scorer is the limit, whatever overlaps.
            "scorer.max_groups": 16,
            "rewards.functions": [
                {"function": "benchmarks.endtoend_tasks:slow_reward", "name": "reasoning_gym"}
            ],
        },
        target=1.3,
    ),
    Case(
        "long_tail",
        "conversations take lognormal times",
        {"environments.classes": [{"environment": "benchmarks.endtoend_tasks:LongTailed"}]},
        target=1.3,
    ),
)

MODES: dict[str, dict[str, Any]] = {
    "asynchronous": {},
    "synchronous": {"trainer.max_staleness": 0, "trainer.weight_sync_steps": 1},
}
"""Synchronous: a step's prompts are dispatched when the step before is applied, and all its answers
are of the newest weights."""


def until_reached(
    case: Case, mode: str, *, seed: int, level: float, folder: Path, overrides: Sequence[str]
) -> dict[str, Any]:
    """One run: seconds and steps until the reward is at `level`, and the median step."""
    run = f"{case.name}-{mode}-{seed}".replace("_", "-")
    settings = dict(case.settings) | MODES[mode]
    settings |= {"data.seed": seed, "data.reasoning_gym.seed": seed, "trainer.seed": seed}
    settings |= {"aggregator.http_port": 0, "folder": str(folder), "run": run}
    settings |= {"evaluation.enabled": False, "evaluation.every_expression": False}
    settings |= {"trainer.max_steps": 400, "recorder.flush_s": 0.5}
    sets = [f"{key}={_toml(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "services.launcher.cli", "run", str(demo.RECIPE)]
    words = [word for item in (*sets, *overrides) for word in ("--set", item)]
    place, found = folder / run, None
    means: dict[int, float] = {}
    log = folder / f"{run}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command + words, stdout=output, stderr=output, cwd=demo.ROOT)
    try:
        while found is None:
            if process.poll() is not None:
                sys.exit(
                    f"{run}: ended with {process.returncode} before a reward of {level}:\n"
                    + log.read_text()[-2000:]
                )
            time.sleep(0.5)
            _add_means(means, place, run)
            found = reached_step(means, level=level)
            _say(run, means)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_WITHIN_S)
    print(flush=True)
    at_s = demo.published(place / "logs" / "trainer-0.log")
    begin_s = max(at_s[0], _ready_at(place / "logs" / "generator-0.log"))
    steps = sorted(step for step in at_s if 1 <= step <= found)
    return {
        "seconds": at_s[steps[-1]] - begin_s,
        "steps": found,
        "step_s": (at_s[steps[-1]] - at_s[steps[0]]) / (steps[-1] - steps[0]),
    }


def _toml(value: Any) -> str:
    """A value as the command line's --set reads it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _add_means(means: dict[int, float], place: Path, run: str) -> None:
    """Of each step that is over, the mean reward of the SMOOTHED_STEPS that it ends, as the run's
    aggregator pools them."""
    with suppress(OSError, ValueError, httpx.HTTPError):
        port = json.loads((place / "ports" / "aggregator-0.json").read_text())["http_port"]
        url = f"http://127.0.0.1:{port}/api/v1/runs/{run}/metrics/reward"
        with httpx.Client(trust_env=False, timeout=5) as client:

            def points(**where: int) -> list[dict[str, Any]]:
                query = {"axis": "step", "reduce": "mean", **where}
                answer = client.get(url, params=query)
                if answer.status_code == httpx.codes.NOT_FOUND:  # nothing has been scored yet
                    return []
                if answer.is_client_error:
                    sys.exit(f"{answer.url}: {answer.text}")
                found = answer.raise_for_status().json()["points"]
                return [point for point in found if point["value"] is not None]

            known = max(means, default=0)
            seen = [point["x"] for point in points(since=known + 1, max_points=10_000)]
            for step in sorted(seen)[:-1]:  # the last may be going on
                window = {"since": max(1, step - SMOOTHED_STEPS + 1), "until": step + 1}
                (pooled,) = points(**window, max_points=1)
                means[step] = pooled["value"]


def _ready_at(log: Path) -> float:
    """When the generator was ready first, in seconds since 1970."""
    lines = log.read_text().splitlines()
    ready = next(line for line in lines if '"event": "ready"' in line)
    return datetime.fromisoformat(json.loads(ready)["timestamp"]).timestamp()


def _say(run: str, means: Mapping[int, float]) -> None:
    step = max(means, default=0)
    reward = f", reward {means[step]:.2f}" if means else ""
    print(f"\r{run}: step {step}{reward}   ", end="", flush=True)
