"""The aggregator killed in mid-run and away for a minute: does training slow, is anything lost?

    python benchmarks/aggregator_away.py [--steps 160] [--away-s 60]

Runs the demo with `headrace run`'s own launcher. Its aggregator is killed with SIGKILL at step 40;
the launcher starts it again, on the same ports and database, and the benchmark holds that start
back for a minute. At the end the numbers that the aggregator has are compared with the trainer's
own account of the run. Prints a table and writes benchmarks/results/aggregator_away.json.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "arithmetic.toml"
RESULT = Path(__file__).parent / "results" / "aggregator_away.json"

RUN = "away"

SETTLED_STEP = 8
"""Steps before this one are not compared: they fill the river."""

KILL_STEP = 40

PATIENCE_S = 600.0
"""With anything that the run is waited for."""

REST_S = 30.0

BOOTSTRAPS = 2000


def serve(hold: str, arguments: Sequence[str]) -> None:
    """The aggregator, once the file `hold` is not there: what the launcher starts here as one."""
    while Path(hold).exists():
        time.sleep(0.1)
    os.execv(sys.executable, [sys.executable, "-m", "services.aggregator", *arguments])


def launch(hold: str, overrides: Sequence[str]) -> int:
    """`headrace run`, with such an aggregator; its exit status."""
    from services.launcher import plan
    from services.launcher import run as launcher

    def argv_of(service: str) -> Sequence[str]:
        if service == "aggregator":
            return (sys.executable, __file__, "serve", hold)
        return plan.python_module(service)

    return launcher.run(RECIPE, overrides=overrides, console=Console(), argv_of=argv_of)


class Run:
    """The demo, from its start to its end."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        self.path = folder / RUN
        self._hold = folder / "hold"
        self._output = folder / "output"
        settings = [f"folder={folder}", f"run={RUN}", f"trainer.max_steps={steps}"]
        settings += ["aggregator.http_port=0"]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "launch", str(self._hold), *settings],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    def steps(self) -> int:
        """Optimizer steps done, as the trainer's log says."""
        log = self.path / "logs" / "trainer-0.log"
        lines = log.read_text().splitlines() if log.exists() else []
        done = [json.loads(line)["step"] for line in lines if '"published"' in line]
        return max(done, default=0)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Return when the condition holds; exits when the run ends before, or hangs."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            if self._process.poll() is not None:
                sys.exit(f"the run ended before {what}:\n{self._output.read_text()}")
            if time.monotonic() > deadline_s:
                sys.exit(f"{what} did not come within {PATIENCE_S:.0f} s")
            time.sleep(0.05)

    def ports(self) -> dict[str, int] | None:
        """The aggregator's, while it is there."""
        try:
            found: dict[str, int] = json.loads((self.path / "ports/aggregator-0.json").read_text())
        except FileNotFoundError:
            return None
        return found

    def kill_aggregator(self) -> None:
        """SIGKILL; it comes back after let_back()."""
        ports = self.ports()
        assert ports is not None
        self._hold.touch()
        os.kill(ports["pid"], signal.SIGKILL)
        self.wait_for(lambda: self.ports() is None, "the launcher's restart")

    def let_back(self) -> None:
        """Have the aggregator start, and return when it serves."""
        self._hold.unlink()
        self.wait_for(self.ports, "the aggregator's return")

    def end(self) -> dict[str, Any]:
        """Wait for the end; the run's summary, with the trainer's own account."""
        status = self._process.wait(PATIENCE_S)
        if status:
            sys.exit(f"the run ended with {status}:\n{self._output.read_text()}")
        summary: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return summary

    def stop(self) -> None:
        """End whatever is still there."""
        self._hold.unlink(missing_ok=True)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(PATIENCE_S)


class Asking:
    """An aggregator's REST interface, about this run."""

    def __init__(self, port: int) -> None:
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=REST_S
        )

    def get(self, path: str = "", **parameters: Any) -> Any:
        """The answer about `path` within the run."""
        answer = self._http.get(f"/api/v1/runs/{RUN}{path}", params=parameters)
        return answer.raise_for_status().json()

    def by_step(self, key: str) -> dict[int, float]:
        """A metric's values."""
        points = self.get(f"/metrics/{key}", max_points=10_000)["points"]
        return {point["x"]: point["value"] for point in points}

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def latest_step(run: Run) -> int:
    """The newest step that the aggregator has a loss of."""
    ports = run.ports()
    assert ports is not None
    with closing(Asking(ports["http_port"])) as asking:
        answer = asking.get("/metrics", match="^loss$")
    return max((metric["step"] for metric in answer["metrics"]), default=0)


