"""20,000 groups of the demo, small, with restarts: does memory stay flat, do streams stay short,
does the ledger balance?

    python benchmarks/soak.py                          20,000 groups, which take about an hour
    python benchmarks/soak.py --minutes 5 --restart-every-s 40      does it work at all?

One after the other generator, scorer, aggregator and trainer are ended, by SIGTERM and SIGKILL in
turns (the trainer by SIGKILL alone: under the launcher its orderly end is the end of the run), and
the launcher starts them again. At the end of the time the launcher itself is stopped by SIGTERM and
started once more with few steps left, so that the run comes to its end and every group is
accounted for.

Memory (PSS, children included) is read every 10 seconds and flat where the slope over the lives of
a service's processes, ten minutes after their start, comes to less than --most-growth of its
median in two hours, or where the slope's 95 % interval reaches to 0. Prints a table and writes
benchmarks/results/soak.json. The exit status is 1 when something did not hold.
"""

import argparse
import itertools
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import demo
import growth
import measured
import psutil
import soak_watch
from rich.console import Console
from rich.table import Table

RUN = "soak"

SETTINGS = (
    *("trainer.groups_per_step=8", "generation.num_generations=4", "generator.max_inflight=64"),
    *("evaluation.enabled=false", "evaluation.every_expression=false"),
    *("optimizer.learning_rate=1e-5", "checkpoint.every_steps=100", "aggregator.http_port=0"),
    'rewards.functions=[{function = "benchmarks.soak_tasks:paced_reward", name = "reasoning_gym"}]',
)
"""Small groups, about six a second (soak_tasks.py), so that other work can go on beside it."""

GROUPS_PER_STEP = 8

ENDS = (
    ("generator", signal.SIGTERM),
    ("scorer", signal.SIGKILL),
    ("aggregator", signal.SIGTERM),
    ("trainer", signal.SIGKILL),
    ("generator", signal.SIGKILL),
    ("scorer", signal.SIGTERM),
    ("aggregator", signal.SIGKILL),
)

LOOK_EVERY_S = 10.0

SAY_EVERY_S = 60.0

LAST_STEPS = 5
"""After the time is over, so that the run has an end."""

LAST_WITHIN_S = 600.0

HOURS = 2.0
"""For which growth is told."""


