"""What the recorder takes, and what arrives of it at a real MetricsService."""

import math
import threading
import time
from typing import Any

import numpy as np
import pytest
from headrace.v1 import metrics_pb2 as wire
from structlog.testing import capture_logs

from services.aggregator import reduce
from services.aggregator.batch import decode
from services.common import recorder as module
from services.common.config import Recorder as Settings
from services.common.partials import Count, Observation, Ratio
from tests.services.aggregator.making import deltas
from tests.services.common import recorders
from tests.services.common.recorders import (
    BRISK,
    WAIT_S,
    Bench,
    alone,
    flushed,
    partial_of,
    refusals,
)

bench = recorders.bench


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


def test_several_keys_take_the_same_values() -> None:
    together, apart = alone(), alone()
    for recorder in (together, apart):
        recorder.observe("a", 9.0)  # a key of several may be recorded alone, too
    for values in ([3.0, 0.0, -1.5], [math.nan, 4.0], [math.inf]):
        together.observe_many(("a", "b"), values, step=2)
        apart.observe_many("a", values, step=2)
        apart.observe_many("b", values, step=2)
    found, expected = together.snapshot(), apart.snapshot()
    assert sorted(found) == [("a", 0, 0), ("a", 0, 2), ("b", 0, 2)]
    for series, seen in expected.items():
        other = found[series]
        assert isinstance(seen, Observation)
        assert isinstance(other, Observation)
        seen.last_s = other.last_s = 0.0  # they were called one after the other
        assert other == seen
    together.count("c")
    together.observe_many(("b", "c"), [1.0])
    assert refusals(together) == 1, "c counts"
    taken = together.snapshot()["b", 0, 0]
    assert isinstance(taken, Observation)
    assert taken.n == 1


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
    for moment_s in (now_s - 1, now_s - 2):
        recorder._open.notes.append((("a", 0, 0), Count, moment_s, 1.0, 0.0))
    assert recorder.close(WAIT_S)
    # An interval that ended before it began would be rejected, with both counts.
    assert bench.aggregator.counts() == {"a": 2}


@pytest.mark.parametrize("key", [["a"], {}, None])
def test_what_is_no_key_never_reaches_the_work(bench: Bench, key: Any) -> None:
    recorder, step = bench.recorder(), list[int]()
    with capture_logs():
        recorder.count(key)
        recorder.observe("b", 1, step=step)  # type: ignore[arg-type]
        recorder.count("c")
        assert recorder.close(WAIT_S)
    assert bench.aggregator.counts() == {"c": 1, module.REFUSED: 2}


def test_what_is_noted_belongs_to_the_step_of_its_call() -> None:
    recorder = alone()
    for step in range(3):
        recorder.set_clock(attempt=1, step=step)
        recorder.count("a", step + 1)
        recorder.observe_many("b", [step, step + 1])
    found = recorder.snapshot()
    for step in range(3):
        count, seen = found["a", 1, step], found["b", 1, step]
        assert isinstance(count, Count)
        assert isinstance(seen, Observation)
        assert (count.sum, seen.n, seen.sum, seen.last) == (step + 1, 2, 2 * step + 1, step + 1)


def test_notes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTES_AT_MOST", 10)
    recorder = alone()
    for _ in range(95):
        recorder.count("a")
    assert len(recorder._open.notes) == 5
    found = recorder.snapshot()["a", 0, 0]
    assert isinstance(found, Count)
    assert found.sum == 95


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
