"""The aggregator: how much it takes in, how soon it answers, what a partial costs on disk.

    python benchmarks/aggregator.py [--seconds 60] [--steps 1000000] [--quick]

Prints a table and writes benchmarks/results/aggregator.json. The server is the service's own
process with SQLite on disk; the client is another one, on the same cores. After the load, all
totals are asked for and must equal what was acknowledged. Each figure stands beside its ratio to a
bare loop of the same run (aggregator_bare.py), which compares machines out.
"""

import argparse
import json
import math
import os
import platform
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aggregator_bare as bare
import aggregator_load as load
import aggregator_query as query
import httpx
import recorder as recording
from rich.console import Console
from rich.table import Table

from services.common.partials import Count, Observation, Partial, Ratio

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "aggregator.json"

RECIPE = """
run = "bench"
folder = {folder}
[data.reasoning_gym]
task = "chain_sum"
[trainer]
max_steps = 10
[aggregator]
http_port = 0
"""

QUICK_S, QUICK_STEPS, QUICK_QUERIES = 5.0, 20_000, 20

BARE_S = 10.0
"""How long the bare server is loaded."""

BY_TIME_EVERY = 10
"""Of so many series, one's total is asked for by time, too; all are by step."""

BUSY = 0.5
"""A load average above this is told."""

START_S = 60.0

STOP_S = 60.0

TARGETS = {
    "ingest_deltas_per_s": ">= 50,000",
    "query_p95_ms": "<= 50",
    "record_us": "<= 2",
}


@dataclass(frozen=True)
class Server:
    """A running aggregator."""

    address: str
    page: str
    pid: int


@contextmanager
def aggregator(folder: Path) -> Iterator[Server]:
    """`python -m services.aggregator` on an empty store in `folder`; asked to stop at the end."""
    recipe, announced = folder / "recipe.toml", folder / "ports.json"
    recipe.write_text(RECIPE.format(folder=json.dumps(str(folder))))
    command = [sys.executable, "-m", "services.aggregator", str(recipe)]
    # All producers of the benchmark have one address.
    command += ["--set", "network.max_requests_per_s=1e6"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--announce", str(announced)], stdout=log, stderr=log, cwd=ROOT
        )
    try:
        deadline_s = time.monotonic() + START_S
        while not announced.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                sys.exit(f"the aggregator did not start:\n{(folder / 'log').read_text()}")
            time.sleep(0.05)
        ports = json.loads(announced.read_text())
        yield Server(
            f"127.0.0.1:{ports['grpc_port']}",
            f"http://127.0.0.1:{ports['http_port']}",
            process.pid,
        )
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
    finally:
        process.kill()
        process.wait()


