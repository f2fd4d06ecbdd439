from typing import Any

import pytest

from services.aggregator.catalogue import CATALOGUE
from services.aggregator.history import Point
from services.aggregator.ingest import Ingest
from services.aggregator.latest import latest
from services.aggregator.lines import Segment, surviving
from services.aggregator.reduce import Reduction
from services.aggregator.series import find_run
from services.aggregator.store import Store
from tests.services.aggregator.making import INF, NAN, NOW_S, Producer, count, observed, ratio
from tests.services.aggregator.test_ingest import ask


def points(
    store: Store, key: str, reduction: Reduction, **query: Any
) -> list[tuple[int, float | None]]:
    return [(point.x, point.value) for point in ask(store, key, reduction, **query).points]


def newest(store: Store, key: str) -> Point | None:
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        found = {each.key: each.point for each in latest(connection, run, catalogue=CATALOGUE)}
        return found[key]


def test_nan_and_infinity_keep_their_steps_and_can_be_told_apart(
    store: Store, ingest: Ingest
) -> None:
    """C27."""
    producer = Producer("p")
    for step, number in ((1, 1.0), (2, NAN), (3, INF)):
        producer.send(ingest, [("grad_norm", observed([number]))], step=step)
    assert ask(store, "grad_norm", "mean").points == (
        Point(1, 1.0),
        Point(2, None, num_nan=1),
        Point(3, None, num_pos_inf=1),
    )
    assert newest(store, "grad_norm") == Point(3, None, num_pos_inf=1)


class TestRates:
    def test_four_generators_at_1000_tokens_a_second_are_4000(
        self, store: Store, ingest: Ingest
    ) -> None:
        for number in range(4):
            generator = Producer(f"generator-{number}", service="generator")
            for second in range(0, 40, 2):
                generator.send(
                    ingest,
                    [("rollout/generated_tok_s", count(2000))],
                    duration_s=2.0,
                    now_s=NOW_S + second + 2 - 0.001,
                )
        by_time = ask(store, "rollout/generated_tok_s", "rate", axis="time", by_producer=True)
        assert [p.value for p in by_time.points] == pytest.approx([4000] * 4, rel=1e-3)
        assert sorted(by_time.by_producer) == [f"generator-{number}" for number in range(4)]
        for alone in by_time.by_producer.values():
            assert [p.value for p in alone] == pytest.approx([1000] * 4, rel=1e-3)
        assert points(store, "rollout/generated_tok_s", "sum", max_points=1) == [(0, 160_000.0)]

    def test_a_step_has_the_rate_of_its_own_seconds(self, store: Store, ingest: Ingest) -> None:
        generator, trainer = Producer("generator-0"), Producer("trainer-0")
        for step, tokens in ((1, 500), (2, 3000), (3, 1000), (4, 700)):
            generator.send(ingest, [("rollout/generated_tok_s", count(tokens))], step=step)
        trainer.send(ingest, [("perf/step_s", observed([2.0]))], step=2)
        trainer.send(ingest, [("perf/step_s", observed([0.5]))], step=3)
        # The first step and the open one have no length, so no rate.
        assert points(store, "rollout/generated_tok_s", "rate") == [
            (1, None),
            (2, 1500.0),
            (3, 2000.0),
            (4, None),
        ]
        assert points(store, "rollout/generated_tok_s", "rate", max_points=1) == [(1, 1600.0)]
        assert newest(store, "rollout/generated_tok_s") == Point(3, 2000.0)

    def test_hardly_any_time_has_no_rate(self, store: Store, ingest: Ingest) -> None:
        Producer("p").send(ingest, [("rollout/generated_tok_s", count(9))], duration_s=0.1)
        assert points(store, "rollout/generated_tok_s", "rate", axis="time") == [(int(NOW_S), None)]
        assert newest(store, "rollout/generated_tok_s") == Point(0, None)


