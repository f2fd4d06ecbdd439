"""Roll-ups against the fine rows that they are made of: a query must not tell which it has read."""

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from sqlalchemy import delete, func, select

from services.aggregator import schema
from services.aggregator.batch import Batch, decode
from services.aggregator.history import History, Query, history
from services.aggregator.ingest import Ingest
from services.aggregator.reduce import Instrument, Reduction
from services.aggregator.rollup import Roller
from services.aggregator.series import find_run, find_series
from services.aggregator.store import Store
from tests.services.aggregator.making import NOW_S, Producer, count, observed, ratio

STEPS = 700
"""Ten blocks of 64, and one roll-up of 512 that is complete."""

ASKED: dict[Instrument, tuple[Reduction, ...]] = {
    "count": ("sum", "rate"),
    "observation": ("mean", "max", "p95", "last", "sum_last"),
    "ratio": ("ratio",),
}

KEYS: dict[Instrument, str] = {
    "count": "rollout/generated_tok_s",
    "observation": "reward",
    "ratio": "kl",
}


def fill(ingest: Ingest, *, steps: range, seed: int, attempt: int = 1, at_s: float = NOW_S) -> None:
    """Two replicas and a trainer, 7 s a step, with holes, NaNs and replicas that come and go."""
    random, batches = Random(seed), list[tuple[Batch, float]]()
    replicas = [Producer(f"generator-{n}", service="generator", boot_id=str(seed)) for n in (0, 1)]
    trainer = Producer("trainer-0", boot_id=str(seed))
    for step in steps:
        now_s = at_s + 7.0 * (step - steps.start)
        for number, replica in enumerate(replicas):
            if (step // 100 + number) % 3 == 0:
                continue
            values = [random.choice([random.gauss(0, 3), 0.0]) for _ in range(random.randrange(4))]
            request = replica.request(
                [
                    (KEYS["count"], count(random.randrange(1000))),
                    (KEYS["observation"], observed([*values, float("nan")] if values else values)),
                    (KEYS["ratio"], ratio(random.random(), random.randrange(1, 5))),
                    ("rollout/inflight", observed([random.randrange(64)])),
                ],
                step=step,
                attempt=attempt,
            )
            batches.append((decode(request), now_s))
        if step != steps.start and step % 50:
            length = [("perf/step_s", observed([7.0 + random.random()]))]
            request = trainer.request(length, step=step, attempt=attempt)
            batches.append((decode(request), now_s))
    for group in range(0, len(batches), 50):
        ingest.take_all(batches[group : group + 50])


def roll(store: Store) -> None:
    roller = Roller(store)
    while roller.roll(budget_s=10.0):
        pass


def answers(store: Store) -> dict[Any, History]:
    """Everything that can be asked, at several widths and of several ranges."""
    found = {}
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        for instrument, key in KEYS.items():
            series = find_series(connection, run, key)
            assert series is not None
            for reduction in ASKED[series.instrument]:
                for axis, bounds, points in itertools.product(
                    ("step", "time"), (None, (37.0, 641.0)), (1000, 11, 1)
                ):
                    since, until = bounds or (None, None)
                    if axis == "time" and bounds is not None:
                        since, until = NOW_S + bounds[0], NOW_S + 7 * bounds[1]
                    query = Query(
                        "step" if axis == "step" else "time",
                        reduction,
                        since=since,
                        until=until,
                        max_points=points,
                        by_producer=points == 11,
                    )
                    named = (instrument, reduction, axis, since, until, points)
                    found[named] = history(connection, run, series, query)
    return found


def assert_same(rolled: dict[Any, History], fine: dict[Any, History]) -> None:
    for named, each in fine.items():
        other = rolled[named]
        assert (other.width, other.next_x) == (each.width, each.next_x), named
        for points, expected in (
            (other.points, each.points),
            *((other.by_producer[name], own) for name, own in each.by_producer.items()),
        ):
            assert len(points) == len(expected), named
            for point, right in zip(points, expected, strict=True):
                for part in ("value", "low", "high"):
                    value = getattr(right, part)
                    assert getattr(point, part) == (
                        None if value is None else pytest.approx(value, rel=1e-12, abs=1e-12)
                    ), (named, part, right)
                assert replace(point, value=None, low=None, high=None) == replace(
                    right, value=None, low=None, high=None
                )
        assert other.by_producer.keys() == each.by_producer.keys()


def number_of(store: Store, table: Any) -> int:
    with store.engine.begin() as connection:
        return connection.scalar(select(func.count()).select_from(table)) or 0


def test_a_query_does_not_tell_roll_ups_from_fine_rows(store: Store, ingest: Ingest) -> None:
    fill(ingest, steps=range(STEPS), seed=1)
    fine = answers(store)
    assert number_of(store, schema.rollups) == 0
    roll(store)
    with store.engine.begin() as connection:
        lanes = connection.execute(
            select(schema.stale.c.series_id, schema.stale.c.lane, func.count()).group_by(
                schema.stale.c.series_id, schema.stale.c.lane
            )
        ).all()
        levels = set(connection.scalars(select(schema.rollups.c.level).distinct()))
    assert {number for *_, number in lanes} == {1}, "only the newest block of each is not rolled up"
    assert levels == {*schema.STEP_LEVELS, *schema.TIME_LEVELS}
    assert_same(answers(store), fine)
    # The proof that roll-ups were read: most fine rows are not needed.
    with store.engine.begin() as connection:
        steps = schema.partials.c.step
        connection.execute(delete(schema.partials).where(steps > 8, steps < 512))
    named = ("count", "sum", "step", None, None, 11)
    assert answers(store)[named].points == fine[named].points


def test_a_late_partial_amends_the_roll_ups(store: Store, ingest: Ingest) -> None:
    fill(ingest, steps=range(STEPS), seed=1)
    roll(store)
    late = Producer("generator-9", service="generator")
    for step in (3, 200, 511):
        late.send(
            ingest,
            [(KEYS["count"], count(5)), (KEYS["observation"], observed([40.0]))],
            step=step,
            age_s=900.0,
            now_s=NOW_S + 7.0 * STEPS,
        )
    before_rolling = answers(store)
    roll(store)
    after = answers(store)
    assert_same(after, before_rolling)
    with store.engine.begin() as connection:
        connection.execute(delete(schema.rollups))
        everything = select(
            schema.partials.c.series_id,
            schema.partials.c.attempt,
            schema.partials.c.step // schema.STEP_BLOCK,
        ).distinct()
        connection.execute(delete(schema.stale))
        connection.execute(
            schema.stale.insert(),
            [
                dict(zip(("series_id", "lane", "block"), r, strict=True))
                for r in connection.execute(everything)
            ],
        )
        times = select(
            schema.partials.c.series_id, schema.partials.c.bucket // schema.TIME_BLOCK
        ).distinct()
        connection.execute(
            schema.stale.insert(),
            [
                {"series_id": series, "lane": schema.TIME_LANE, "block": block}
                for series, block in connection.execute(times)
            ],
        )
    assert_same(after, answers(store))


def test_attempts_share_steps_but_not_roll_ups(store: Store, ingest: Ingest) -> None:
    fill(ingest, steps=range(300), seed=1)
    fill(ingest, steps=range(150, 400), seed=2, attempt=2, at_s=NOW_S + 3000)
    fine = answers(store)
    roll(store)
    assert_same(answers(store), fine)


def test_a_restart_finds_what_is_left_to_roll_up(store: Store, ingest: Ingest) -> None:
    fill(ingest, steps=range(200), seed=1)
    fine = answers(store)
    again = Store.open(store.engine.url.render_as_string())
    roll(again)
    again.close()
    assert number_of(store, schema.rollups) > 0
    assert_same(answers(store), fine)


def test_a_restarted_aggregator_goes_on_without_reading_what_it_wrote(
    store: Store, ingest: Ingest
) -> None:
    producer = Producer("p")
    producer.send(ingest, [("reward", observed([1.0])), ("rollout/inflight", observed([3.0]))])
    again = Store.open(store.engine.url.render_as_string())
    producer.send(
        Ingest(again), [("reward", observed([2.0])), ("rollout/inflight", observed([5.0]))]
    )
    again.close()
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        for key, reduction, value in (
            ("reward", "mean", 1.5),
            ("reward", "max", 2.0),
            ("rollout/inflight", "sum_last", 5.0),
        ):
            series = find_series(connection, run, key)
            assert series is not None
            found = history(connection, run, series, Query("step", reduction, by_producer=True))  # type: ignore[arg-type]
            assert [point.value for point in found.points] == [value]
            assert list(found.by_producer) == ["p"]
