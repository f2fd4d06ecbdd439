"""How the recorder sends: batches repeated, merged, dropped and counted while a real MetricsService
is away, hangs or refuses."""

import threading
import time

import grpc
import pytest
from headrace.v1 import metrics_pb2 as wire
from structlog.testing import capture_logs

from services.aggregator import reduce
from services.common import grpc_kit
from services.common import recorder as module
from services.common.config import Network
from services.common.config import Recorder as Settings
from services.common.recorder import Recorder
from tests.services.common import recorders
from tests.services.common.recorders import (
    BRISK,
    PATIENT,
    WAIT_S,
    Bench,
    alone,
    ended,
    flushed,
    until,
)

bench = recorders.bench


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