class TestSumLast:
    def test_live_replicas_add_up_also_when_they_flush_out_of_step(
        self, store: Store, ingest: Ingest
    ) -> None:
        one, two = Producer("generator-0"), Producer("generator-1")
        for second, producer, running in ((0, one, 30), (1, two, 12), (2, one, 20), (3, two, 8)):
            producer.send(
                ingest,
                [("rollout/inflight", observed([running]))],
                step=second,
                now_s=NOW_S + second,
            )
        assert points(store, "rollout/inflight", "sum_last") == [
            (0, 30.0),
            (1, 42.0),
            (2, 32.0),
            (3, 28.0),
        ]
        assert newest(store, "rollout/inflight") == Point(3, 28.0)

    def test_a_replica_that_fell_silent_is_not_alive(self, store: Store, ingest: Ingest) -> None:
        Producer("generator-0").send(ingest, [("rollout/inflight", observed([30]))], step=0)
        Producer("generator-1").send(
            ingest, [("rollout/inflight", observed([5]))], step=1, now_s=NOW_S + 60
        )
        assert points(store, "rollout/inflight", "sum_last") == [(0, 30.0), (1, 5.0)]


class TestAttempts:
    def test_a_step_belongs_to_the_latest_attempt_that_had_begun_by_it(self) -> None:
        assert surviving({1: 0, 2: 40, 3: 20}) == (Segment(3, 20, None), Segment(1, 0, 20))
        assert surviving({1: 0, 2: 0}) == (Segment(2, 0, None),)
        assert surviving({}) == ()

    def test_by_step_the_owner_answers_by_time_all_attempts(
        self, store: Store, ingest: Ingest
    ) -> None:
        trainer = Producer("trainer-0")
        for step in range(5):
            trainer.send(
                ingest,
                [("sample/dropped_stale_total", count(1)), ("loss", observed([1.0]))],
                step=step,
                attempt=1,
            )
        for step in (3, 4):
            again = Producer("trainer-0", boot_id="boot-2")
            again.send(
                ingest,
                [("sample/dropped_stale_total", count(10))],
                step=step,
                attempt=2,
                now_s=NOW_S + 60,
                sequence=step,
            )
        assert points(store, "sample/dropped_stale_total", "sum") == [
            (0, 1.0),
            (1, 1.0),
            (2, 1.0),
            (3, 10.0),
            (4, 10.0),
        ]
        by_time = points(store, "sample/dropped_stale_total", "sum", axis="time")
        assert [number for _, number in by_time] == [5.0, 20.0]
        # The newest loss is of the surviving line: attempt 2 has not recorded one yet.
        assert newest(store, "loss") == Point(2, 1.0)
        assert newest(store, "sample/dropped_stale_total") == Point(4, 10.0)


class TestWindows:
    def test_more_steps_than_points_pool_into_windows(self, store: Store, ingest: Ingest) -> None:
        producer = Producer("p")
        for step in range(10):
            producer.send(ingest, [("kl", ratio(step, 10))], step=step)
        found = ask(store, "kl", "ratio", max_points=4)
        assert found.width == 3
        assert [(p.x, p.value) for p in found.points] == [(0, 0.1), (3, 0.4), (6, 0.7), (9, 0.9)]

    def test_steps_without_a_value_have_no_point(self, store: Store, ingest: Ingest) -> None:
        producer = Producer("p")
        for step in (2**61, 5):
            producer.send(ingest, [("loss", observed([1.0]))], step=step)
        found = ask(store, "loss", "mean", max_points=2)
        assert [point.value for point in found.points] == [1.0, 1.0]
        first, second = (point.x for point in found.points)
        assert first == 5
        assert second <= 2**61 < second + found.width

    def test_windows_by_time_are_in_seconds(self, store: Store, ingest: Ingest) -> None:
        producer = Producer("p")
        for number in range(6):
            producer.send(ingest, [("loss", observed([number]))], now_s=NOW_S + 10 * number)
        found = ask(store, "loss", "max", axis="time", max_points=3)
        assert found.width == 20
        start = int(NOW_S)
        assert [(p.x, p.value) for p in found.points] == [
            (start, 1.0),
            (start + 20, 3.0),
            (start + 40, 5.0),
        ]


def test_the_latest_of_a_percentile_free_list_needs_no_histogram(
    store: Store, ingest: Ingest
) -> None:
    Producer("p").send(ingest, [("perf/step_s", observed([1.0, 3.0]))], step=4)
    assert newest(store, "perf/step_s") == Point(4, 2.0)