@contextmanager
def aggregator_of(path: Path) -> Iterator[Asking]:
    """An aggregator on the finished run's database."""
    announced = path / "reading.json"
    command = [sys.executable, "-m", "services.aggregator", str(path / "recipe.toml")]
    command += ["--set", "aggregator.http_port=0", "--announce", str(announced)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while not announced.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                sys.exit("the aggregator did not start on the finished run")
            time.sleep(0.05)
        with closing(Asking(json.loads(announced.read_text())["http_port"])) as asking:
            yield asking
    finally:
        process.terminate()
        process.wait()


def recorded(asking: Asking) -> dict[str, Any]:
    """What the aggregator knows of the whole run."""

    def total(key: str) -> float:
        return sum(asking.by_step(key).values())

    producers = asking.get()["producers"]
    return {
        "step_s": asking.by_step("perf/step_s"),
        "steps": len(asking.by_step("loss")),
        "forwarded_tokens": total("batch/forwarded_tokens_per_step"),
        "trained_tokens": total("batch/trained_tokens_per_step"),
        "groups": asking.get("/groups/counts"),
        "missing_batches": {each["producer"]: each["missing_batches"] for each in producers},
        "dropped_partials": total("recorder/dropped_total"),
        "merged_partials": total("recorder/merged_total"),
    }


def check(found: dict[str, Any], summary: dict[str, Any]) -> None:
    """The aggregator's numbers are the trainer's own, to the last step, token and group."""
    for name in ("steps", "forwarded_tokens", "trained_tokens"):
        assert found[name] == summary[name], f"{name}: {found[name]}, not {summary[name]}"
    account, ledger = summary["groups"], found["groups"]
    states = ledger["states"]
    dropped = sum(account["dropped"].values())
    assert ledger["total"] == account["dispatched"], f"{ledger} against {account}"
    assert states["trained"] == account["trained"], f"{ledger} against {account}"
    assert states["dropped"] == dropped, f"{ledger} against {account}"
    assert states["given_up"] == account["given_up"], f"{ledger} against {account}"
    assert account["dispatched"] == account["trained"] + dropped + account["given_up"], account
    assert ledger["in_flight"] == 0, f"{ledger}"
    assert not any(found["missing_batches"].values()), f"gaps: {found['missing_batches']}"
    assert found["dropped_partials"] == 0, f"{found['dropped_partials']} partials were dropped"


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {
        "steps": len(seconds),
        "median_s": middle,
        "low_quartile_s": low,
        "high_quartile_s": high,
    }


def difference(some: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Difference of the medians, and its bootstrapped 95 % interval."""
    chance = random.Random(0)
    drawn = sorted(
        statistics.median(chance.choices(some, k=len(some)))
        - statistics.median(chance.choices(others, k=len(others)))
        for _ in range(BOOTSTRAPS)
    )
    return (
        statistics.median(some) - statistics.median(others),
        drawn[round(0.025 * BOOTSTRAPS)],
        drawn[round(0.975 * BOOTSTRAPS)],
    )


def measure(folder: Path, *, steps: int, away_s: float) -> dict[str, Any]:
    """The run and what is left of it."""
    run = Run(folder, steps=steps)
    try:
        run.wait_for(lambda: run.steps() >= KILL_STEP, f"step {KILL_STEP}")
        run.kill_aggregator()
        killed_at = run.steps()
        print(f"killed at step {killed_at}; away for {away_s:.0f} s …", flush=True)
        time.sleep(away_s)
        back_at, back_s = run.steps(), time.monotonic()
        run.let_back()
        started_s = time.monotonic() - back_s
        print(f"back at step {back_at}", flush=True)
        run.wait_for(lambda: latest_step(run) >= back_at, "the aggregator's catching up")
        caught_up_s = time.monotonic() - back_s
        summary = run.end()
    finally:
        run.stop()
    with aggregator_of(run.path) as asking:
        found = recorded(asking)
    check(found, summary)
    # The step in which it went, and that in which it came back, belong to neither side.
    parts = {
        "before": range(SETTLED_STEP, killed_at),
        "during": range(killed_at + 2, back_at + 1),
        "after": range(back_at + 2, steps),
    }
    seconds = {name: [found["step_s"][step] for step in part] for name, part in parts.items()}
    by, low, high = difference(seconds["during"], seconds["before"] + seconds["after"])
    return {
        "away_s": away_s,
        "step_s": {name: spread(values) for name, values in seconds.items()},
        "difference_s": by,
        "difference_interval_s": [low, high],
        "within_noise": low <= 0,
        "started_after_s": started_s,
        "caught_up_after_s": caught_up_s,
        "recorded": {name: value for name, value in found.items() if name != "step_s"},
        "summary_groups": summary["groups"],
        "restarts": summary["restarts"],
    }


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title=f"the aggregator away for {result['away_s']:.0f} s: perf/step_s")
    for column in ("", "steps", "median", "quartiles"):
        table.add_column(column, justify="left" if not column else "right")
    for name, each in result["step_s"].items():
        quartiles = f"{each['low_quartile_s']:.2f} … {each['high_quartile_s']:.2f} s"
        table.add_row(name, f"{each['steps']}", f"{each['median_s']:.3f} s", quartiles)
    console = Console()
    console.print(table)
    low, high = result["difference_interval_s"]
    found = result["recorded"]
    console.print(
        f"during - (before and after): {result['difference_s']:+.3f} s, 95 % interval {low:+.3f} "
        f"to {high:+.3f}: {'not slower' if result['within_noise'] else 'SLOWER'}"
    )
    console.print(
        f"caught up {result['caught_up_after_s']:.1f} s after it was let back (its start took "
        f"{result['started_after_s']:.1f}); {found['steps']} steps, "
        f"{found['trained_tokens']:,.0f} trained tokens and {found['groups']['total']} groups as "
        f"in the trainer's account; no gaps; partials merged "
        f"{found['merged_partials']:.0f}, dropped {found['dropped_partials']:.0f}"
    )


def main() -> None:
    """Measure, print, write."""
    match sys.argv[1:]:
        case ["serve", hold, *arguments]:
            serve(hold, arguments)
        case ["launch", hold, *overrides]:
            sys.exit(launch(hold, overrides))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=160, help="of the run")
    parser.add_argument("--away-s", type=float, default=60.0, help="seconds without aggregator")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), steps=options.steps, away_s=options.away_s)
    show(result)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
