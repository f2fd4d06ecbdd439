"""The ledger: the highest state in any order, exact counts, bounded details, one archive."""

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from headrace.v1 import metrics_pb2 as wire
from sqlalchemy import func, select

from services.aggregator import ledger, lineage, schema
from services.aggregator.batch import decode
from services.aggregator.group_ids import GroupId, parse
from services.aggregator.ingest import Ingest
from services.aggregator.lineage import Detail, Listed
from services.aggregator.maintenance import Maintenance
from services.aggregator.overview import GroupCounts, group_counts
from services.aggregator.store import Store
from tests.services.aggregator.making import NOW_S, Producer, count, event
from tests.services.aggregator.pruning import prune, reading

WORKING = ("dispatched", "generating", "generated", "scoring", "scored", "queued")


def counts(store: Store) -> GroupCounts:
    """As stored; and they are those of the groups, counted one by one."""
    with reading(store) as (connection, run):
        table = schema.ledger_counts
        stored = Counter(
            {
                (row.evaluation, row.state, row.reason): row.num_groups
                for row in connection.execute(select(table))
            }
        )
        assert +stored == ledger.recount(connection, run.id)
        return group_counts(connection, run)


def said(store: Store) -> dict[str, int]:
    return {state: number for state, number in counts(store).states.items() if number}


def look(store: Store, name: str) -> Detail | Listed | None:
    group = parse(name)
    assert group is not None
    with reading(store) as (connection, run):
        return lineage.detail(connection, run, group)


def state_of(store: Store, name: str) -> tuple[str, str, int | None, bool]:
    found = look(store, name)
    assert found is not None
    listed = found.listed if isinstance(found, Detail) else found
    return listed.state, listed.reason, listed.step, listed.in_detail