class Launched:
    """`headrace run` on the soak's folder."""

    def __init__(self, folder: Path, overrides: list[str], *, max_steps: int) -> None:
        sets = [*SETTINGS, *overrides, f"folder={folder}", f"run={RUN}"]
        sets.append(f"trainer.max_steps={max_steps}")
        command = [sys.executable, "-m", "services.launcher.cli", "run", str(demo.RECIPE)]
        words = [word for item in sets for word in ("--set", item)]
        with (folder / "launcher.log").open("a") as log:
            self.process = subprocess.Popen(command + words, stdout=log, stderr=log, cwd=demo.ROOT)
        self.root = psutil.Process(self.process.pid)

    def stop(self) -> None:
        """End it, orderly where it can."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def end(place: Path, service: str, number: signal.Signals) -> bool:
    """End a service by a signal; False where it is just being started."""
    with suppress(OSError, ValueError, KeyError, psutil.NoSuchProcess):
        pid = json.loads((place / "ports" / f"{service}-0.json").read_text())["pid"]
        psutil.Process(pid).send_signal(number)
        return True
    return False


def soak(
    folder: Path,
    watch: soak_watch.Watch,
    *,
    minutes: float,
    groups: int,
    restart_every_s: float,
    overrides: list[str],
) -> list[str]:
    """The run until its time or its groups are over; what was ended."""
    place, ended = folder / RUN, []
    begin_s = said_s = time.monotonic()
    restart_s = begin_s + restart_every_s
    turns = itertools.cycle(ENDS)
    launched = Launched(folder, overrides, max_steps=math.ceil(groups / GROUPS_PER_STEP))
    try:
        while launched.process.poll() is None:
            now_s = time.monotonic()
            if now_s - begin_s >= minutes * 60:
                break
            watch.look(launched.root, place, RUN, at_s=now_s - begin_s)
            if now_s >= restart_s and watch.trained:
                service, number = next(turns)
                if end(place, service, number):
                    ended.append(f"{service} {number.name}")
                    restart_s = now_s + restart_every_s
            if now_s - said_s >= SAY_EVERY_S:
                said_s = now_s
                print(
                    f"{(now_s - begin_s) / 60:.0f} min: {watch.trained:,} groups trained, "
                    f"{len(ended)} restarts",
                    flush=True,
                )
            time.sleep(LOOK_EVERY_S)
    finally:
        launched.stop()
    if launched.process.returncode not in (0, 130):
        sys.exit(f"the run has failed:\n{(folder / 'launcher.log').read_text()[-3000:]}")
    return ended


def conclude(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Bring the run to its end, where it was stopped before; its summary."""
    summary = folder / RUN / "summary.json"
    if not summary.exists():
        log = folder / RUN / "logs" / "trainer-0.log"
        steps = max(demo.published(log), default=0) + LAST_STEPS
        launched = Launched(folder, overrides, max_steps=steps)
        try:
            if launched.process.wait(LAST_WITHIN_S):
                sys.exit(f"the run did not end:\n{(folder / 'launcher.log').read_text()[-3000:]}")
        finally:
            launched.stop()
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def judge(
    watch: soak_watch.Watch, summary: dict[str, Any], *, most_growth: float, bound: int
) -> dict[str, Any]:
    """What was found, and what of it did not hold."""
    memory, wrong = {}, []
    for kind, seen in sorted(watch.memory.items()):
        grown = seen.growth()
        if grown is None:
            memory[kind] = None
            continue
        slope, error, median = grown
        frac = slope * HOURS / median
        flat = frac < most_growth or slope - error <= 0
        memory[kind] = {
            "pss_mib": median,
            "mib_per_hour": slope,
            "interval_mib_per_hour": error,
            "growth_frac_in_2_hours": frac,
            "flat": flat,
        }
        if not flat:
            wrong.append(f"memory of {kind} grows by {slope:.1f} MiB an hour")
    streams = {}
    for name in (*soak_watch.STREAMS, "server_mib"):
        first, second, most = growth.of_halves(watch.streams, name)
        streams[name] = {"first_half": first, "second_half": second, "most": most}
    for name in soak_watch.STREAMS[:-1]:
        if streams[name]["most"] > bound:
            wrong.append(f"{name} had {streams[name]['most']:.0f} entries, pacing allows {bound}")
    if streams["dead"]["most"]:
        wrong.append(f"{streams['dead']['most']:.0f} dead letters")
    if not growth.balanced(summary["groups"]):
        wrong.append(f"the ledger does not balance: {summary['groups']}")
    if watch.unbalanced:
        wrong.append(f"{watch.unbalanced} of {watch.ledgers} looks found the ledger unbalanced")
    not_judged = [kind for kind, found in memory.items() if found is None]
    return {"memory": memory, "streams": streams, "wrong": wrong, "not_judged": not_judged}


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    console = Console()
    table = Table(title="memory (PSS, children included), ten minutes after each start")
    for column in ("", "MiB", "MiB an hour", "in 2 hours"):
        table.add_column(column, justify="right")
    for kind, row in result["memory"].items():
        cells = ["", "", "no life was long enough"]
        if row is not None:
            slope, error = row["mib_per_hour"], row["interval_mib_per_hour"]
            cells = [f"{row['pss_mib']:.0f}", f"{slope:+.1f} ± {error:.1f}"]
            cells.append(f"{row['growth_frac_in_2_hours']:+.1%}")
        table.add_row(kind, *cells)
    console.print(table)
    table = Table(title="entries")
    for column in ("", "first half", "second half", "most"):
        table.add_column(column, justify="right")
    for name, row in result["streams"].items():
        table.add_row(name, *(f"{row[key]:.1f}" for key in ("first_half", "second_half", "most")))
    console.print(table)
    console.print(f"groups: {result['groups']}; restarts: {len(result['ended'])}")
    if result["not_judged"]:
        console.print(f"too short to judge the memory of {', '.join(result['not_judged'])}")
    console.print("\n".join(result["wrong"]) or "all that was judged held", markup=False)


def main() -> None:
    """Soak, print, write."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--groups", type=int, default=20_000)
    parser.add_argument("--restart-every-s", type=float, default=900.0)
    parser.add_argument("--most-growth", type=float, default=0.1, help="share of the median")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    about, watch = measured.about(), soak_watch.Watch()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = soak(
            folder,
            watch,
            minutes=arguments.minutes,
            groups=arguments.groups,
            restart_every_s=arguments.restart_every_s,
            overrides=arguments.overrides,
        )
        summary = conclude(folder, arguments.overrides)
        recipe = demo.config.load(folder / RUN / "recipe.toml")
    result = judge(watch, summary, most_growth=arguments.most_growth, bound=recipe.max_outstanding)
    result |= {
        "ended": ended,
        "groups": summary["groups"],
        "restarts": summary["restarts"],
        "wall_s": summary["wall_s"],
        "arguments": vars(arguments),
        "about": about,
    }
    show(result)
    print(f"written: {measured.write('soak', result)}")
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
