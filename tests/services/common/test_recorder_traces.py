"""Traces on their way: behind the metrics, in batches of bounded size, dropped and counted."""

import grpc
import pytest
from headrace.v1 import trace_pb2

from services.common import recorder as module
from services.common.config import Network
from services.common.recorder import Recorder
from tests.services.common import recorders
from tests.services.common.recorders import BRISK, WAIT_S, Bench, alone
from tests.services.scorer.measured import values

bench = recorders.bench


def trace_of(number: int, *, size_bytes: int = 100) -> trace_pb2.RolloutTrace:
    """About so large."""
    made = trace_pb2.RolloutTrace(group_id=f"0.{number}.1.1")
    made.rollout.rollout_id = f"0.{number}.1.1/0"
    made.rollout.completion.add(role="assistant", content="x" * size_bytes)
    return made


def sent(bench: Bench) -> list[list[str]]:
    """The traces of each batch."""
    batches = sorted(bench.aggregator.batches.items())
    return [[each.rollout.rollout_id for each in batch.traces] for _, batch in batches]


def test_traces_travel_with_metrics(bench: Bench) -> None:
    recorder = bench.recorder()
    recorder.count("a")
    assert recorder.trace(trace_of(0))
    assert recorder.close(WAIT_S)
    assert sent(bench) == [["0.0.1.1/0"]]
    [batch] = bench.aggregator.batches.values()
    assert list(batch.keys) == ["a"]
    assert 0 < batch.traces[0].at_s <= batch.now_s


def test_many_traces_are_several_batches_and_metrics_are_in_the_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRACES_AT_ONCE_BYTES", 2500)
    recorder = bench.recorder()
    recorder.count("a")
    for number in range(5):
        assert recorder.trace(trace_of(number, size_bytes=5000 if number == 2 else 1000))
    assert recorder.close(WAIT_S)
    names = [f"0.{number}.1.1/0" for number in range(5)]
    # One larger than a batch's share has a batch of its own.
    assert sent(bench) == [names[:2], names[2:3], names[3:]]
    assert bench.aggregator.sequences() == [1, 2, 3]
    assert bench.aggregator.counts() == {"a": 1.0}
    assert len(bench.aggregator.batches[min(bench.aggregator.batches)].keys) == 1


def test_a_full_buffer_drops_the_new_one_and_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRACES_KEPT_BYTES", 3000)
    recorder = alone()
    kept = [recorder.trace(trace_of(number, size_bytes=1000)) for number in range(4)]
    assert kept == [True, True, False, False]
    assert values(recorder) == {"recorder/trace_dropped/buffer_full": 2}
    assert len(recorder._take_traces()) == 2
    assert recorder.trace(trace_of(9, size_bytes=2500)), "there is room again"


def test_traces_survive_an_aggregator_that_is_away_and_come_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRACES_AT_ONCE_BYTES", 2500)
    # Kept, and the answer lost; then away; then well.
    bench.aggregator.answers = lambda call: {1: "lost", 2: "away", 3: "away"}.get(call, "ok")
    recorder = bench.recorder(BRISK)
    for number in range(5):
        recorder.count("a")
        assert recorder.trace(trace_of(number, size_bytes=1000))
    assert recorder.close(WAIT_S)
    found = [name for batch in sent(bench) for name in batch]
    assert found == [f"0.{number}.1.1/0" for number in range(5)]
    assert bench.aggregator.counts()["a"] == 5
    sequences = bench.aggregator.sequences()
    assert sequences == list(range(1, len(sequences) + 1))


def test_traces_of_a_batch_that_is_refused_are_counted(bench: Bench) -> None:
    bench.aggregator.answers = lambda call: grpc.StatusCode.INVALID_ARGUMENT if call == 1 else "ok"
    recorder = bench.recorder()
    assert recorder.trace(trace_of(0))
    assert recorder.trace(trace_of(1))
    assert recorder.close(WAIT_S)
    assert sent(bench) == [[]]
    assert bench.aggregator.counts()["recorder/trace_dropped/refused"] == 2


def test_the_largest_traces_fit_the_smallest_message(bench: Bench) -> None:
    """Traces.max_bytes is at most half of network.max_message_bytes."""
    recorder = bench.recorder(network=Network(max_message_bytes=1 << 20))
    for number in range(4):
        assert recorder.trace(trace_of(number, size_bytes=(512 << 10) - 200))
    assert recorder.close(WAIT_S)
    assert [len(batch) for batch in sent(bench)] == [1, 1, 1, 1]


def test_nothing_is_sent_where_nothing_was_traced(bench: Bench) -> None:
    recorder: Recorder = bench.recorder()
    assert recorder.close(WAIT_S)
    assert bench.aggregator.calls == []