def loaded_by_client(address: str, *, seconds: float, steps_per_s: float, pid: int) -> load.Loaded:
    """Load a server from a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as client:
        return client.submit(
            load.run, address, seconds=seconds, steps_per_s=steps_per_s, server_pid=pid
        ).result()


def check_totals(page: str, loaded: load.Loaded) -> None:
    """Every series holds what was acknowledged: counts exactly, ratios and means to 1e-12."""
    with httpx.Client(base_url=page, trust_env=False, timeout=60) as client:

        def ask(key: str, reduction: str, **parameters: Any) -> float:
            answer = client.get(
                f"/api/v1/runs/{load.RUN}/metrics/{key}",
                params={"max_points": 1, "reduce": reduction, **parameters},
            )
            [point] = answer.raise_for_status().json()["points"]
            value: float = point["value"]
            return value

        deltas = loaded.batches.total() * load.number_of_series()
        assert ask("ingest/deltas", "sum") == deltas, f"not {deltas} deltas"
        for number, (key, total) in enumerate(load.expected(loaded.batches).items()):
            for axis in ("step", "time") if number % BY_TIME_EVERY == 0 else ("step",):
                for reduction, wanted in _values(total).items():
                    found = ask(key, reduction, axis=axis)
                    tolerance = 0.0 if reduction in ("sum", "min", "max") else 1e-12
                    assert math.isclose(found, wanted, rel_tol=tolerance), (
                        f"{key}: {reduction} by {axis} is {found}, not {wanted}"
                    )


def _values(total: Partial) -> dict[str, float]:
    """What the reductions of a total must give."""
    match total:
        case Count():
            return {"sum": total.sum}
        case Ratio():
            return {"ratio": total.numerator / total.denominator}
        case Observation():
            return {"mean": total.sum / total.n}


def measure_ingest(seconds: float, *, steps_per_s: float) -> dict[str, Any]:
    """The load, checked, and what it left on disk; beside it the bare server."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with aggregator(folder) as server:
            loaded = loaded_by_client(
                server.address, seconds=seconds, steps_per_s=steps_per_s, pid=server.pid
            )
            print(f"{loaded.deltas_per_s:,.0f} deltas/s; checking the totals …", flush=True)
            check_totals(server.page, loaded)
        rows, database_bytes = _stored(folder / "bench" / "metrics.sqlite")
    with bare.bare_server() as (address, pid):
        plain = loaded_by_client(
            address, seconds=min(BARE_S, seconds), steps_per_s=steps_per_s, pid=pid
        )
    ack, plain_ack = _percentiles(loaded.ack_ms), _percentiles(plain.ack_ms)
    whole_seconds = [loaded.by_second[second] for second in range(int(loaded.elapsed_s))]
    return {
        "ingest_deltas_per_s": loaded.deltas_per_s,
        "ingest_ratio": loaded.deltas_per_s / plain.deltas_per_s,
        "ingest_slowest_second_deltas_per_s": min(whole_seconds),
        "ack_p50_ms": ack[50],
        "ack_p50_ratio": ack[50] / plain_ack[50],
        "ack_p99_ms": ack[99],
        "ack_p99_ratio": ack[99] / plain_ack[99],
        "bytes_per_partial": database_bytes / rows,
        "bytes_per_partial_ratio": database_bytes / rows / loaded.wire_bytes_per_delta,
        "ingest": {
            "seconds": loaded.elapsed_s,
            "series": load.number_of_series(),
            "producers": load.PRODUCERS,
            "steps_per_s": steps_per_s,
            "deltas": loaded.batches.total() * load.number_of_series(),
            "partial_rows": rows,
            "database_bytes": database_bytes,
            "wire_bytes_per_delta": loaded.wire_bytes_per_delta,
            "client_cores": loaded.client_cpu,
            "server_cores": loaded.server_cpu,
            "server_us_per_delta": loaded.server_cpu / loaded.deltas_per_s * 1e6,
            "bare_deltas_per_s": plain.deltas_per_s,
            "bare_server_cores": plain.server_cpu,
            "bare_client_cores": plain.client_cpu,
        },
    }


def _stored(database: Path) -> tuple[int, int]:
    """Rows of partials, and bytes of the whole file with its indexes and roll-ups."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        [(rows,)] = connection.execute("SELECT count(*) FROM partials")
    files = database.parent.glob(f"{database.name}*")
    return rows, sum(file.stat().st_size for file in files)


def measure_queries(steps: int, *, times: int) -> dict[str, Any]:
    """The long series, filled and asked for; beside it bare SELECTs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with aggregator(folder) as server:
            print(f"filling a series of {steps:,} steps …", flush=True)
            filled = query.fill(server.address, steps=steps)
            kinds = query.measure(server.page, steps=steps, times=times, server_pid=server.pid)
        select_ms = statistics.median(bare.select_ms(folder, rows=query.MAX_POINTS, times=times))
        scan_ms = statistics.median(bare.select_ms(folder, rows=steps, times=3))
    found = {kind: _percentiles(asked.ms) for kind, asked in kinds.items()}
    # By time the series is a worst case that no run is: its steps came within a minute, so that the
    # newest buckets of the run's clock hold all of them.
    by_time = {question for question in found if "time" in question}
    worst_ms = max(found[question][95] for question in found.keys() - by_time)
    return {
        "query_p95_ms": worst_ms,
        "query_by_time_p95_ms": max(found[question][95] for question in by_time),
        "query_ratio": worst_ms / select_ms,
        "query_scan_ratio": worst_ms / scan_ms,
        "query": {
            "steps": steps,
            "max_points": query.MAX_POINTS,
            "fill_deltas_per_s": filled,
            "bare_select_ms": select_ms,
            "bare_scan_ms": scan_ms,
            "kinds": {
                kind: {f"p{share}_ms": value for share, value in percentiles.items()}
                | {"server_cpu_ms": kinds[kind].server_cpu_ms}
                for kind, percentiles in found.items()
            },
        },
    }


