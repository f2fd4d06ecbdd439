"""Traces in a real store: once each, within bounds, found again, and joined with the ledger."""

import base64
import random
from typing import Any

import pytest
from sqlalchemy import func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import schema, trace_store
from services.aggregator.batch import decode
from services.aggregator.ingest import Ingest
from services.aggregator.store import Store
from services.aggregator.trace_store import Outcome, Wanted
from services.common.traces_config import Traces
from tests.services.aggregator.making import NOW_S, Producer, event
from tests.services.aggregator.pruning import prune, reading
from tests.services.aggregator.traced import request_of, send, trace_of


def names(store: Store, *, before: int | None = None, limit: int = 999, **wanted: Any) -> list[str]:
    """Rollouts of a list."""
    with reading(store) as (connection, run):
        found = trace_store.newest(connection, run, Wanted(**wanted), before=before, limit=limit)
    return [each.rollout_id for each in found]


def test_a_trace_is_read_as_it_was_sent(store: Store, ingest: Ingest) -> None:
    """Also its NUL and halves of nothing: PostgreSQL's texts take none."""
    sent = trace_of(text="a\0b 😀", tools=["nul\0"], rewards={"ex\0act": 1.0}, age_s=3.0)
    receipt = send(ingest, sent)
    assert receipt.rejected == ()
    with reading(store) as (connection, run):
        found = trace_store.find(connection, run, "0.0.1.1/0")
        assert trace_store.find(connection, run, "0.0.1.1/1") is None
    assert found is not None
    kept, body = found
    assert body == sent
    assert (kept.group_id, kept.row_index, kept.version, kept.end) == ("0.0.1.1", 17, 3, "stop")
    assert kept.at_s == NOW_S - 3.0
    assert kept.summary["tools"] == {"nul\0": 1}


def test_the_same_trace_again_changes_nothing(store: Store, ingest: Ingest) -> None:
    request = request_of(trace_of(), trace_of())
    assert not ingest.take(decode(request), now_s=NOW_S).duplicate
    assert ingest.take(decode(request), now_s=NOW_S + 1).duplicate
    # Another scorer, that took the group over.
    send(ingest, trace_of(reward=0.0), trace_of("0.0.1.1/1"), now_s=NOW_S + 2)
    assert names(store) == ["0.0.1.1/1", "0.0.1.1/0"]
    with reading(store) as (connection, run):
        found = trace_store.find(connection, run, "0.0.1.1/0")
    assert found is not None
    assert found[0].summary["reward"] == 1.0


def test_of_a_version_only_so_many_are_kept(store: Store, ingest: Ingest) -> None:
    for group in range(3):
        send(
            ingest,
            *(trace_of(f"0.{group}.1.1/{each}", per_version=4, version=5) for each in range(3)),
            trace_of(f"0.{group}.1.1/7", per_version=4, version=6),
            now_s=NOW_S + group,
        )
    assert len(names(store, version=5)) == 4
    assert len(names(store, version=6)) == 3
    assert "0.0.1.1/0" in names(store, version=5)


def test_the_newest_are_kept_within_a_number_and_bytes(store: Store) -> None:
    few = Ingest(store, traces=Traces(keep=3))
    for number in range(5):
        send(few, trace_of(f"0.{number}.1.1/0", version=number), now_s=NOW_S + number)
    assert names(store) == [f"0.{number}.1.1/0" for number in (4, 3, 2)]
    # Text that can hardly be made smaller: 0.4 MB each of 1 MiB, since it is there twice.
    small, drawn = Ingest(store, traces=Traces(keep_bytes=1 << 20)), random.Random(7)
    for number in range(3):
        text = base64.b64encode(drawn.randbytes(200_000)).decode()
        send(small, trace_of(f"1.{number}.1.1/0", version=10, text=text), now_s=NOW_S + 9)
    with reading(store) as (connection, _):
        table = schema.traces
        held = connection.scalar(select(func.sum(table.c.num_bytes)))
    assert held is not None
    assert 1 << 19 < held <= 1 << 20
    assert names(store) == ["1.2.1.1/0", "1.1.1.1/0"]


def test_runs_do_not_share_bounds_or_names(store: Store) -> None:
    ingest = Ingest(store, traces=Traces(keep=1))
    send(ingest, trace_of(per_version=1))
    send(ingest, trace_of(per_version=1), run="other")
    assert names(store) == ["0.0.1.1/0"]
    assert store.delete_run("other")
    assert names(store) == ["0.0.1.1/0"]
    assert store.delete_run("demo")
    with store.engine.begin() as connection:
        assert connection.scalar(select(func.count()).select_from(schema.traces)) == 0


