"""The recorder against a real MetricsService on the loopback."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from headrace.v1 import metrics_pb2 as wire
from headrace.v1 import metrics_pb2_grpc
from structlog.testing import capture_logs

from services.aggregator import reduce
from services.aggregator.batch import decode
from services.aggregator.rows import pool
from services.common import grpc_kit
from services.common import recorder as module
from services.common.config import Network
from services.common.config import Recorder as Settings
from services.common.partials import Count, Observation, Ratio
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


# What is recorded


def test_each_instrument_arrives_with_its_stamps(bench: Bench) -> None:
    recorder = bench.recorder()
    before_s = time.monotonic()
    recorder.set_clock(attempt=2, step=7)
    recorder.count("a/total", 3)
    recorder.count("a/total")
    recorder.ratio("a/frac", 1, 4)
    recorder.ratio("a/frac", 2, 4)
    recorder.observe("a/length", 3)
    recorder.observe_many("a/length", np.array([-1, 0, 5]))
    recorder.observe("a/length", 2.0, step=6)
    assert recorder.close(WAIT_S)
    (batch,) = bench.aggregator.batches.values()
    assert (batch.run, batch.producer, batch.service) == ("demo", "scorer-1", "scorer")
    assert (batch.sequence, len(batch.boot_id)) == (1, 32)
    sent = deltas(decode(batch))
    found = {(delta.key, delta.attempt, delta.step): partial_of(delta) for delta in sent}
    assert found["a/total", 2, 7] == reduce.Count(reduce.Sum(4.0))
    assert found["a/frac", 2, 7] == reduce.Ratio(reduce.Sum(3.0), reduce.Sum(8.0))
    seen = found["a/length", 2, 7]
    assert isinstance(seen, reduce.Observation)
    assert (seen.n, seen.sum.value, seen.minimum, seen.maximum, seen.last) == (4, 7, -1, 5, 5)
    buckets = seen.histogram
    assert sum(buckets.positive.values()) == 2
    assert (buckets.negative, buckets.zeros) == ({0: 1}, 1)
    before = found["a/length", 2, 6]
    assert isinstance(before, reduce.Observation)
    assert before.last == 2.0
    for delta in sent:
        assert before_s <= delta.begin_s <= delta.end_s <= batch.now_s
    assert before_s <= seen.last_at_s <= batch.now_s


def test_nothing_observed_is_nothing_sent() -> None:
    recorder = alone()
    recorder.ratio("a", 0, 0)
    recorder.observe_many("b", [])
    assert recorder.snapshot() == {}


def test_nan_and_infinities_are_counted_where_a_value_may_be_one() -> None:
    recorder = alone()
    for value in (math.nan, math.inf, -math.inf, 1.0):
        recorder.observe("a", value)
    found = recorder.snapshot()["a", 0, 0]
    assert isinstance(found, Observation)
    assert (found.n, found.num_nan, found.num_pos_inf, found.num_neg_inf) == (1, 1, 1, 1)
    assert refusals(recorder) == 0


def test_a_numerator_without_a_denominator_is_refused_and_counted() -> None:
    recorder = alone()
    with capture_logs() as logs:
        for _ in range(3):
            recorder.ratio("a", 2, 0)
    assert refusals(recorder) == 3
    assert ("a", 0, 0) not in recorder.snapshot()
    assert [(log["key"], log["why"]) for log in logs] == [
        ("a", "numerator 2.0 without a denominator")
    ]


@pytest.mark.parametrize("value", [None, "many", object(), [1, 2], math.nan, math.inf, 10**400])
def test_what_is_no_number_never_reaches_the_work(value: Any) -> None:
    recorder = alone()
    recorder.count("a")
    recorder.ratio("b", 1, 2)
    recorder.count("a", value)
    recorder.ratio("b", value, 2)
    recorder.ratio("b", 1, value)
    expected = 3
    if not isinstance(value, float):
        recorder.observe("c", value)
        recorder.observe_many("c", [1.0, value])
        expected += 2
    assert refusals(recorder) == expected
    found = recorder.snapshot()
    assert isinstance(found["a", 0, 0], Count)
    assert found["a", 0, 0].sum == 1
    assert isinstance(found["b", 0, 0], Ratio)
    assert found["b", 0, 0].denominator == 2
    assert ("c", 0, 0) not in found


def test_a_key_has_one_instrument_in_all_steps_and_batches(bench: Bench) -> None:
    recorder = bench.recorder(BRISK)
    with capture_logs() as logs:
        recorder.count("a")
        recorder.observe("a", 5.0)
        recorder.observe("a", 5.0, step=9)
        flushed(recorder, "a")
        recorder.ratio("a", 1, 2)
        recorder.observe(module.REFUSED, 3.0)
        assert recorder.close(WAIT_S)
    assert bench.aggregator.counts() == {"a": 1, module.REFUSED: 4}
    assert [log["key"] for log in logs if log["event"] == "metric refused"] == ["a", module.REFUSED]


def test_a_step_that_cannot_be_costs_its_own_partial_only(bench: Bench) -> None:
    recorder = bench.recorder()
    recorder.count("a", step=-1)
    recorder.count("a", step=1.5)  # type: ignore[arg-type]
    recorder.count("a", 2, step=np.int64(3))  # type: ignore[arg-type]
    assert recorder.close(WAIT_S)
    assert bench.aggregator.counts() == {"a": 2, module.REFUSED: 2}


def test_a_thread_whose_moment_was_earlier_may_come_second(bench: Bench) -> None:
    recorder = bench.recorder()
    now_s = time.monotonic()
    with recorder._lock:
        for moment_s in (now_s - 1, now_s - 2):
            recorder._partial("a", Count, None, moment_s).total.add(1)
    assert recorder.close(WAIT_S)
    # An interval that ended before it began would be rejected, with both counts.
    assert bench.aggregator.counts() == {"a": 2}


def test_threads_lose_nothing(bench: Bench) -> None:
    recorder, each = bench.recorder(Settings(flush_s=0.005)), 10_000

    def work(thread: int) -> None:
        for index in range(each):
            recorder.count("a")
            recorder.ratio("b", 1, 2)
            recorder.observe("c", index)
            if index % 1000 == 0:
                recorder.set_clock(attempt=1, step=index // 1000)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.close(WAIT_S)
    assert bench.aggregator.counts()["a"] == 4 * each
    ratios = bench.aggregator.partials("b", reduce.Ratio)
    assert sum(ratio.numerator.value for ratio in ratios) == 4 * each
    assert sum(ratio.denominator.value for ratio in ratios) == 8 * each
    seen = bench.aggregator.partials("c", reduce.Observation)
    assert sum(partial.n for partial in seen) == 4 * each
    assert sum(partial.sum.value for partial in seen) == 4 * each * (each - 1) / 2
    assert bench.aggregator.sequences() == list(range(1, len(bench.aggregator.batches) + 1))


# How it is sent


def test_close_sends_what_is_left_without_waiting_for_the_interval(bench: Bench) -> None:
    recorder = bench.recorder(PATIENT)
    recorder.count("a")
    assert recorder.close(WAIT_S)
    assert recorder.close(WAIT_S)
    assert bench.aggregator.counts() == {"a": 1}


def test_a_lost_answer_is_asked_for_again_under_the_same_name(bench: Bench) -> None:
    bench.aggregator.answers = lambda call: "lost" if call % 2 else "ok"
    recorder = bench.recorder(BRISK)
    for index in range(3):
        recorder.count("a", step=index)
        flushed(recorder, "a")
    assert recorder.close(WAIT_S)
    assert bench.aggregator.counts() == {"a": 3}
    calls = bench.aggregator.calls
    assert [call.sequence for call in calls] == [1, 1, 2, 2, 3, 3]
    for first, again in zip(calls[::2], calls[1::2], strict=True):
        assert first.now_s < again.now_s  # what is sent late says so
        again.now_s = first.now_s
        assert first == again


@pytest.mark.parametrize("outage", ["away", "lost"])
def test_a_full_buffer_is_merged_and_totals_stay_exact(bench: Bench, outage: str) -> None:
    """Also when the aggregator had taken the first batch: what was sent is never merged."""
    bench.aggregator.answers = lambda call: outage
    recorder = bench.recorder(Settings(flush_s=0.005, buffer_partials=100))
    keys = [f"k{index}" for index in range(30)]
    for round_ in range(20):
        for key in keys:
            recorder.count(key, round_ + 1)
            recorder.observe(f"{key}/seen", round_)
        flushed(recorder, *keys)
    bench.aggregator.answers = lambda call: "ok"
    assert recorder.close(WAIT_S)

    counts = bench.aggregator.counts()
    assert {counts[key] for key in keys} == {20 * 21 / 2}
    seen = bench.aggregator.partials("/seen", reduce.Observation)
    assert sum(partial.n for partial in seen) == 20 * len(keys)
    assert sum(partial.sum.value for partial in seen) == len(keys) * sum(range(20))
    assert max(partial.maximum or 0 for partial in seen) == 19
    assert counts[module.MERGED] > 0
    assert module.DROPPED not in counts
    assert bench.aggregator.sequences() == list(range(1, len(bench.aggregator.batches) + 1))
    assert len(bench.aggregator.batches) < 20


def test_what_no_merging_can_hold_is_dropped_oldest_first_and_counted(bench: Bench) -> None:
    bench.aggregator.answers = lambda call: "away"
    recorder = bench.recorder(Settings(flush_s=0.005, buffer_partials=100))
    steps = 600
    for step in range(steps):
        recorder.count("a", step=step)
        if step % 30 == 0:
            flushed(recorder, "a")
    flushed(recorder, "a")
    bench.aggregator.answers = lambda call: "ok"
    assert recorder.close(WAIT_S)
    counts = bench.aggregator.counts()
    assert counts[module.DROPPED] > 0
    assert counts["a"] + counts[module.DROPPED] == steps
    arrived = sorted(delta.step for delta in bench.aggregator.deltas if delta.key == "a")
    assert arrived[-50:] == list(range(steps - 50, steps))
    assert bench.aggregator.sequences() == list(range(1, len(bench.aggregator.batches) + 1))


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(bench: Bench) -> None:
    bench.aggregator.answers = lambda call: "away" if call <= 5 else "ok"
    with capture_logs() as logs:
        recorder = bench.recorder(BRISK)
        recorder.count("a")
        until(lambda: len(bench.aggregator.calls) > 5)
        assert recorder.close(WAIT_S)
    assert [log["event"] for log in logs] == [
        "metrics wait for the aggregator",
        "metrics reach the aggregator again",
    ]


def test_close_gives_up_on_an_aggregator_that_is_away(bench: Bench) -> None:
    bench.aggregator.answers = lambda call: "away"
    recorder = bench.recorder()
    recorder.count("a")
    with capture_logs():
        assert not recorder.close(0.2)
        ended(recorder)


def test_close_gives_up_on_an_aggregator_that_hangs(bench: Bench) -> None:
    released = threading.Event()

    def hang(call: int) -> str:
        released.wait(WAIT_S)
        return "away"

    bench.aggregator.answers = hang
    recorder = bench.recorder()
    recorder.count("a")
    with capture_logs():
        try:
            assert not recorder.close(0.2)
        finally:
            released.set()
        ended(recorder)


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED]
)
def test_a_batch_refused_for_good_does_not_hold_up_the_next(
    bench: Bench, code: grpc.StatusCode
) -> None:
    bench.aggregator.answers = lambda call: code if call == 1 else "ok"
    recorder = bench.recorder(BRISK)
    with capture_logs() as logs:
        recorder.count("a", 5)
        flushed(recorder, "a")
        recorder.count("b")
        assert recorder.close(WAIT_S)
    assert bench.aggregator.counts() == {"b": 1, module.DROPPED: 1}
    (log,) = [log for log in logs if log["event"] == "metrics dropped"]
    assert (log["partials"], log["why"]) == (1, f"{code.name}: refused by the test")


def test_a_batch_above_the_message_limit_is_said_and_dropped(bench: Bench) -> None:
    recorder = bench.recorder(network=Network(max_message_bytes=1 << 20))
    recorder.count("a")
    recorder.event(wire.GroupEvent(group_id="0.1.1.1", reason="x" * (2 << 20)))
    with capture_logs() as logs:
        assert recorder.close(WAIT_S)
    assert [log["event"] for log in logs] == ["metrics dropped"]
    assert bench.aggregator.counts() == {module.DROPPED: 1}


def test_a_rejected_key_is_logged_once(bench: Bench) -> None:
    bench.aggregator.rejects = [wire.Rejection(key="b", reason="not declared")]
    recorder = bench.recorder(BRISK)
    with capture_logs() as logs:
        for _ in range(3):
            recorder.count("b")
            flushed(recorder, "b")
        assert recorder.close(WAIT_S)
    rejected = [log for log in logs if log["event"] == "metric rejected"]
    assert [(log["key"], log["why"]) for log in rejected] == [("b", "not declared")]


def test_a_closed_channel_is_not_a_crash_of_the_thread(bench: Bench) -> None:
    channel = grpc_kit.sync_channel(bench.address, Network())
    recorder = Recorder(
        run="demo", producer="p", service="scorer", settings=PATIENT, channel=channel
    )
    bench.recorders.append(recorder)
    recorder.count("a")
    channel.close()
    with capture_logs():
        assert not recorder.close(0.2)
        ended(recorder)


def test_samplers_run_before_each_batch_and_a_failing_one_is_said(bench: Bench) -> None:
    recorder = bench.recorder()

    def fail() -> None:
        raise RuntimeError("no such gauge")

    recorder.before_flush(fail)
    recorder.before_flush(lambda: recorder.observe("gauge", 5))
    with capture_logs() as logs:
        assert recorder.close(WAIT_S)
    assert [delta.key for delta in bench.aggregator.deltas] == ["gauge"]
    assert [log["event"] for log in logs] == ["a metric sampler failed"]


# Group events


def test_events_are_stamped_and_are_copies(bench: Bench) -> None:
    recorder = bench.recorder()
    event = wire.GroupEvent(group_id="0.1.1.1", state=wire.GROUP_STATE_SCORED, row_index=4)
    recorder.event(event)
    event.group_id, event.worker = "0.2.1.1", "another"
    recorder.event(event)
    assert recorder.close(WAIT_S)
    first, second = bench.aggregator.events
    assert (first.group_id, first.worker, first.row_index) == ("0.1.1.1", "scorer-1", 4)
    assert (second.group_id, second.worker) == ("0.2.1.1", "another")
    assert 0 < first.at_s <= second.at_s


def test_too_many_events_are_compacted_to_the_highest_state_of_each_group(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVENTS_KEPT", 40)
    bench.aggregator.answers = lambda call: "away"
    recorder = bench.recorder(Settings(flush_s=0.005))
    groups = [f"0.{index}.1.1" for index in range(30)]
    states = [wire.GROUP_STATE_SCORED, wire.GROUP_STATE_TRAINED, wire.GROUP_STATE_QUEUED]
    recorder.count("first")
    flushed(recorder, "first")
    until(lambda: len(bench.aggregator.calls) > 0)
    for state in states:
        for group in groups:
            recorder.event(wire.GroupEvent(group_id=group, state=state))
        recorder.count("mark")
        flushed(recorder, "mark")
    bench.aggregator.answers = lambda call: "ok"
    assert recorder.close(WAIT_S)
    events = bench.aggregator.events
    assert len(events) < 90
    highest = dict.fromkeys(groups, 0)
    for event in events:
        highest[event.group_id] = max(highest[event.group_id], event.state)
    assert set(highest.values()) == {wire.GROUP_STATE_TRAINED}


def test_a_flush_sends_at_once_and_waits_for_the_answer(bench: Bench) -> None:
    recorder = bench.recorder(PATIENT)
    for number in (1, 2):
        recorder.count("dispatched_total")
        assert recorder.flush(WAIT_S)
        assert bench.aggregator.counts()["dispatched_total"] == number
    assert recorder.flush(WAIT_S), "nothing to send is sent at once"
    assert recorder.close()
    assert bench.aggregator.sequences() == [1, 2]


def test_a_flush_does_not_wait_for_an_aggregator_that_is_away(bench: Bench) -> None:
    bench.aggregator.answers = lambda call: "away"
    recorder = bench.recorder(PATIENT)
    recorder.count("dispatched_total")
    assert not recorder.flush(WAIT_S)
    begin_s = time.monotonic()
    assert not recorder.flush(WAIT_S)
    assert time.monotonic() - begin_s < WAIT_S / 2
    bench.aggregator.answers = lambda call: "ok"
    assert recorder.close()
    assert bench.aggregator.counts()["dispatched_total"] == 1


def test_a_flush_of_a_recorder_that_sends_nothing_is_done() -> None:
    assert alone().flush(0)
