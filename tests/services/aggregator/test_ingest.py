from pathlib import Path

import pytest
from sqlalchemy import select

from services.aggregator import schema
from services.aggregator.batch import decode
from services.aggregator.history import Axis, History, Query, history
from services.aggregator.ingest import Ingest, Receipt
from services.aggregator.overview import producers
from services.aggregator.reduce import Reduction
from services.aggregator.series import find_run, find_series
from services.aggregator.store import Store
from tests.services.aggregator.making import NOW_S, Producer, count, observed, placed, ratio


def ask(
    store: Store,
    key: str,
    reduction: Reduction,
    *,
    axis: Axis = "step",
    by_producer: bool = False,
    max_points: int = 1000,
) -> History:
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        series = find_series(connection, run, key)
        assert series is not None, key
        query = Query(axis, reduction, max_points=max_points, by_producer=by_producer)
        return history(connection, run, series, query)


def value(store: Store, key: str, reduction: Reduction) -> float | None:
    """Over everything."""
    (point,) = ask(store, key, reduction, max_points=1).points
    return point.value


def test_the_same_batch_again_changes_nothing_also_across_a_restart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'metrics.sqlite'}"
    request = Producer("generator-0").request([("rollout/failed_total", count(3))])
    store = Store.open(url)
    assert Ingest(store).take(decode(request), now_s=NOW_S) == Receipt(1, False, ())
    assert Ingest(store).take(decode(request), now_s=NOW_S + 1) == Receipt(0, True, ())
    store.close()
    store = Store.open(url)
    assert Ingest(store).take(decode(request), now_s=NOW_S + 2) == Receipt(0, True, ())
    assert value(store, "rollout/failed_total", "sum") == 3
    assert value(store, "ingest/duplicates", "sum") == 2
    assert value(store, "ingest/deltas", "sum") == 1
    store.close()


def test_another_boot_of_a_producer_counts_from_one_again(store: Store, ingest: Ingest) -> None:
    for boot_id in ("boot-1", "boot-2"):
        receipt = Producer("p", boot_id=boot_id).send(ingest, [("rollout/failed_total", count(1))])
        assert not receipt.duplicate
    assert value(store, "rollout/failed_total", "sum") == 2


def test_a_gap_is_reported_and_closed_by_the_late_batch(store: Store, ingest: Ingest) -> None:
    producer = Producer("p")

    def missing() -> tuple[int, float | None]:
        with store.engine.begin() as connection:
            run = find_run(connection, "demo")
            assert run is not None
            sent = {each.name: each.missing_batches for each in producers(connection, run)}
        return sent["p"], value(store, "ingest/gaps", "last")

    producer.send(ingest, sequence=1)
    assert missing() == (0, 0)
    producer.send(ingest, sequence=4, now_s=NOW_S + 1)
    assert missing() == (2, 2)
    producer.send(ingest, sequence=3, now_s=NOW_S + 2)
    assert missing() == (1, 1)
    assert not producer.send(ingest, sequence=2, now_s=NOW_S + 3).duplicate
    assert missing() == (0, 0)
    assert producer.send(ingest, sequence=3, now_s=NOW_S + 4).duplicate


def test_partials_of_one_place_merge_and_others_do_not(store: Store, ingest: Ingest) -> None:
    one, two = Producer("generator-0"), Producer("generator-1")
    one.send(ingest, [("completions/mean_length", ratio(3, 12))])
    one.send(ingest, [("completions/mean_length", ratio(0, 0))])
    two.send(ingest, [("completions/mean_length", ratio(3, 4))], now_s=NOW_S + 20)
    assert value(store, "completions/mean_length", "ratio") == 0.375
    with store.engine.begin() as connection:
        rows = connection.execute(
            select(schema.partials.c.sum_high)
            .join(schema.series, schema.series.c.id == schema.partials.c.series_id)
            .where(schema.series.c.key == "completions/mean_length")
        ).all()
    assert len(rows) == 2


def test_an_unknown_key_is_rejected_with_its_reason_and_counted(
    store: Store, ingest: Ingest
) -> None:
    receipt = Producer("p").send(ingest, [("reward", observed([1.0])), ("rewrad", observed([1.0]))])
    assert receipt.accepted == 1
    ((key, reason),) = [(each.key, each.reason) for each in receipt.rejected]
    assert (key, reason) == ("rewrad", "unknown_key")
    assert value(store, "ingest/rejected/unknown_key", "sum") == 1