def test_a_list_is_of_what_is_wanted(store: Store, ingest: Ingest) -> None:
    send(
        ingest,
        trace_of("0.0.1.1/0", version=1, reward=0.0, rewards={"exact": 0.0, "short": None}),
        trace_of("0.1.1.1/0", version=2, reward=0.5, rewards={"exact": None, "short": 0.5}),
        trace_of("0.2.1.1/0", version=2, reward=1.0, tools=["add"], end="turns"),
        trace_of("0.3.1.1/0", version=3, reward=None, rewards={"exact": None}, end="time"),
    )
    zero, one, two, three = (f"0.{number}.1.1/0" for number in range(4))
    assert names(store) == [three, two, one, zero]
    assert names(store, version=2) == [two, one]
    assert names(store, end="turns") == [two]
    assert names(store, tool="add") == [two]
    assert names(store, tool="sub") == []
    assert names(store, reward_min=0.5) == [two, one]
    assert names(store, reward_max=0.5) == [one, zero]
    assert names(store, reward_min=0.0, reward_max=0.0) == [zero]
    assert names(store, function="exact") == [two, zero]
    assert names(store, function="exact", reward_max=0.0) == [zero]
    assert names(store, function="short", reward_min=0.0) == [one]
    assert names(store, version=2, tool="add", reward_min=2.0) == []


def test_lists_go_on_where_they_ended_while_others_come(store: Store, ingest: Ingest) -> None:
    send(ingest, *(trace_of(f"0.{number}.1.1/0", version=number) for number in range(5)))
    with reading(store) as (connection, run):
        page = trace_store.newest(connection, run, Wanted(), before=None, limit=2)
    send(ingest, trace_of("0.9.1.1/0", version=9), now_s=NOW_S + 1)
    rest = names(store, before=page[-1].id)
    first = [each.rollout_id for each in page]
    assert [*first, *rest] == [f"0.{number}.1.1/0" for number in (4, 3, 2, 1, 0)]


def test_the_ledger_says_where_its_group_is_and_a_step_finds_it(
    store: Store, ingest: Ingest
) -> None:
    trainer = Producer("trainer-0")
    trainer.send(
        ingest,
        events=[
            event("0.0.1.1", "trained", step=3, age_s=9.0),
            event("0.1.1.1", "trained", step=4, age_s=8.0),
            event("0.2.1.1", "dropped", reason="stale", age_s=7.0),
        ],
    )
    send(ingest, *(trace_of(f"0.{number}.1.1/0", version=number) for number in range(4)))
    wanted = [f"0.{number}.1.1" for number in range(4)]
    expected = {
        "0.0.1.1": Outcome("trained", 3, ""),
        "0.1.1.1": Outcome("trained", 4, ""),
        "0.2.1.1": Outcome("dropped", None, "stale"),
    }
    for _ in range(2):
        with reading(store) as (connection, run):
            assert trace_store.outcomes(connection, run, wanted) == expected
        assert names(store, step=3) == ["0.0.1.1/0"]
        assert names(store, step=4) == ["0.1.1.1/0"]
        assert names(store, step=5) == []
        prune(store, keep_groups=1)  # the second time around from the archive


def test_an_error_of_the_store_does_not_say_what_was_said(store: Store, ingest: Ingest) -> None:
    send(ingest, trace_of("0.5.1.1/0"))
    table = schema.traces
    columns = [column for column in table.columns if column.name != "id"]
    with store.engine.begin() as connection:
        row = connection.execute(select(*columns)).mappings().one()
    again = {**row, "summary": "the user's own words"}
    # A second trace of the same name, which write() would have left out.
    with store.engine.connect() as connection, pytest.raises(SQLAlchemyError) as raised:
        connection.execute(insert(table), again)
    assert "own words" not in str(raised.value)


def test_a_transaction_that_fails_keeps_no_trace(store: Store, ingest: Ingest) -> None:
    send(ingest, trace_of("0.5.1.1/0"))
    request = request_of(trace_of())

    def fail() -> None:
        with store.write() as writing:
            run = writing.run("demo", now_s=NOW_S)
            found = [(each, NOW_S) for each in decode(request).traces]
            trace_store.write(writing.connection, run.id, found, settings=Traces())
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="full"):
        fail()
    assert names(store) == ["0.5.1.1/0"]
    ingest.take(decode(request), now_s=NOW_S)
    assert names(store) == ["0.0.1.1/0", "0.5.1.1/0"]
