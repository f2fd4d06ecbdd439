"""The demo, three seeds: does it learn, how fast is a step, and which process the CPU time goes to.

    python benchmarks/demo.py [--seeds 0 1 2] [--set KEY=VALUE …]

Prints a table and writes benchmarks/results/demo.json: by seed `eval_before`, `eval_after`,
`step_s_median`, `samples_per_s` (with signal), `all_samples_per_s` (of all groups that steps took,
which is how TRL counts), `time_budget`, `groups`, `max_logprob_gap`, `cpu_share`, the share of each
process in the CPU time of the steps, and `cpu_s_per_step`. How fast TRL does the same here is what
peer.py and endtoend.py say.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from services.common import config

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "arithmetic.toml"
RESULT = Path(__file__).parent / "results" / "demo.json"

KINDS = ("generator", "scorer", "trainer", "aggregator")


def kind_of(process: psutil.Process) -> str | None:
    """Which part of the run a process is."""
    command = process.cmdline()
    text = " ".join(command)
    if "VLLM::Worker" in text or "VLLM::EngineCore" in text:
        return "vLLM worker" if "Worker" in text else "vLLM engine core"
    if "services.common.worker_process" in text:
        return "reward workers"
    if "valkey" in text:
        return "queue"
    return next((kind for kind in KINDS if f"services.{kind}" in command), None)


def cpu_seconds(root: psutil.Process) -> dict[str, float]:
    """CPU seconds so far, by part of the run."""
    seconds: dict[str, float] = defaultdict(float)
    seconds["launcher"] = sum(root.cpu_times()[:2])
    for process in root.children(recursive=True):
        try:
            kind = kind_of(process)
            if kind is not None:
                seconds[kind] += sum(process.cpu_times()[:2])
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return dict(seconds)


def published(log: Path) -> dict[int, float]:
    """When the weights behind each number of optimizer steps were published, in seconds since 1970,
    by the trainer's log; empty while there is none."""
    if not log.exists():
        return {}
    lines = log.read_text().splitlines()
    found = [json.loads(line) for line in lines if '"event": "published"' in line]
    return {line["step"]: datetime.fromisoformat(line["timestamp"]).timestamp() for line in found}


def all_samples_per_s(at_s: Mapping[int, float], *, samples_per_step: int) -> float:
    """Samples of all groups of the steps, those without signal included, over the time from the end
    of the first step to the end of the last.

    Example: steps of 512 samples, the first published at second 10, the 81st at second 90: 512.
    """
    first, last = min(step for step in at_s if step > 0), max(at_s)
    return (last - first) * samples_per_step / (at_s[last] - at_s[first])


def run(seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One run; its summary with the CPU shares of its steps."""
    sets = [f"data.seed={seed}", f"data.reasoning_gym.seed={seed}", f"trainer.seed={seed}"]
    sets += ["aggregator.http_port=0", f"folder={folder}", f"run=seed-{seed}", *overrides]
    command = [sys.executable, "-m", "services.launcher.cli", "run", str(RECIPE)]
    log = (folder / f"seed-{seed}.log").open("w")
    process = subprocess.Popen(
        command + [word for item in sets for word in ("--set", item)], stdout=log, cwd=ROOT
    )
    root = psutil.Process(process.pid)
    trainer_log = folder / f"seed-{seed}" / "logs" / "trainer-0.log"
    first: dict[str, float] | None = None
    first_step = last_step = 0
    last: dict[str, float] = {}
    while process.poll() is None:
        step = max(published(trainer_log), default=0)
        if step >= 4:  # the first steps fill the river
            seen = cpu_seconds(root)
            if first is None:
                first, first_step = seen, step
            if len(seen) >= len(last) and step > last_step:
                last, last_step = seen, step
        time.sleep(1)
    if process.returncode:
        sys.exit(f"the run of seed {seed} ended with {process.returncode}; see {log.name}")
    summary: dict[str, Any] = json.loads((folder / f"seed-{seed}" / "summary.json").read_text())
    recipe = config.load(folder / f"seed-{seed}" / "recipe.toml")
    samples_per_step = recipe.trainer.groups_per_step * recipe.generation.num_generations
    spent = {kind: last[kind] - (first or {}).get(kind, 0.0) for kind in last}
    total, steps = sum(spent.values()), max(1, last_step - first_step)
    return summary | {
        "all_samples_per_s": all_samples_per_s(
            published(trainer_log), samples_per_step=samples_per_step
        ),
        "cpu_share": {kind: s / total for kind, s in spent.items()},
        "cpu_s_per_step": {kind: s / steps for kind, s in spent.items()},
    }


def main() -> None:
    """Run all seeds, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            results[str(seed)] = run(seed, Path(folder), arguments.overrides)
    table = Table(title="the demo")
    for column in ("seed", "eval", "gain", "s/step", "samples/s", "dropped", "gap", "wall"):
        table.add_column(column, justify="right")
    for seed, r in results.items():
        table.add_row(
            seed,
            f"{r['eval_before']:.3f} → {r['eval_after']:.3f}",
            f"{r['eval_after'] - r['eval_before']:+.3f}",
            f"{r['step_s_median']:.2f}",
            f"{r['samples_per_s']:.0f}",
            str(sum(r["groups"]["dropped"].values())),
            f"{r['max_logprob_gap']:.1e} ({r['gap_tokens']:,} tokens)",
            f"{r['wall_s']:.0f} s",
        )
    console = Console()
    console.print(table)
    for seed, r in results.items():
        shares = sorted(r["cpu_share"].items(), key=lambda item: -item[1])
        console.print(f"seed {seed} CPU: " + ", ".join(f"{k} {s:.0%}" for k, s in shares))
        budget = sorted(r["time_budget"].items(), key=lambda item: -item[1])
        console.print(f"seed {seed} step: " + ", ".join(f"{k} {s:.2f}" for k, s in budget if s))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"seeds": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
