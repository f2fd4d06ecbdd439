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
            "rewards.functions": [
                {"function": "benchmarks.endtoend_tasks:slow_reward", "name": "reasoning_gym"}
            ]
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
            rewards = _rewards(place, run)
            found = reached_step(rewards, level=level)
            _say(run, rewards)
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


def _rewards(place: Path, run: str) -> dict[int, float]:
    """The mean reward of each step, as far as the run's aggregator knows it."""
    with suppress(OSError, ValueError, httpx.HTTPError):
        port = json.loads((place / "ports" / "aggregator-0.json").read_text())["http_port"]
        answer = httpx.get(
            f"http://127.0.0.1:{port}/api/v1/runs/{run}/metrics/reward",
            params={"axis": "step", "max_points": 10_000, "limit": 10_000, "reduce": "mean"},
            trust_env=False,
            timeout=5,
        )
        if answer.is_success:
            points = answer.json()["points"]
            return {int(p["x"]): p["value"] for p in points if p["value"] is not None}
    return {}


def _ready_at(log: Path) -> float:
    """When the generator was ready first, in seconds since 1970."""
    lines = log.read_text().splitlines()
    ready = next(line for line in lines if '"event": "ready"' in line)
    return datetime.fromisoformat(json.loads(ready)["timestamp"]).timestamp()


def _say(run: str, rewards: Mapping[int, float]) -> None:
    last = [rewards[step] for step in sorted(rewards)[-SMOOTHED_STEPS:]]
    reward = f", reward {sum(last) / len(last):.2f}" if last else ""
    print(f"\r{run}: step {max(rewards, default=0)}{reward}   ", end="", flush=True)
