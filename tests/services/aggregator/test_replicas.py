"""Several aggregators on one PostgreSQL: what one has taken, no other takes again."""

import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from sqlalchemy import func, select

from services.aggregator import schema
from services.aggregator.batch import decode
from services.aggregator.history import Query, history
from services.aggregator.ingest import Ingest
from services.aggregator.overview import producers
from services.aggregator.reduce import Reduction
from services.aggregator.rollup import Roller
from services.aggregator.series import find_run, find_series
from services.aggregator.store import Store
from services.aggregator.transaction import RunGone
from tests.services.aggregator.making import NOW_S, Producer, count, observed, ratio


@pytest.fixture
def replicas(postgres_url: str) -> Iterator[list[Store]]:
    stores = [Store.open(postgres_url) for _ in range(3)]
    yield stores
    for store in stores:
        store.close()


def together(*work: Callable[[], Any]) -> None:
    """Run in a thread each; raises the first of their errors."""
    errors: list[BaseException] = []

    def guarded(each: Callable[[], Any]) -> None:
        try:
            each()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def whole(store: Store, key: str, reduction: Reduction) -> float | None:
    """Over all steps."""
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        series = find_series(connection, run, key)
        assert series is not None, key
        (point,) = history(connection, run, series, Query("step", reduction, max_points=1)).points
        return point.value


def test_a_batch_that_all_replicas_get_is_added_once(replicas: list[Store]) -> None:
    """Four producers of 150 steps; every batch goes to all replicas, in an order of its own."""
    requests = []
    for number in range(4):
        producer = Producer(f"generator-{number}", service="generator")
        for step in range(150):
            deltas = [
                ("rollout/generated_tok_s", count(step)),
                ("reward", observed([0.1 * step, 1.0])),
                ("kl", ratio(step, 3)),
            ]
            requests.append(producer.request(deltas, step=step))
    expected = 4 * sum(range(150))
    receipts: list[int] = []

    def take(store: Store, order: Random) -> None:
        ingest, mine = Ingest(store, producer=f"aggregator-{id(store)}"), requests.copy()
        order.shuffle(mine)
        for start in range(0, len(mine), 7):
            group = [(decode(each), NOW_S) for each in mine[start : start + 7]]
            receipts.extend(each.accepted for each in ingest.take_all(group))

    ended = threading.Event()

    def roll(store: Store) -> None:
        roller = Roller(store)
        while not ended.is_set():
            roller.roll(budget_s=0.02)
            ended.wait(0.01)

    def take_all() -> None:
        try:
            together(*(lambda s=s, n=n: take(s, Random(n)) for n, s in enumerate(replicas)))
        finally:
            ended.set()

    others = [Store(replicas[0].engine) for _ in range(2)]
    together(take_all, *(lambda s=s: roll(s) for s in others))
    assert sum(receipts) == 3 * len(requests)
    for store in replicas:
        roller = Roller(store)
        while roller.roll(budget_s=5.0):
            pass
    assert whole(replicas[1], "rollout/generated_tok_s", "sum") == expected
    mean = (0.1 * expected + len(requests)) / (2 * len(requests))
    assert whole(replicas[1], "reward", "mean") == pytest.approx(mean, rel=1e-12)
    assert whole(replicas[1], "kl", "ratio") == expected / (3 * len(requests))
    assert whole(replicas[1], "ingest/deltas", "sum") == 3 * len(requests)
    assert whole(replicas[1], "ingest/duplicates", "sum") == 2 * len(requests)
    with replicas[2].engine.begin() as connection:
        assert connection.scalar(select(func.count()).select_from(schema.rollups))
        run = find_run(connection, "demo")
        assert run is not None
        assert {each.missing_batches for each in producers(connection, run)} == {0}
        # All sequences came: a boot needs no rows for them.
        assert connection.scalar(select(func.count()).select_from(schema.batches)) == 0


def test_names_stay_bounded_when_replicas_make_them_at_once(replicas: list[Store]) -> None:
    def take(number: int) -> None:
        producer, ingest = Producer(f"scorer-{number}", service="scorer"), Ingest(replicas[number])
        for start in range(0, 300, 20):
            names = [f"rewards/f{number}_{each}" for each in range(start, start + 20)]
            producer.send(ingest, [(name, observed([1.0])) for name in names])

    together(*(lambda n=n: take(n) for n in range(3)))
    with replicas[0].engine.begin() as connection:
        keys = connection.scalars(
            select(schema.series.c.key).where(schema.series.c.declared == "rewards/{function}")
        ).all()
        run = find_run(connection, "demo")
        assert run is not None
        values = connection.scalar(
            select(func.sum(schema.partials.c.n))
            .join(schema.series, schema.series.c.id == schema.partials.c.series_id)
            .where(schema.series.c.declared == "rewards/{function}")
        )
    assert len(keys) == 201
    assert values == 900


def test_a_run_that_another_replica_deletes_begins_anew(replicas: list[Store]) -> None:
    one, other = Ingest(replicas[0]), Ingest(replicas[1])
    producer = Producer("p")
    producer.send(one, [("reward", observed([1.0]))])
    producer.send(other, [("reward", observed([2.0]))])
    assert replicas[1].delete_run("demo")
    lost = producer.request([("reward", observed([3.0]))])
    with pytest.raises(RunGone):
        one.take(decode(lost), now_s=NOW_S)
    assert not one.take(decode(lost), now_s=NOW_S).duplicate
    assert whole(replicas[2], "reward", "mean") == 3.0
    while replicas[1].clean_up():
        pass
    assert whole(replicas[2], "reward", "mean") == 3.0
    with replicas[0].engine.begin() as connection:
        left = connection.scalar(select(func.count()).select_from(schema.doomed))
    assert left == 0
