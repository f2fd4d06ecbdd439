"""kill -9 of the aggregator at random moments, under load: what was recorded is stored, once.

Recorders of three producers go on recording and sending while the process behind their port dies
and comes back on the same database, twenty times. Values are multiples of 1/8, so that sums are
exact in doubles and are compared as such.
"""

import contextlib
import json
import math
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.aggregator.batch import decode
from services.common import config
from services.common.recorder import Recorder
from services.launcher import ports
from tests.processes import service

RECIPE = """
run = "demo"
folder = "{folder}"
[data.reasoning_gym]
task = "chain_sum"
[trainer]
max_steps = 10
[network]
grpc_port = {grpc_port}
[aggregator]
http_port = {http_port}
"""

KILLS = 20

MOST_LIFE_S = 0.4
"""A life of the process is drawn between 0 and this: from the first batch that it acknowledges, or
from being ready, to SIGKILL.
"""

UNDER_LOAD = 0.8
"""The share of lives that are to acknowledge something; the others may end with their first commit,
or before.
"""

START_S = 60.0
"""Far more than a start takes, on a busy machine."""

CLOSE_S = 60.0

PRODUCERS, THREADS = 3, 2
"""Recorders, and threads that record with each of them."""

KEYS = 8
"""Of each instrument."""

FLUSH_S = 0.05

STEPS_PER_S = 5

PAUSE_S = 0.01
"""Of a recording thread, after one value of each instrument: the processes share two cores."""

QUICK_RECONNECT = [
    (f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "min", "max")
]
"""Load is back as soon as the process is."""


