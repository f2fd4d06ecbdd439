"""What live updates are made of."""

import pytest
from sqlalchemy import select

from services.aggregator import schema
from services.aggregator.changes import KEPT_S, Changes, changed_since, newest_revision, prune
from services.aggregator.ingest import Ingest
from services.aggregator.series import find_run
from services.aggregator.store import Store
from tests.services.aggregator.making import NOW_S, Producer, observed


def since(store: Store, revision: int) -> Changes:
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        return changed_since(connection, run, revision)


def ranges(changes: Changes) -> set[tuple[str, int, int, int]]:
    return {
        (each.series.key, each.attempt, each.first_step, each.end_step)
        for each in changes.series
        if not each.series.key.startswith("ingest/")
    }


def test_only_what_came_after_a_revision(store: Store, ingest: Ingest) -> None:
    producer = Producer("p")
    producer.send(ingest, [("reward", observed([1.0])), ("loss", observed([1.0]))], step=3)
    first = since(store, 0)
    assert ranges(first) == {("reward", 1, 3, 4), ("loss", 1, 3, 4)}
    assert since(store, first.revision).series == ()
    producer.send(ingest, [("reward", observed([1.0]))], step=70)
    producer.send(ingest, [("reward", observed([1.0]))], step=5)
    Producer("p", run="other").send(ingest, [("loss", observed([1.0]))])
    second = since(store, first.revision)
    assert ranges(second) == {("reward", 1, 0, 64), ("reward", 1, 64, 128)}
    assert second.revision > first.revision
    assert since(store, second.revision).series == ()


@pytest.mark.parametrize("revision", [1, 10_000])
def test_who_has_been_away_for_long_gets_everything(
    store: Store, ingest: Ingest, revision: int
) -> None:
    """Also with a revision of another database."""
    producer = Producer("p")
    for step in range(3):
        producer.send(ingest, [("reward", observed([1.0]))], step=step, now_s=NOW_S + step * KEPT_S)
    with store.engine.execution_options(**schema.WRITER).begin() as connection:
        prune(connection, now_s=NOW_S + 2 * KEPT_S + 1)
        kept = connection.scalars(select(schema.changes.c.revision)).all()
    assert len(kept) == 1
    assert ranges(since(store, revision)) == {("reward", 1, 0, 3)}
    with store.engine.begin() as connection:
        assert newest_revision(connection) == kept[0]
    assert ranges(since(store, kept[0] - 1)) == {("reward", 1, 0, 64)}
