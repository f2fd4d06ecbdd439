"""What recording metrics costs a run: its share of the CPU time of a step, and steps with and
without it.

    python benchmarks/overhead.py                     5 rounds of two runs: 10 minutes
    python benchmarks/overhead.py --rounds 1 --steps 20

The run is the demo, on all cores, which are busy throughout: CPU time is step time. On is the run
as users have it, traces and group events included. Off means that trainer, generator and scorer
compute and record nothing: every call that records returns at once, and nothing is sent; there is
no such setting in the recipe, since summary, verdict and ledger would be empty.

`overhead_frac` is what is measured within the runs that are on: CPU seconds in calls that record
and in the threads that send, over all CPU seconds of the run but the aggregator's, between whose
parts the machine is divided as the user likes; without what timing the calls costs, measured where
they are made (overhead_service.py). `step_ratio` is the cross-check, which chance dominates:
seconds of a step with metrics over those without, rounds in turns. What a call costs is measured by
recorder.py, whose table is printed too.

Prints tables and writes benchmarks/results/overhead.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import demo
import measured
import psutil
import recorder
from rich.console import Console
from rich.table import Table

FIRST_STEP = 5
"""The steps before it fill the river."""

SERVICES = ("trainer", "generator", "scorer")


def launch(mode: str, folder: Path, overrides: list[str]) -> int:
    """A run whose services are started by overhead_service.py; its status."""
    from services.launcher import run

    script = str(Path(__file__).with_name("overhead_service.py"))

    def argv_of(service: str) -> list[str]:
        if service not in SERVICES:
            return [sys.executable, "-m", f"services.{service}"]
        return [sys.executable, script, mode, str(folder), f"services.{service}"]

    console = Console(file=(folder / "launcher.log").open("w"))
    return run.run(demo.RECIPE, overrides=overrides, console=console, argv_of=argv_of)


def play(mode: str, *, steps: int, overrides: list[str]) -> dict[str, Any]:
    """One run: seconds and CPU seconds a step, and with metrics what these took of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sets = [f"folder={folder}", f"run={mode}", "aggregator.http_port=0"]
        sets += ["evaluation.enabled=false", "evaluation.every_expression=false"]
        sets += [f"trainer.max_steps={steps}", *overrides]
        command = [sys.executable, __file__, "--launch", mode, str(folder)]
        words = [word for item in sets for word in ("--set", item)]
        process = subprocess.Popen(command + words, cwd=demo.ROOT)
        root, log = psutil.Process(process.pid), folder / mode / "logs" / "trainer-0.log"
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        first_step = last_step = 0
        while process.poll() is None:
            step = max(demo.published(log), default=0)
            if step >= FIRST_STEP and step > last_step:
                seen = demo.cpu_seconds(root)
                if not first:
                    first, first_step = seen, step
                last, last_step = seen, step
            time.sleep(0.5)
        if process.returncode:
            sys.exit(f"a run has failed: {(folder / 'launcher.log').read_text()[-2000:]}")
        at_s = demo.published(log)
        spent = [json.loads(file.read_text()) for file in sorted(folder.glob("*-*.json"))]
        names = [file.name.rpartition("-")[0] for file in sorted(folder.glob("*-*.json"))]
    measured_steps = last_step - first_step
    seconds = [at_s[step] - at_s[step - 1] for step in at_s if step - 1 in at_s]
    return {
        "step_s": statistics.median(seconds[FIRST_STEP:]),
        "cpu_s_per_step": {k: (last[k] - first.get(k, 0.0)) / measured_steps for k in last},
        "recording_s_per_step": {
            service: (each["seconds"] + each["sender_s"]) / steps
            for service, each in zip(names, spent, strict=True)
        },
        "sender_s_per_step": {
            service: each["sender_s"] / steps for service, each in zip(names, spent, strict=True)
        },
        "calls_per_step": {
            service: each["calls"] / steps for service, each in zip(names, spent, strict=True)
        },
        "timing_s_per_call": {
            service: each["timing_s"] for service, each in zip(names, spent, strict=True)
        },
    }


