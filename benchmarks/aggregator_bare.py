"""The bare loops of benchmarks/aggregator.py: the least that each figure could cost on this
machine.
"""

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headrace.v1 import metrics_pb2 as wire
from headrace.v1 import metrics_pb2_grpc

from services.common import grpc_kit, lifecycle
from services.common.config import Network

INCREMENTS = 200_000
"""Of one repetition."""

REPETITIONS = 15
"""The best is taken, as of the recorder's calls."""


class Acknowledge(metrics_pb2_grpc.MetricsServiceServicer):
    """Takes everything and keeps nothing."""

    async def PushDeltas(
        self, request: wire.PushDeltasRequest, context: Any
    ) -> wire.PushDeltasResponse:
        """Answer as the aggregator does, without a store."""
        return wire.PushDeltasResponse(accepted=len(request.keys))


@contextmanager
def bare_server() -> Iterator[tuple[str, int]]:
    """A process with the services' own gRPC server (asyncio, reflection, health) that decodes the
    protobuf message of a batch and acknowledges it; yields its address and process id.

    What ingest is compared with: the network and protobuf are in both, checks and storage are not
    here.
    """
    spawn = get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        port: int = mine.recv()
        assert process.pid is not None
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.join()


def _serve(told: Connection) -> None:
    asyncio.run(_serving(told))


async def _serving(told: Connection) -> None:
    state = lifecycle.Lifecycle(service="aggregator", replica="bare")
    add = metrics_pb2_grpc.add_MetricsServiceServicer_to_server
    served = await grpc_kit.serve(
        Network(max_requests_per_s=1e6), state, [(add, Acknowledge(), "headrace.v1.MetricsService")]
    )
    told.send(served.port)
    await state.stopping.wait()


def select_ms(folder: Path, *, rows: int, times: int) -> list[float]:
    """Milliseconds of one SELECT of `rows` rows of three numbers, in the order of their key, from a
    SQLite file that holds nothing else; `times` of them.

    What a query is compared with: `rows` as many as the answer has points, and once more as many as
    the series has steps, which is what an answer without roll-ups would have to read.
    """
    path = folder / f"bare-{rows}.sqlite"
    found = []
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE points (step INTEGER PRIMARY KEY, n INTEGER, sum REAL)")
        values = ((step, 1, step / 8) for step in range(rows))
        connection.executemany("INSERT INTO points VALUES (?, ?, ?)", values)
        connection.commit()
        for _ in range(times):
            begun_s = time.perf_counter()
            read = connection.execute("SELECT step, n, sum FROM points ORDER BY step").fetchall()
            found.append((time.perf_counter() - begun_s) * 1e3)
            assert len(read) == rows
    path.unlink()
    return found


def increment_us() -> float:
    """Microseconds of adding 1 to a dict's entry, in a loop over one key.

    What count() is compared with: no lock, no clock, no step, no compensated sum.
    """
    seen = []
    for _ in range(REPETITIONS):
        totals: dict[str, float] = {}
        begun_s = time.perf_counter()
        for _ in range(INCREMENTS):
            totals["bench/total"] = totals.get("bench/total", 0.0) + 1.0
        seen.append((time.perf_counter() - begun_s) / INCREMENTS * 1e6)
    return min(seen)
