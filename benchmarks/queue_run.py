"""What benchmarks/queue.py measures: samples of 1,000 and of 32,000 tokens, in groups of 8, between
processes on the loopback, in rounds taken in turns. The medians of the rounds are told.

- own hop: one stage's hand-off through `samples`. The scorer's process writes ScoredGroups and
  hands them off, the trainer's takes, parses, checks and settles them.
- whole way: request, group, sample. The trainer's process dispatches and trains, a generator's
  writes RolloutGroups with their texts, a scorer's reads these and writes ScoredGroups.
- pickled: the same tokens as lists of Python numbers, pickled, one sample an entry, by XADD and
  XREAD COUNT 1, on the same server.
- mp.Queue: the same lists by multiprocessing.Queue, without a server.

The server is configured like the one that `headrace run` starts, append-only file included. The
clock runs from the first sample's way in to the last one's way out, after a warm-up.
"""

import argparse
import asyncio
import json
import os
import pickle
import platform
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import queue_baselines as baselines
import queue_services as services
import queue_tokens as tokens
from queue_gate import Gate
from queue_tokens import GROUP_SIZE, Size
from rich.console import Console
from rich.table import Table

from services.launcher import embedded_queue

RESULT = Path(__file__).parent / "results" / "queue.json"

CONTEXT = get_context("spawn")

SIZES = (
    Size("1k", 1_000, hop_groups=5_000, way_groups=2_000, pickle_samples=12_000, mp_samples=36_000),
    Size("32k", 32_000, hop_groups=256, way_groups=96, pickle_samples=640, mp_samples=2_560),
)
"""Each contender has a few seconds a round."""

QUICK = 0.05
"""Share of it."""


@dataclass(frozen=True)
class Contender:
    """One way to move samples."""

    name: str
    """In the result's keys: NAME_1k."""
    title: str
    play: Callable[[str, Size, float], float]
    """Samples a second of a round: by the server's URL, the size, and the share of its samples."""


def own_hop(url: str, size: Size, share: float) -> float:
    """Two processes, one stream."""
    parties = [services.hop_trainer, services.hop_scorer]
    return _groups(parties, url, size, number=_part(size.hop_groups, share))


def whole_way(url: str, size: Size, share: float) -> float:
    """Three processes, three streams."""
    parties = [services.way_trainer, services.way_generator, services.way_scorer]
    return _groups(parties, url, size, number=_part(size.way_groups, share))


def pickled(url: str, size: Size, share: float) -> float:
    """Two processes, one stream."""
    gate, number = Gate.of(CONTEXT, parties=2), _part(size.pickle_samples, share)
    parties = (baselines.pickle_producer, baselines.pickle_consumer)
    return _rate([(party, (url, size, gate, number)) for party in parties], gate, size, number)


def mp_queue(url: str, size: Size, share: float) -> float:
    """Two processes and a pipe."""
    gate, number = Gate.of(CONTEXT, parties=2), _part(size.mp_samples, share)
    channel = CONTEXT.Queue()
    parties = (baselines.mp_producer, baselines.mp_consumer)
    return _rate([(party, (channel, size, gate, number)) for party in parties], gate, size, number)


CONTENDERS = (
    Contender("samples_per_s", "own hop", own_hop),
    Contender("baseline_pickle_samples_per_s", "pickled, XADD and XREAD", pickled),
    Contender("whole_way_samples_per_s", "whole way", whole_way),
    Contender("baseline_mp_queue_samples_per_s", "multiprocessing.Queue", mp_queue),
)


def _part(number: int, share: float) -> int:
    return max(8, int(number * share))


def _groups(parties: Sequence[services.Party], url: str, size: Size, *, number: int) -> float:
    embedded_queue.delete_keys(url, run=services.RUN)
    gate = Gate.of(CONTEXT, parties=len(parties))
    work = [(services.run, (party, url, size, gate, number)) for party in parties]
    return _rate(work, gate, size, number * GROUP_SIZE)