def compare(*, rounds: int, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Runs with and without metrics in turns."""
    on, off = [], []
    for number in range(rounds):
        for mode, found in (("on", on), ("off", off)):
            found.append(play(mode, steps=steps, overrides=overrides))
            print(
                f"round {number + 1} of {rounds}, metrics {mode}: {found[-1]['step_s']:.3f} s a "
                f"step, {_cpu_s(found[-1]):.3f} CPU s",
                flush=True,
            )
    shares = [sum(run["recording_s_per_step"].values()) / _cpu_s(run) for run in on]
    return {
        "overhead_frac": statistics.median(shares),
        "of_rounds": measured.spread(shares),
        "by_service": {
            service: {
                "cpu_s_per_step": _median(on, "cpu_s_per_step", service),
                "recording_s_per_step": _median(on, "recording_s_per_step", service),
                "sender_s_per_step": _median(on, "sender_s_per_step", service),
                "calls_per_step": _median(on, "calls_per_step", service),
                "timing_s_per_call": _median(on, "timing_s_per_call", service),
            }
            for service in SERVICES
        },
        "aggregator_cpu_s_per_step": _median(on, "cpu_s_per_step", "aggregator"),
        "step_ratio": measured.spread(
            [a["step_s"] / b["step_s"] for a, b in zip(on, off, strict=True)]
        ),
        "cpu_ratio": measured.spread([_cpu_s(a) / _cpu_s(b) for a, b in zip(on, off, strict=True)]),
        "step_s_on": measured.spread([run["step_s"] for run in on]),
        "step_s_off": measured.spread([run["step_s"] for run in off]),
    }


def _cpu_s(run: dict[str, Any]) -> float:
    """CPU seconds of a step, without the aggregator's."""
    return sum(s for kind, s in run["cpu_s_per_step"].items() if kind != "aggregator")


def _median(runs: list[dict[str, Any]], key: str, service: str) -> float:
    return statistics.median(run[key][service] for run in runs)


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table(title="a step of the demo, with metrics")
    heads = ("service", "CPU s", "of it recording", "of it sending", "share", "calls")
    for column in (*heads, "timing a call"):
        table.add_column(column, justify="right")
    for service, row in result["by_service"].items():
        cpu_s, recording_s = row["cpu_s_per_step"], row["recording_s_per_step"]
        table.add_row(
            service,
            f"{cpu_s:.3f}",
            f"{recording_s * 1e3:.2f} ms",
            f"{row['sender_s_per_step'] * 1e3:.2f} ms",
            f"{recording_s / cpu_s:.2%}",
            f"{row['calls_per_step']:.0f}",
            f"{row['timing_s_per_call'] * 1e6:.1f} us",
        )
    Console().print(table)
    print(f"aggregator: {result['aggregator_cpu_s_per_step']:.3f} CPU s a step")
    print(f"a step, with over without: {measured.shown(result['step_ratio'], 3)}")
    print(f"its CPU time, without the aggregator's: {measured.shown(result['cpu_ratio'], 3)}")
    print(f"share of CPU time that recording takes: {result['overhead_frac']:.2%}")


def main() -> None:
    """Measure, print, write."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of a run")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--launch", nargs=2, metavar=("MODE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.launch:
        mode, folder = arguments.launch
        sys.exit(launch(mode, Path(folder), arguments.overrides))
    about = measured.about()
    calls = recorder.measure()
    for case, microseconds in calls.items():
        print(f"{case:32}{microseconds:6.2f} us")
    result = compare(rounds=arguments.rounds, steps=arguments.steps, overrides=arguments.overrides)
    show(result)
    content = result | {"microseconds_a_call": calls, "about": about}
    print(f"written: {measured.write('overhead', content)}")


if __name__ == "__main__":
    main()