def test_partials_of_one_unknown_key_are_one_rejection_and_counted_each(
    store: Store, ingest: Ingest
) -> None:
    items = [item for step in range(3) for item in placed([("rewrad", count(1))], step=step)]
    receipt = ingest.take(decode(Producer("p").batch(items)), now_s=NOW_S)
    assert [(each.key, each.number) for each in receipt.rejected] == [("rewrad", 3)]
    assert value(store, "ingest/rejected/unknown_key", "sum") == 3


def test_another_instrument_than_declared_is_refused_not_mixed(
    store: Store, ingest: Ingest
) -> None:
    """C26."""
    Producer("a").send(ingest, [("rollout/slots_busy_frac", ratio(3, 12))])
    receipt = Producer("b").send(ingest, [("rollout/slots_busy_frac", observed([0.5]))])
    (rejected,) = receipt.rejected
    assert rejected.reason == "wrong_instrument"
    assert rejected.detail == "declared as ratio, sent as observation"
    assert value(store, "rollout/slots_busy_frac", "ratio") == 0.25


def test_a_custom_key_keeps_the_instrument_that_it_first_came_with(
    store: Store, ingest: Ingest
) -> None:
    assert Producer("a").send(ingest, [("custom/mine", observed([2.0]))]).rejected == ()
    receipt = Producer("b").send(ingest, [("custom/mine", count(1))])
    assert [each.reason for each in receipt.rejected] == ["wrong_instrument"]
    assert value(store, "custom/mine", "mean") == 2.0


def test_a_placeholder_takes_a_bounded_number_of_values(store: Store, ingest: Ingest) -> None:
    producer = Producer("scorer-0")
    names = [f"rewards/f{number}" for number in range(250)]
    assert producer.send(ingest, [(name, observed([1.0])) for name in names]).rejected == ()
    producer.send(ingest, [("rewards/f0", observed([1.0]))])
    with store.engine.begin() as connection:
        keys = connection.scalars(
            select(schema.series.c.key).where(schema.series.c.declared == "rewards/{function}")
        ).all()
    assert len(keys) == 201
    assert value(store, "rewards/other", "mean") == 1.0
    assert ask(store, "rewards/f0", "mean").points


def test_a_delta_is_placed_by_its_age_on_the_aggregators_clock(
    store: Store, ingest: Ingest
) -> None:
    Producer("p").send(ingest, [("loss", observed([1.0]))], age_s=25.0, now_s=NOW_S)
    (point,) = ask(store, "loss", "mean", axis="time").points
    assert point.x == NOW_S - 30


def test_lasts_of_two_producers_are_compared_on_one_clock(store: Store, ingest: Ingest) -> None:
    """Each producer's monotonic clock stands at 1,000 s; what arrives later happened later."""
    Producer("b").send(ingest, [("policy/served_version", observed([5.0]))], now_s=NOW_S)
    Producer("a").send(ingest, [("policy/served_version", observed([6.0]))], now_s=NOW_S + 3)
    Producer("c").send(
        ingest, [("policy/served_version", observed([4.0]))], age_s=8, now_s=NOW_S + 4
    )
    assert value(store, "policy/served_version", "last") == 6.0


def test_a_late_partial_amends_its_own_step(store: Store, ingest: Ingest) -> None:
    producer = Producer("p")
    producer.send(ingest, [("reward", observed([1.0]))], step=1)
    producer.send(ingest, [("reward", observed([1.0]))], step=2, now_s=NOW_S + 10)
    producer.send(ingest, [("reward", observed([0.0]))], step=1, age_s=30, now_s=NOW_S + 30)
    assert [(p.x, p.value) for p in ask(store, "reward", "mean").points] == [(1, 0.5), (2, 1.0)]


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_totals_do_not_depend_on_how_batches_are_cut(
    store: Store, ingest: Ingest, chunk: int
) -> None:
    producer = Producer("p")
    values = [0.1 * number for number in range(40)]
    for start in range(0, len(values), chunk):
        producer.send(ingest, [("loss", observed(values[start : start + chunk]))])
    assert value(store, "loss", "mean") == pytest.approx(sum(values) / 40, rel=1e-12)
    assert value(store, "loss", "p50") == pytest.approx(1.9, rel=0.01)