def _rate(
    parties: Sequence[tuple[Callable[..., None], tuple[Any, ...]]],
    gate: Gate,
    size: Size,
    num_samples: int,
) -> float:
    """Run a process for each party; samples a second. Fails as soon as one of them does."""
    processes = [CONTEXT.Process(target=work, args=arguments) for work, arguments in parties]
    for process in processes:
        process.start()
    try:
        running = list(processes)
        while running:
            connection.wait([process.sentinel for process in running])
            ended = [process for process in running if not process.is_alive()]
            assert all(process.exitcode == 0 for process in ended), "a party has failed"
            running = [process for process in running if process not in ended]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert gate.tokens.value == num_samples * size.num_tokens, "not all tokens have come out"
    return num_samples / gate.elapsed_s


@contextmanager
def server() -> Iterator[str]:
    """A queue server of its own; yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = embedded_queue.write_config(Path(folder), port=port)
        command = [str(embedded_queue.binary()), str(config)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            url = f"redis://127.0.0.1:{port}/0"
            asyncio.run(embedded_queue.answers(url))
            yield url
        finally:
            process.terminate()
            process.wait()


def bytes_of_a_sample(size: Size) -> dict[str, float]:
    """What travels for one sample, by contender: through all streams of its way."""
    request, group, scored = services.message_bytes(size)
    plain = tokens.plain(tokens.sequences(size, number=1)[0], number=0)
    as_pickle = float(len(pickle.dumps(plain, protocol=pickle.HIGHEST_PROTOCOL)))
    return {
        "samples_per_s": scored / GROUP_SIZE,
        "whole_way_samples_per_s": (request + group + scored) / GROUP_SIZE,
        "baseline_pickle_samples_per_s": as_pickle,
        "baseline_mp_queue_samples_per_s": as_pickle,
    }


def measure(url: str, *, rounds: int, share: float) -> dict[str, Any]:
    """All contenders in turns, and what they come to."""
    seen: dict[str, list[float]] = {}
    for _ in range(rounds):
        for size in SIZES:
            for contender in CONTENDERS:
                rate = contender.play(url, size, share)
                seen.setdefault(f"{contender.name}_{size.name}", []).append(rate)
    result: dict[str, Any] = {key: statistics.median(rates) for key, rates in seen.items()}
    for size in SIZES:
        by_sample = bytes_of_a_sample(size)
        for name, num_bytes in by_sample.items():
            rate = result[f"{name}_{size.name}"]
            result[f"{name.replace('samples_per_s', 'mb_per_s')}_{size.name}"] = (
                rate * num_bytes / 1e6
            )
        own = result[f"samples_per_s_{size.name}"]
        pickle_rate = result[f"baseline_pickle_samples_per_s_{size.name}"]
        mp_rate = result[f"baseline_mp_queue_samples_per_s_{size.name}"]
        way = result[f"whole_way_samples_per_s_{size.name}"]
        result[f"ratio_to_pickle_{size.name}"] = own / pickle_rate
        result[f"ratio_to_mp_queue_{size.name}"] = own / mp_rate
        result[f"ratio_of_whole_way_to_own_hop_{size.name}"] = way / own
    return result | {"rounds": seen}


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title=f"Samples through the queue, groups of {GROUP_SIZE}")
    table.add_column("")
    for size in SIZES:
        for head in (f"samples/s, {size.name}", "MB/s", "of pickled"):
            table.add_column(head, justify="right")
    for contender in CONTENDERS:
        cells = []
        for size in SIZES:
            rate = result[f"{contender.name}_{size.name}"]
            mb = result[f"{contender.name.replace('samples_per_s', 'mb_per_s')}_{size.name}"]
            base = result[f"baseline_pickle_samples_per_s_{size.name}"]
            cells += [f"{rate:,.0f}", f"{mb:,.0f}", f"{rate / base:.1f} x"]
        table.add_row(contender.title, *cells)
    Console().print(table)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3, help="whose medians are told")
    parser.add_argument("--scale", type=float, default=1.0, help="of the samples in a round")
    parser.add_argument("--quick", action="store_true", help="small: does it work at all?")
    arguments = parser.parse_args()
    rounds, share = (1, QUICK) if arguments.quick else (arguments.rounds, arguments.scale)
    load = os.getloadavg()[0]
    with server() as url:
        result = measure(url, rounds=rounds, share=share)
    show(result)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "group_size": GROUP_SIZE,
        "quick": arguments.quick,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    RESULT.write_text(json.dumps(result | about, indent=2) + "\n")