def story(chance: Random, ordinal: int) -> list[wire.GroupEvent]:
    """Events of one group, up to any state."""
    name, row = f"0.{ordinal}.1.1", 3 * ordinal
    events = [event(name, state, row_index=row) for state in WORKING]
    end = chance.choice(["trained", "dropped", "given_up", "rolled_back", None])
    if end is None:
        return events[: chance.randrange(1, len(WORKING) + 1)]
    if end == "rolled_back":
        events.append(event(name, "trained", step=ordinal // 8))
    step = ordinal // 8 if end == "trained" else None
    reason = chance.choice(["stale", "failed"]) if end in ("dropped", "given_up") else ""
    return [*events, event(name, end, step=step, reason=reason)]


def send(ingest: Ingest, events: Sequence[wire.GroupEvent], *, producer: str = "trainer-0") -> None:
    boot = f"boot-{abs(hash(tuple(each.SerializeToString() for each in events)))}"
    Producer(producer, boot_id=boot).send(ingest, events=events)


def shuffled(events: Iterable[wire.GroupEvent], chance: Random) -> list[wire.GroupEvent]:
    """In any order, some of them repeated."""
    sent = list(events)
    sent += chance.choices(sent, k=len(sent) // 3)
    chance.shuffle(sent)
    return sent


def expected(stories: Iterable[list[wire.GroupEvent]]) -> Counter[str]:
    found = Counter(wire.GroupState.Name(each[-1].state) for each in stories)
    return Counter({n.removeprefix("GROUP_STATE_").lower(): k for n, k in found.items()})


def test_order_repetition_restarts_and_pruning_change_no_count(
    database: str, store: Store, ingest: Ingest
) -> None:
    chance = Random(5)
    stories = [story(chance, ordinal) for ordinal in range(300)]
    sent = shuffled((each for story in stories for each in story), chance)
    for start in range(0, len(sent), 40):
        send(ingest, sent[start : start + 40])
        if start % 200 == 0:
            prune(store, keep_groups=chance.randrange(60))
    again = Store.open(database)
    send(Ingest(again, producer="aggregator-1"), sent, producer="trainer-1")
    again.close()
    assert said(store) == expected(stories)
    prune(store, keep_groups=10)
    assert said(store) == expected(stories)
    for each in stories:
        state, reason, step, _ = state_of(store, each[-1].group_id)
        last = each[-1]
        assert wire.GroupState.Value(f"GROUP_STATE_{state.upper()}") == last.state
        if state != "rolled_back":
            assert (reason, step) == (last.reason, last.step if last.HasField("step") else None)
        else:
            assert step == each[-2].step


def test_a_late_event_does_not_bring_a_pruned_group_back(store: Store, ingest: Ingest) -> None:
    send(ingest, [event(f"0.{n}.1.1", "trained", step=n, row_index=n) for n in range(50)])
    assert prune(store, keep_groups=10) == 40
    assert prune(store, keep_groups=10) == 0
    before = said(store)
    send(ingest, [event(f"0.{n}.1.1", "generating", row_index=n) for n in range(50)])
    assert said(store) == before == {"trained": 50}
    assert state_of(store, "0.3.1.1") == ("trained", "", 3, False)
    assert state_of(store, "0.45.1.1") == ("trained", "", 45, True)
    assert look(store, "0.50.1.1") is None


def test_a_pruned_group_can_still_be_rolled_back(store: Store, ingest: Ingest) -> None:
    send(ingest, [event(f"0.{n}.1.1", "trained", step=n) for n in range(20)])
    prune(store, keep_groups=1)
    undone = [event(f"0.{n}.1.1", "rolled_back") for n in range(10, 20)]
    send(ingest, [*undone, event("0.20.1.1", "dispatched")])
    assert said(store) == {"trained": 10, "rolled_back": 10, "dispatched": 1}
    assert state_of(store, "0.12.1.1") == ("rolled_back", "", 12, False)


def test_groups_in_flight_are_never_pruned(store: Store, ingest: Ingest) -> None:
    send(ingest, [event(f"0.{n}.1.1", "queued") for n in range(30)])
    send(
        ingest, [event("0.30.1.1", "trained", step=1), event("0.31.1.1", "dropped", reason="lost")]
    )
    assert prune(store, keep_groups=1) == 1
    with reading(store) as (connection, _):
        table = schema.ledger_groups
        assert connection.scalar(select(func.count()).select_from(table)) == 31
    assert said(store) == {"queued": 30, "trained": 1, "dropped": 1}


def test_groups_of_evaluations_are_counted_apart_and_pruned_too(
    store: Store, ingest: Ingest
) -> None:
    send(ingest, [event(f"eval.0.1.{n}", "generating", row_index=n) for n in range(10)])
    send(ingest, [event("0.0.1.1", "generating")])
    assert prune(store, keep_groups=2) == 8
    send(ingest, [event(f"eval.0.1.{n}", "scored", row_index=n) for n in range(10)])
    assert said(store) == {"generating": 1}
    assert counts(store).evaluation == {"scored": 10}
    with reading(store) as (connection, run):
        account = lineage.account(connection, run, now_s=NOW_S, stuck_after_s=60)
        assert (account.dispatched, account.balanced, len(account.oldest)) == (1, True, 1)
        assert lineage.of_row(connection, run, 3) == ([], 0)


def test_a_start_ends_what_it_did_not_adopt_and_rolls_back_what_it_makes_again(
    store: Store, ingest: Ingest
) -> None:
    """40 groups trained by attempt 1 in steps 0 to 9, the oldest pruned; 6 in flight, 2 adopted."""
    send(ingest, [event(f"0.{n}.1.1", "trained", step=n // 4) for n in range(40)])
    prune(store, keep_groups=10)
    send(ingest, [event(f"0.{n}.1.1", WORKING[n - 40]) for n in range(40, 46)])
    send(ingest, [event("0.46.2.1", "dispatched")])
    with store.write() as writing, reading(store) as (_, run):
        ledger.end_attempts(
            writing.connection,
            run.id,
            attempt=2,
            first_step=5,
            adopted=["0.41.1.1", "0.45.1.1"],
            at_s=NOW_S,
            worker="trainer-0",
        )
    found = counts(store)
    assert {state: number for state, number in found.states.items() if number} == {
        **{"trained": 20, "rolled_back": 20, "dropped": 4},
        **{"dispatched": 1, "generating": 1, "queued": 1},
    }
    assert found.reasons == {"dropped": {"attempt_ended": 4}}
    assert state_of(store, "0.20.1.1") == ("rolled_back", "", 5, False)
    assert state_of(store, "0.39.1.1") == ("rolled_back", "", 9, True)


def test_only_the_trainer_ends_a_group(store: Store, ingest: Ingest) -> None:
    receipt = Producer("scorer-0", service="scorer").send(
        ingest, events=[event("0.0.1.1", "scored"), event("0.1.1.1", "dropped", reason="mine")]
    )
    (rejected,) = receipt.rejected
    assert (rejected.key, rejected.reason) == ("group 0.1.1.1", "not_the_trainer")
    assert rejected.detail == "only the trainer says that a group is dropped, not a scorer"
    assert said(store) == {"scored": 1}


def test_a_row_that_is_not_known_does_not_hide_one_that_is(store: Store, ingest: Ingest) -> None:
    send(ingest, [event("0.0.1.1", "generating", row_index=17), event("0.0.1.1", "dispatched")])
    send(ingest, [event("0.0.1.1", "trained", step=1)])
    found = look(store, "0.0.1.1")
    assert isinstance(found, Detail)
    assert found.listed.row_index == 17


def test_maintenance_archives_what_is_too_much(
    store: Store, ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.aggregator.maintenance.ARCHIVE_EVERY_S", 0.0)
    monkeypatch.setattr("services.aggregator.ledger.PRUNED_AT_ONCE", 50)
    send(ingest, [event(f"0.{n}.1.1", "trained", step=1) for n in range(340)])
    maintenance = Maintenance(store, keep_groups=200)
    while maintenance.work():
        pass
    with reading(store) as (connection, run):
        account = lineage.account(connection, run, now_s=NOW_S, stuck_after_s=60)
    assert (account.in_detail, account.archived) == (200, 140)
    assert account.balanced


def test_what_became_of_a_group_takes_a_few_bytes(store: Store, ingest: Ingest) -> None:
    """4,000 groups of a dataset of 100,000 rows, nine of ten of them trained."""
    chance = Random(3)
    for start in range(0, 4000, 500):
        events = [
            event(f"0.{n}.1.1", "trained", step=n // 32, row_index=chance.randrange(100_000))
            if n % 10
            else event(f"0.{n}.1.1", "dropped", reason="stale", row_index=n)
            for n in range(start, start + 500)
        ]
        send(ingest, events)
        prune(store, keep_groups=100)
    with reading(store) as (connection, _):
        table = schema.ledger_archive
        size = connection.scalar(select(func.sum(func.length(table.c.groups))))
        assert connection.scalar(select(func.count()).select_from(schema.ledger_groups)) == 100
    assert size is not None
    assert size / 3900 < 6
    assert said(store) == {"trained": 3600, "dropped": 400}


def test_replicas_that_hear_of_the_same_groups_count_each_once(postgres_url: str) -> None:
    """Three aggregators get all events of 200 groups, in orders of their own, and prune them."""
    chance = Random(7)
    stories = [story(chance, ordinal) for ordinal in range(200)]
    events = [each for story in stories for each in story]
    stores = [Store.open(postgres_url) for _ in range(3)]

    def take(number: int) -> None:
        order = Random(number)
        mine = shuffled(events, order)
        ingest = Ingest(stores[number], producer=f"aggregator-{number}")
        producer = Producer(f"trainer-{number}")
        for start in range(0, len(mine), 60):
            request = producer.request(
                [("rollout/failed_total", count(1))], events=mine[start : start + 60]
            )
            ingest.take(decode(request), now_s=NOW_S)
            with stores[number].rolling() as connection:
                if connection is not None:
                    run_id = connection.scalars(select(schema.runs.c.id)).one()
                    ledger.prune(connection, run_id, keep_groups=order.randrange(20, 60))

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(take, number) for number in range(3)]:
            done.result()
    assert said(stores[0]) == expected(stories)
    for store in stores:
        store.close()


def test_a_group_id_is_a_name_of_a_group() -> None:
    request = Producer("p").request(events=[event("0.01.1.1", "dispatched"), event("x", "scored")])
    assert [each.reason for each in decode(request).rejected] == ["bad_event", "bad_event"]
    assert GroupId(0, 1, 1, 1) == parse("0.1.1.1")
