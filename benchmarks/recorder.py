"""What recording costs the work that is measured: microseconds a call, alone and with a sender.

`python benchmarks/recorder.py` prints a table and writes benchmarks/results/recorder.json.
"""

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from headrace.v1 import metrics_pb2, metrics_pb2_grpc

from services.common import grpc_kit
from services.common.config import Network
from services.common.config import Recorder as Settings
from services.common.recorder import Recorder

RESULT = Path(__file__).parent / "results" / "recorder.json"

CALLS = 20_000
"""Of one repetition."""

REPETITIONS = 15
"""The best is reported: what the call costs where nothing else runs, and steadier than a mean."""

THREADS = 4
"""Recording at once, in the contended case."""


class Sink(metrics_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc]
    """Acknowledges everything."""

    def PushDeltas(self, request: Any, context: Any) -> metrics_pb2.PushDeltasResponse:
        """Take a batch."""
        return metrics_pb2.PushDeltasResponse(accepted=len(request.keys))


@contextmanager
def sending() -> Iterator[Recorder]:
    """A recorder that flushes every 50 ms to a server of this process: 40 times the default."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    metrics_pb2_grpc.add_MetricsServiceServicer_to_server(Sink(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc_kit.sync_channel(f"127.0.0.1:{port}", Network()) as channel:
        recorder = Recorder(
            run="bench",
            producer="bench",
            service="trainer",
            settings=Settings(flush_s=0.05),
            channel=channel,
        )
        try:
            yield recorder
        finally:
            recorder.close()
            server.stop(None).wait()


def alone() -> Recorder:
    """A recorder that sends nothing."""
    return Recorder(
        run="bench", producer="bench", service="trainer", settings=Settings(), channel=None
    )


def cost_us(work: Callable[[], None], *, calls: int = CALLS) -> float:
    """Microseconds a call: the best of the repetitions."""
    seen = []
    for _ in range(REPETITIONS):
        begun_s = time.perf_counter()
        work()
        seen.append((time.perf_counter() - begun_s) / calls * 1e6)
    return min(seen)


def counting(recorder: Recorder) -> None:
    """count(), one key."""
    for _ in range(CALLS):
        recorder.count("bench/total")


def spreading(recorder: Recorder) -> None:
    """count(), 100 keys in turn."""
    keys = [f"bench/{index}" for index in range(100)]
    for _ in range(CALLS // len(keys)):
        for key in keys:
            recorder.count(key)


def observing(recorder: Recorder) -> None:
    """observe(), values over three decades."""
    for index in range(CALLS):
        recorder.observe("bench/length", 1 + index % 1000)


def dividing(recorder: Recorder) -> None:
    """ratio()."""
    for _ in range(CALLS):
        recorder.ratio("bench/frac", 1, 2)


def crowding(recorder: Recorder) -> None:
    """count() from several threads at once: the lock contended."""
    threads = [threading.Thread(target=counting, args=(recorder,)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure() -> dict[str, float]:
    """Microseconds by case."""
    quiet, values = alone(), np.random.default_rng(0).lognormal(size=CALLS)
    found = {
        "count": cost_us(lambda: counting(quiet)),
        "count, 100 keys": cost_us(lambda: spreading(quiet)),
        "observe": cost_us(lambda: observing(quiet)),
        "ratio": cost_us(lambda: dividing(quiet)),
        "observe_many, a value": cost_us(lambda: quiet.observe_many("bench/many", values)),
    }
    with sending() as busy:
        found["count, while sending"] = cost_us(lambda: counting(busy))
        found["observe, while sending"] = cost_us(lambda: observing(busy))
        found[f"count, {THREADS} threads, while sending"] = cost_us(
            lambda: crowding(busy), calls=THREADS * CALLS
        )
    return found


def main() -> None:
    """Measure, print, write."""
    found = measure()
    width = max(map(len, found))
    for case, microseconds in found.items():
        print(f"{case:{width}}  {microseconds:6.2f} us")
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "microseconds_a_call": {case: round(value, 3) for case, value in found.items()},
        "calls": CALLS,
        "repetitions": REPETITIONS,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