def _percentiles(values: list[float]) -> dict[int, float]:
    """The 50th, 95th and 99th."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {share: cuts[share - 1] for share in (50, 95, 99)}


def measure_recording() -> dict[str, Any]:
    """count() of a recorder that sends nothing; beside it a dict's increment."""
    quiet = recording.alone()
    cost_us = recording.cost_us(lambda: recording.counting(quiet))
    return {"record_us": cost_us, "record_ratio": cost_us / bare.increment_us()}


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table(title="the aggregator, client and server on the same cores")
    for column in ("figure", "value", "target", "x bare loop"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, ratio in (
        ("ingest_deltas_per_s", "ingest_ratio"),
        ("ingest_slowest_second_deltas_per_s", None),
        ("ack_p50_ms", "ack_p50_ratio"),
        ("ack_p99_ms", "ack_p99_ratio"),
        ("query_p95_ms", "query_ratio"),
        ("record_us", "record_ratio"),
        ("bytes_per_partial", "bytes_per_partial_ratio"),
    ):
        value = result[name]
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
        times = "" if ratio is None else f"{result[ratio]:.3g}"
        table.add_row(name, shown, TARGETS.get(name, ""), times)
    console = Console()
    console.print(table)
    ingest, queries = result["ingest"], result["query"]
    console.print(
        f"{ingest['deltas']:,} deltas in {ingest['seconds']:.0f} s became "
        f"{ingest['partial_rows']:,} rows, {ingest['database_bytes'] / 1e6:,.0f} MB; cores used: "
        f"client {ingest['client_cores']:.2f}, server {ingest['server_cores']:.2f} "
        f"({ingest['server_us_per_delta']:.1f} us a delta); "
        f"the bare server takes {ingest['bare_deltas_per_s']:,.0f} deltas/s"
    )
    for kind, values in queries["kinds"].items():
        console.print(
            f"{kind}: p50 {values['p50_ms']:.1f} ms, p95 {values['p95_ms']:.1f} ms "
            f"(server CPU {values['server_cpu_ms']:.1f} ms)"
        )
    console.print(
        f"series of {queries['steps']:,} steps, filled at {queries['fill_deltas_per_s']:,.0f} "
        f"deltas/s; bare SELECT of the points {queries['bare_select_ms']:.2f} ms, of all steps "
        f"{queries['bare_scan_ms']:,.0f} ms"
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load")
    parser.add_argument(
        "--steps-per-s", type=float, default=load.STEPS_PER_S, help="of the load's clock"
    )
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the series asked for")
    parser.add_argument("--quick", action="store_true", help="small: does it work at all?")
    arguments = parser.parse_args()
    seconds = QUICK_S if arguments.quick else arguments.seconds
    steps = QUICK_STEPS if arguments.quick else arguments.steps
    times = QUICK_QUERIES if arguments.quick else query.QUERIES
    others = os.getloadavg()[0]
    if others > BUSY:
        print(f"load average {others:.1f}: others use this machine, and the figures suffer")
    result = measure_recording()
    result |= measure_ingest(seconds, steps_per_s=arguments.steps_per_s)
    result |= measure_queries(steps, times=times)
    result |= {"python": platform.python_version(), "cpus": os.cpu_count(), "load": others}
    show(result)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
