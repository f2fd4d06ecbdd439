"""The demo, three seeds: does it learn, how fast is a step, and which process the CPU time goes to.

    python benchmarks/demo.py [--seeds 0 1 2] [--set KEY=VALUE …]

Prints a table and writes benchmarks/results/demo.json: by seed `eval_before`, `eval_after`,
`step_s_median`, `samples_per_s`, `time_budget`, `groups`, `max_logprob_gap`, and `cpu_share`, the
share of each process in the CPU time of the steps. Beside it stand the figures that TRL 1.16.0's
asynchronous GRPO reached on such a machine (2 cores) on the same task, model and batch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "arithmetic.toml"
RESULT = Path(__file__).parent / "results" / "demo.json"

TRL = {"step_s": [1.7, 1.9], "samples_per_s": [270, 310]}
"""TRL 1.16.0, flash attention replaced by SDPA and weights sent by file, both cores."""

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


def published(log: Path) -> int:
    """The newest policy version in the trainer's log."""
    if not log.exists():
        return 0
    lines = [json.loads(line) for line in log.read_text().splitlines() if '"published"' in line]
    return max((line["version"] for line in lines), default=0)


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
    first: dict[str, float] | None = None
    last: dict[str, float] = {}
    while process.poll() is None:
        version = published(folder / f"seed-{seed}" / "logs" / "trainer-0.log")
        if version >= 5:  # the first steps fill the river
            seen = cpu_seconds(root)
            first = first or seen
            last = seen if len(seen) >= len(last) else last
        time.sleep(1)
    if process.returncode:
        sys.exit(f"the run of seed {seed} ended with {process.returncode}; see {log.name}")
    summary: dict[str, Any] = json.loads((folder / f"seed-{seed}" / "summary.json").read_text())
    spent = {kind: last[kind] - (first or {}).get(kind, 0.0) for kind in last}
    total = sum(spent.values())
    return summary | {"cpu_share": {kind: s / total for kind, s in spent.items()}}


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
    table = Table(title="the demo; TRL 1.16.0: 1.7-1.9 s a step, 270-310 samples/s")
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
    RESULT.write_text(json.dumps({"trl_1_16_0": TRL, "seeds": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
