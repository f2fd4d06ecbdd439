"""The demo from end to end: trained samples a second, and what asynchrony brings.

    python benchmarks/endtoend.py                      all of it, 5 runs each: about 90 minutes
    python benchmarks/endtoend.py --cases demo         five runs of the demo: 12 minutes
    python benchmarks/endtoend.py --cases long_tail --runs 1 --level 0.4

`demo` is the recipe recipes/arithmetic.toml as it is, 80 steps of 32 prompts x 16 generations = 512
samples, on all cores. `trained_samples_per_s` counts as TRL does: all samples of the groups that a
step takes, also those of groups without signal. Beside it stands what TRL 1.16.0's asynchronous
GRPO reached on such a machine on the same task, model and batch, its call of FlashAttention
replaced by SDPA, which runs on CPUs, and its weights sent by a file.

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
from rich.console import Console
from rich.table import Table

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

    found = [kept.once(f"demo/{seed}", lambda seed=seed: one(seed)) for seed in range(num_runs)]
    rates = [each["all_samples_per_s"] for each in found]
    return {
        "trained_samples_per_s": statistics.median(rates),
        "of_runs": measured.spread(rates),
        "ratio_to_trl": [statistics.median(rates) / rate for rate in demo.TRL["samples_per_s"]],
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
        table = Table(title="the demo, 512 samples a step; TRL 1.16.0: 270 - 310 samples/s")
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
        console.print(table)
        spent = result["demo"]["runs"][0]["cpu_s_per_step"]
        parts = sorted(spent.items(), key=lambda item: -item[1])
        console.print("CPU s a step: " + ", ".join(f"{kind} {s:.2f}" for kind, s in parts))
        low, high = sorted(result["demo"]["ratio_to_trl"])
        rate = result["demo"]["trained_samples_per_s"]
        console.print(f"{rate:.0f} samples/s: {low:.2f} to {high:.2f} times TRL's")
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
        "trl_1_16_0": demo.TRL,
        "about": about,
    }
    print(f"written: {measured.write('endtoend', content)}")


if __name__ == "__main__":
    main()
