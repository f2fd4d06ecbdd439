import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import schema
from services.aggregator.ingest import Ingest
from services.aggregator.overview import group_counts
from services.aggregator.series import find_run
from services.aggregator.store import Store
from services.common.errors import UserError
from tests.services.aggregator.making import Producer, count, event, observed


def rows(store: Store) -> dict[str, int]:
    """Rows by table, of the tables that hold what was measured."""
    with store.engine.begin() as connection:
        return {
            table.name: connection.scalar(select(func.count()).select_from(table)) or 0
            for table in schema.metadata.sorted_tables
            if table not in (schema.meta, schema.counters)
        }


def test_a_batch_that_fails_leaves_nothing_behind_and_can_be_sent_again(
    store: Store, ingest: Ingest
) -> None:
    producer = Producer("p")
    producer.send(ingest, [("loss", observed([1.0]))])
    before = rows(store)
    with store.engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TRIGGER broken BEFORE INSERT ON ledger_groups "
                "BEGIN SELECT RAISE(ABORT, 'the disk broke'); END"
            )
        )

    def send() -> bool:
        receipt = producer.send(
            ingest,
            [("grad_norm", observed([2.0])), ("rewards/new", observed([1.0]))],
            events=[event("0.0.1.0", "dispatched")],
            sequence=2,
            step=7,
        )
        return receipt.duplicate

    with pytest.raises(SQLAlchemyError, match="the disk broke"):
        send()
    assert rows(store) == before
    with store.engine.begin() as connection:
        connection.execute(text("DROP TRIGGER broken"))
    assert not send()
    assert send()
    assert rows(store)["ledger_groups"] == 1


def test_a_full_disk_fails_the_batch_and_a_disk_with_room_takes_it(
    store: Store, ingest: Ingest
) -> None:
    with store.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")  # It cannot grow at all.
    keys = [(f"custom/{number}", observed(range(1, 200))) for number in range(100)]
    with pytest.raises(SQLAlchemyError, match="full"):
        Producer("p").send(ingest, keys)
    assert set(rows(store).values()) == {0}
    with store.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
    assert Producer("p").send(ingest, keys).accepted == 100
    store.probe()


def test_events_keep_the_highest_state_in_any_order(store: Store, ingest: Ingest) -> None:
    producer = Producer("p")
    producer.send(
        ingest,
        events=[
            event("0.0.1.0", "trained", step=1),
            event("0.0.1.0", "dispatched"),
            event("0.1.1.0", "dropped", reason="stale"),
            event("0.2.1.0", "generating"),
            event("eval.0.1.7", "scored"),
        ],
    )
    producer.send(
        ingest,
        events=[
            event("0.0.1.0", "generated"),
            event("0.1.1.0", "dropped", reason="stale"),
            event("0.1.1.0", "scored"),
            event("0.1.1.1", "dispatched"),
        ],
    )
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        counts = group_counts(connection, run)
    said = {state: number for state, number in counts.states.items() if number}
    assert said == {"trained": 1, "dropped": 1, "generating": 1, "dispatched": 1}
    assert counts.reasons == {"dropped": {"stale": 1}}
    assert (counts.total, counts.in_flight) == (4, 2)
    assert counts.evaluation == {"scored": 1}


def test_deleting_a_run_leaves_the_others_and_nothing_of_it(store: Store, ingest: Ingest) -> None:
    for run in ("demo", "other"):
        Producer("p", run=run).send(
            ingest, [("loss", observed([1.0]))], events=[event("0.0.1.0", "dispatched")]
        )
    both = rows(store)
    assert store.delete_run("demo")
    assert not store.delete_run("demo")
    while store.clean_up():
        pass
    assert rows(store) == {name: number // 2 for name, number in both.items()}
    # The same batch is new to a run that begins anew.
    receipt = Producer("p").send(ingest, [("rollout/failed_total", count(1))])
    assert not receipt.duplicate


def test_tables_of_another_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    Store.open(f"sqlite:///{path}").close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '0' WHERE key = 'schema'")
    connection.close()
    with pytest.raises(UserError, match="tables of version 0"):
        Store.open(f"sqlite:///{path}")


@pytest.mark.parametrize(
    ("database", "message"),
    [
        ("nonsense", "not a database URL"),
        ("nonesuch://host/db", "not a database URL"),
        ("sqlite://", "keeps nothing"),
        ("sqlite:////nonexistent/folder/metrics.sqlite", "cannot be opened"),
        ("mysql+pymysql://host/db", "driver"),
    ],
)
def test_a_database_that_cannot_be_used_is_the_users_mistake(database: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Store.open(database)