class Acknowledged(grpc.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Counts what the server has acknowledged on a channel."""

    def __init__(self) -> None:
        self.batches = 0
        self.deltas = 0
        self.duplicates = 0
        self.rejected: list[str] = []

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        call = continuation(details, request)
        if call.exception() is None:
            answer = call.result()
            self.batches += 1
            self.deltas += decode(request).num_partials
            self.duplicates += answer.duplicate
            self.rejected.extend(each.reason for each in answer.rejected)
        return call


@dataclass
class Recorded:
    """What one thread has recorded, by key."""

    counts: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    observations: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ratios: defaultdict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )


class Producer:
    """One recorder and the threads that record with it, until stop()."""

    def __init__(self, number: int, address: str, seed: int) -> None:
        self.acknowledged = Acknowledged()
        self.recorded = [Recorded() for _ in range(THREADS)]
        self._channel = grpc.insecure_channel(address, options=QUICK_RECONNECT)
        self._recorder = Recorder(
            run="demo",
            producer=f"generator-{number}",
            service="generator",
            settings=config.Recorder(flush_s=FLUSH_S),
            channel=grpc.intercept_channel(self._channel, self.acknowledged),
        )
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._record, args=(recorded, random.Random(f"{seed} {nth}")))
            for nth, recorded in enumerate(self.recorded)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Record no more."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def close(self) -> bool:
        """Stop, and send what is left: whether all of it was acknowledged."""
        self.stop()
        done = self._recorder.close(CLOSE_S)
        self._channel.close()
        return done

    def _record(self, recorded: Recorded, chance: random.Random) -> None:
        begun_s = time.monotonic()
        while not self._ending.wait(PAUSE_S):
            step = int((time.monotonic() - begun_s) * STEPS_PER_S)
            self._recorder.set_clock(attempt=1, step=step)
            key = f"rollout/failed/v{chance.randrange(KEYS)}"
            events = float(chance.randrange(1, 10))
            self._recorder.count(key, events)
            recorded.counts[key].append(events)
            key = f"rewards/v{chance.randrange(KEYS)}"
            value = chance.randrange(-400, 401) / 8
            self._recorder.observe(key, value)
            recorded.observations[key].append(value)
            key = f"kl/v{chance.randrange(KEYS)}"
            over, under = chance.randrange(64) / 8, float(chance.randrange(1, 9))
            self._recorder.ratio(key, over, under)
            recorded.ratios[key].append((over, under))


@contextlib.contextmanager
def producing(address: str, seed: int) -> Iterator[list[Producer]]:
    """Producers at work; none is left behind by a failure."""
    producers = [Producer(number, address, seed + number) for number in range(PRODUCERS)]
    try:
        yield producers
    finally:
        for producer in producers:
            producer.stop()


@contextlib.contextmanager
def ready(command: list[str], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """One life of the aggregator, from being ready; SIGKILL ends it with the block."""
    announced = folder / "ports"
    announced.unlink(missing_ok=True)
    with service(command, folder) as process:
        deadline_s = time.monotonic() + START_S
        while not announced.exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        yield process


def wait_for_load(producers: list[Producer]) -> None:
    """Return when one more batch has been acknowledged."""
    before = sum(producer.acknowledged.batches for producer in producers)
    deadline_s = time.monotonic() + START_S
    while sum(producer.acknowledged.batches for producer in producers) == before:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def pooled(producers: list[Producer]) -> Recorded:
    """What all threads have recorded."""
    everything = Recorded()
    for producer in producers:
        for recorded in producer.recorded:
            for key, numbers in recorded.counts.items():
                everything.counts[key] += numbers
            for key, numbers in recorded.observations.items():
                everything.observations[key] += numbers
            for key, pairs in recorded.ratios.items():
                everything.ratios[key] += pairs
    return everything


def check_answers(page: str, recorded: Recorded, producers: list[Producer]) -> None:
    """What REST says is what was recorded."""
    run = "/api/v1/runs/demo"
    with httpx.Client(base_url=page, trust_env=False, timeout=CLOSE_S) as client:

        def get(path: str, **parameters: Any) -> Any:
            return client.get(f"{run}{path}", params=parameters).raise_for_status().json()

        def ask(key: str, reduction: str) -> float:
            [point] = get(f"/metrics/{key}", reduce=reduction, max_points=1)["points"]
            value: float = point["value"]
            return value

        for key, numbers in recorded.counts.items():
            assert ask(key, "sum") == sum(numbers), key
        for key, numbers in recorded.observations.items():
            assert ask(key, "min") == min(numbers), key
            assert ask(key, "max") == max(numbers), key
            assert ask(key, "mean") == sum(numbers) / len(numbers), key
        for key, pairs in recorded.ratios.items():
            over, under = (sum(side) for side in zip(*pairs, strict=True))
            assert ask(key, "ratio") == over / under, key
        sent = [producer.acknowledged for producer in producers]
        assert ask("ingest/deltas", "sum") == sum(each.deltas for each in sent)
        repeated = get("/metrics/ingest/duplicates", max_points=1)["points"]
        duplicates = sum(point["value"] for point in repeated)
        # The answer to a duplicate may be lost, too.
        assert duplicates >= sum(each.duplicates for each in sent)
        listed = {metric["key"] for metric in get("/metrics")["metrics"]}
        assert not {"recorder/dropped_total", "recorder/refused_total"} & listed
        missing = {each["producer"]: each["missing_batches"] for each in get("")["producers"]}
        assert {f"generator-{number}" for number in range(PRODUCERS)} <= set(missing)
        assert not any(missing.values()), missing


def check_stored(database: Path, recorded: Recorded) -> None:
    """No reduction tells the number of observations and their sum apart: the rows do."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(
            "SELECT key, sum(n), sum(sum_high) + sum(sum_low) FROM partials "
            "JOIN series ON series.id = series_id WHERE key LIKE 'rewards/%' GROUP BY key"
        ).fetchall()
    stored = {key: (number, total) for key, number, total in rows}
    assert stored == {
        key: (len(numbers), math.fsum(numbers)) for key, numbers in recorded.observations.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_at_random_moments_nothing_is_lost_and_nothing_counted_twice(
    tmp_path: Path,
) -> None:
    seed = random.randrange(2**32)
    print(f"seed of the moments: {seed}")
    chance = random.Random(seed)
    grpc_port, http_port = ports.choose(2, host="127.0.0.1")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(folder=tmp_path, grpc_port=grpc_port, http_port=http_port))
    command = [sys.executable, "-m", "services.aggregator", str(recipe)]
    with producing(f"127.0.0.1:{grpc_port}", seed) as producers:
        for _ in range(KILLS):
            with ready(command, tmp_path) as process:
                if chance.random() < UNDER_LOAD:
                    wait_for_load(producers)
                time.sleep(chance.uniform(0, MOST_LIFE_S))
                assert process.poll() is None, (tmp_path / "log").read_text()
        with ready(command, tmp_path) as process:
            assert json.loads((tmp_path / "ports").read_text())["pid"] == process.pid
            closed = [producer.close() for producer in producers]
            assert all(closed), closed
            recorded = pooled(producers)
            check_answers(f"http://127.0.0.1:{http_port}", recorded, producers)
    check_stored(tmp_path / "demo" / "metrics.sqlite", recorded)
    assert len(recorded.counts) == len(recorded.observations) == len(recorded.ratios) == KEYS
    assert not any(producer.acknowledged.rejected for producer in producers)
