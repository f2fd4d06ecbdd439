"""The demo from end to end: trained samples a second, and what asynchrony brings.

    python benchmarks/endtoend.py                      all of it, 5 runs each: about 65 minutes
    python benchmarks/endtoend.py --cases demo         five of the demo, five of TRL: 13 minutes
    python benchmarks/endtoend.py --cases long_tail --runs 1 --level 0.4

`demo` is the recipe recipes/arithmetic.toml as it is, 80 steps of 32 prompts x 16 generations = 512
samples, on all cores. `trained_samples_per_s` counts as TRL does: all samples of the groups that a
step takes, also those of groups without signal. In turns with it TRL's asynchronous GRPO trains the
same task, model and batch (peer.py says what had to be replaced on CPUs); `ratio_to_trl` is the
ratio of the medians.

The other cases run the demo asynchronously, as the recipe is, and synchronously (max_staleness = 0:
one step at a time) until the mean reward of 8 steps reaches `--level`; `speedup_by_case` is the
ratio of their seconds, by the medians of the runs.

Every run is kept as it ends, and the same command goes on where it was interrupted; --again
forgets them. Prints tables and writes benchmarks/results/endtoend.json.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import demo
import endtoend_runs as runs
import measured
import peer
from rich.console import Console
from rich.table import Table

TRL_INFLIGHT = 512
"""Requests that TRL has in flight: with a step's worth it is fastest here (peer.py)."""

KEPT_OF_DEMO = (
    *("all_samples_per_s", "step_s_median", "eval_before", "eval_after", "staleness_max"),
    *("time_budget", "cpu_s_per_step", "wall_s", "groups", "max_logprob_gap"),
)


def of_demo(kept: measured.Kept, *, num_runs: int, overrides: list[str]) -> dict[str, Any]:
    """Whole runs of the demo."""

    def one(seed: int) -> dict[str, Any]:
        print(f"demo: run {seed + 1} of {num_runs}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            summary = demo.run(seed, Path(folder), overrides)
        return {key: summary[key] for key in KEPT_OF_DEMO}

    def by_trl(seed: int) -> dict[str, Any]:
        print(f"the same by TRL: run {seed + 1} of {num_runs}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            return peer.run(seed, Path(folder), inflight=TRL_INFLIGHT, overrides=overrides)

    found, trl = [], []
    for seed in range(num_runs):
        found.append(kept.once(f"demo/{seed}", lambda seed=seed: one(seed)))
        trl.append(kept.once(f"trl/{seed}", lambda seed=seed: by_trl(seed)))
    rates = [each["all_samples_per_s"] for each in found]
    of_trl = [each["trained_samples_per_s"] for each in trl]
    return {
        "trained_samples_per_s": statistics.median(rates),
        "of_runs": measured.spread(rates),
        "ratio_to_trl": statistics.median(rates) / statistics.median(of_trl),
        "trl": {"version": peer.version(), "of_runs": measured.spread(of_trl), "runs": trl},
        "eval_before": [each["eval_before"] for each in found],
        "eval_after": [each["eval_after"] for each in found],
        "runs": found,
    }


def of_case(
    case: runs.Case, kept: measured.Kept, *, num_runs: int, level: float, overrides: list[str]
) -> dict[str, Any]:
    """Both modes of one case, in turns."""

    def one(mode: str, seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return runs.until_reached(
                case, mode, seed=seed, level=level, folder=Path(folder), overrides=overrides
            )

    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in runs.MODES}
    for seed in range(num_runs):
        for mode in runs.MODES:
            made = kept.once(
                f"{case.name}/{mode}/{seed}", lambda mode=mode, seed=seed: one(mode, seed)
            )
            found[mode].append(made)
    by_mode = {
        mode: {
            key: measured.spread([each[key] for each in of_mode])
            for key in ("seconds", "steps", "step_s")
        }
        for mode, of_mode in found.items()
    }
    slow, fast = (by_mode[mode]["seconds"]["median"] for mode in ("synchronous", "asynchronous"))
    return {"speedup": slow / fast, "target": case.target, **by_mode}


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console()
    if "demo" in result:
        trl = result["demo"]["trl"]
        table = Table(title=f"the demo, 512 samples a step, and TRL {trl['version']}'s")
        for column in ("run", "samples/s", "s/step", "accuracy", "dropped", "CPU s/step", "wall"):
            table.add_column(column, justify="right")
        for number, run in enumerate(result["demo"]["runs"], start=1):
            table.add_row(
                str(number),
                f"{run['all_samples_per_s']:.0f}",
                f"{run['step_s_median']:.2f}",
                f"{_accuracy(run['eval_before'])} → {_accuracy(run['eval_after'])}",
                str(sum(run["groups"]["dropped"].values())),
                f"{sum(run['cpu_s_per_step'].values()):.2f}",
                f"{run['wall_s']:.0f} s",
            )
        for number, run in enumerate(trl["runs"], start=1):
            table.add_row(
                f"TRL {number}",
                f"{run['trained_samples_per_s']:.0f}",
                f"{run['step_s_median']:.2f}",
                f"{_accuracy(run['eval_before'])} → {_accuracy(run['eval_after'])}",
            )
        console.print(table)
        spent = result["demo"]["runs"][0]["cpu_s_per_step"]
        parts = sorted(spent.items(), key=lambda item: -item[1])
        console.print("CPU s a step: " + ", ".join(f"{kind} {s:.2f}" for kind, s in parts))
        rate, ratio = result["demo"]["trained_samples_per_s"], result["demo"]["ratio_to_trl"]
        console.print(f"{rate:.0f} samples/s: {ratio:.2f} times TRL's")
    if result["cases"]:
        table = Table(title="seconds until the reward is reached, median (least - greatest)")
        for column in ("case", "ratio", "target", "asynchronous", "synchronous", "steps", "steps"):
            table.add_column(column, justify="right")
        for name, case in result["cases"].items():
            table.add_row(
                name,
                f"{case['speedup']:.2f}",
                f"{case['target']:.1f}" if case["target"] else "",
                *(measured.shown(case[mode]["seconds"], 1) for mode in runs.MODES),
                *(f"{case[mode]['steps']['median']:.0f}" for mode in runs.MODES),
            )
        console.print(table)


def _accuracy(value: float | None) -> str:
    """Three decimals: of 200 expressions each counts 0.005. A recipe may leave evaluation out."""
    return "none" if value is None else f"{value:.3f}"


def main() -> None:
    """Run, print, write."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["demo", *(case.name for case in runs.CASES)]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--level", type=float, default=0.55, help="mean reward to reach")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--again", action="store_true", help="forget runs of before")
    arguments = parser.parse_args()
    about = measured.about()
    settings = {"level": arguments.level, "overrides": arguments.overrides}
    kept = measured.Kept("endtoend", settings=settings, again=arguments.again)
    result: dict[str, Any] = {}
    if "demo" in arguments.cases:
        result["demo"] = of_demo(kept, num_runs=arguments.runs, overrides=arguments.overrides)
    result["cases"] = {
        case.name: of_case(
            case,
            kept,
            num_runs=arguments.runs,
            level=arguments.level,
            overrides=arguments.overrides,
        )
        for case in runs.CASES
        if case.name in arguments.cases
    }
    show(result)
    content = {
        "trained_samples_per_s": result.get("demo", {}).get("trained_samples_per_s"),
        "speedup_by_case": {name: case["speedup"] for name, case in result["cases"].items()},
        **result,
        **settings,
        "about": about,
    }
    print(f"written: {measured.write('endtoend', content)}")


if __name__ == "__main__":
    main()
