"""A real MetricsService on the loopback for tests of the recorder, and what they ask it."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TypeVar

import grpc
import pytest
from headrace.v1 import metrics_pb2 as wire
from headrace.v1 import metrics_pb2_grpc

from services.aggregator import reduce
from services.aggregator.batch import decode
from services.aggregator.rows import pool
from services.common import grpc_kit
from services.common import recorder as module
from services.common.config import Network
from services.common.config import Recorder as Settings
from services.common.partials import Count
from services.common.recorder import Recorder
from tests.services.aggregator.making import Delta, deltas

WAIT_S = 60.0
"""A machine may be slow; what takes longer has failed."""

BRISK = Settings(flush_s=0.01)
PATIENT = Settings(flush_s=3600)
"""Nothing is sent before close()."""


P = TypeVar("P", reduce.Count, reduce.Ratio, reduce.Observation)


def partial_of(delta: Delta) -> reduce.Partial:
    """What a delta says."""
    return pool(delta.instrument, [delta.row])


class Aggregator(metrics_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc]
    """Keeps each batch once, by its name. `answers` decides what becomes of a call:

    "ok"; "lost": kept, then the answer is lost; "away": not kept; or a status code.
    """

    def __init__(self) -> None:
        self.answers: Callable[[int], str | grpc.StatusCode] = lambda call: "ok"
        self.calls: list[wire.PushDeltasRequest] = []
        self.batches: dict[tuple[str, str, int], wire.PushDeltasRequest] = {}
        self.rejects: list[wire.Rejection] = []

    def PushDeltas(self, request: Any, context: Any) -> wire.PushDeltasResponse:
        self.calls.append(request)
        answer = self.answers(len(self.calls))
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, "refused by the test")
        if answer == "away":
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        name = (request.producer, request.boot_id, request.sequence)
        known = name in self.batches
        self.batches.setdefault(name, request)
        if answer == "lost":
            context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        return wire.PushDeltasResponse(duplicate=known, rejected=self.rejects)

    @property
    def deltas(self) -> list[Delta]:
        return [delta for batch in self.batches.values() for delta in deltas(decode(batch))]

    @property
    def events(self) -> list[wire.GroupEvent]:
        return [event for batch in self.batches.values() for event in batch.events]

    def counts(self) -> dict[str, float]:
        """Sum of all counts, by key."""
        totals: dict[str, float] = {}
        for delta in self.deltas:
            partial = partial_of(delta)
            if isinstance(partial, reduce.Count):
                totals[delta.key] = totals.get(delta.key, 0.0) + partial.sum.value
        return totals

    def partials(self, key: str, kind: type[P]) -> list[P]:
        """The partials of one instrument whose key ends so."""
        found = [partial_of(delta) for delta in self.deltas if delta.key.endswith(key)]
        return [each for each in found if isinstance(each, kind)]

    def sequences(self) -> list[int]:
        return sorted(sequence for _, _, sequence in self.batches)


@dataclasses.dataclass
class Bench:
    """An aggregator, and recorders that send to it."""

    aggregator: Aggregator
    address: str
    recorders: list[Recorder] = dataclasses.field(default_factory=list)

    def recorder(self, settings: Settings = PATIENT, network: Network | None = None) -> Recorder:
        made = Recorder(
            run="demo",
            producer="scorer-1",
            service="scorer",
            settings=settings,
            channel=grpc_kit.sync_channel(self.address, network or Network()),
        )
        self.recorders.append(made)
        return made


def ended(recorder: Recorder) -> None:
    """Wait for its thread: a log line of a later moment would be another test's."""
    assert recorder._thread is not None
    recorder._thread.join(WAIT_S)
    assert not recorder._thread.is_alive()


@pytest.fixture
def bench() -> Iterator[Bench]:
    aggregator = Aggregator()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    metrics_pb2_grpc.add_MetricsServiceServicer_to_server(aggregator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    made = Bench(aggregator, f"127.0.0.1:{port}")
    yield made
    server.stop(None).wait()
    for recorder in made.recorders:
        recorder.close(0)
        ended(recorder)


def alone() -> Recorder:
    """A recorder that sends nothing."""
    return Recorder(
        run="demo", producer="scorer-1", service="scorer", settings=PATIENT, channel=None
    )


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def flushed(recorder: Recorder, *keys: str) -> None:
    """Wait until the open partials of these keys are in a batch."""
    until(lambda: not any(key in keys for key, _, _ in recorder.snapshot()))


def refusals(recorder: Recorder) -> float:
    found = recorder.snapshot().get((module.REFUSED, 0, 0), Count())
    assert isinstance(found, Count)
    return found.sum
