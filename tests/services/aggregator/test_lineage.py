"""Reading the ledger: the account of a run, the way of a group, rows and steps."""

import pytest
from headrace.v1 import metrics_pb2 as wire

from services.aggregator import lineage
from services.aggregator.group_ids import GroupId
from services.aggregator.ingest import Ingest
from services.aggregator.lineage import Detail
from services.aggregator.said import Said
from services.aggregator.store import Store
from tests.services.aggregator.making import NOW_S, Producer, event
from tests.services.aggregator.pruning import prune, reading

NO_STAGES = dict.fromkeys(name for name, *_ in lineage.STAGES)


def way(name: str, *, begin_s: float) -> list[tuple[str, wire.GroupEvent]]:
    """By who says it, the events of a group that was dispatched so long ago; 9 s in all."""
    moments = (
        *(("trainer-0", "dispatched", 0.0), ("generator-1", "generating", 0.5)),
        *(("generator-1", "generated", 4.5), ("scorer-0", "scoring", 5.0)),
        *(("scorer-0", "scored", 6.25), ("trainer-0", "queued", 7.0)),
    )
    said = [
        (who, event(name, state, age_s=begin_s - at_s, row_index=17, worker=who))
        for who, state, at_s in moments
    ]
    ended = event(name, "trained", age_s=begin_s - 9, step=3, worker="trainer-0")
    return [*said, ("trainer-0", ended)]


def tell(ingest: Ingest, said: list[tuple[str, wire.GroupEvent]]) -> None:
    for number, (who, each) in enumerate(reversed(said)):
        boot = f"{each.group_id}-{number}"
        service = who.split("-")[0]
        Producer(who, service=service, boot_id=boot).send(ingest, events=[each])


def test_the_stages_of_a_group_add_up(store: Store, ingest: Ingest) -> None:
    tell(ingest, way("0.17.1.1", begin_s=20))
    with reading(store) as (connection, run):
        found = lineage.detail(connection, run, GroupId(0, 17, 1, 1))
    assert isinstance(found, Detail)
    assert found.stages == {
        "wait_for_generator_s": 0.5,
        "generation_s": 4.0,
        "wait_for_scorer_s": 0.5,
        "scoring_s": 1.25,
        "wait_for_trainer_s": 2.75,
    }
    assert found.total_s == pytest.approx(9)
    assert sum(value or 0.0 for value in found.stages.values()) == pytest.approx(found.total_s)
    first = found.history[wire.GROUP_STATE_DISPATCHED]
    assert first == Said.once(NOW_S - 20, "trainer-0")


def test_a_stage_without_an_end_or_with_clocks_that_disagree_is_absent() -> None:
    assert lineage.stages(
        {1: Said.once(10, "t"), 2: Said.once(12, "g"), 5: Said.once(30, "s")}
    ) == (NO_STAGES | {"wait_for_generator_s": 2.0})
    assert lineage.stages({1: Said.once(10, "t"), 2: Said.once(9.99, "g")}) == NO_STAGES
    dropped = {5: Said.once(10, "s"), 8: Said.once(11, "t"), 10: Said.once(99, "t")}
    assert lineage.stages(dropped) == NO_STAGES | {"wait_for_trainer_s": 1.0}


def test_the_account_names_who_holds_the_oldest_groups(store: Store, ingest: Ingest) -> None:
    producer = Producer("trainer-0")
    events = [
        event("0.1.1.1", "dispatched", age_s=900),
        event("0.1.1.1", "generating", age_s=890, worker="generator-0"),
        event("0.1.1.1", "generating", age_s=100, worker="generator-1", row_index=4),
        event("0.2.1.1", "generated", age_s=700, worker="generator-0", row_index=5),
        event("0.3.1.1", "queued", age_s=5, worker="trainer-0"),
        event("0.4.1.1", "given_up", age_s=5, reason="failed"),
        event("0.5.1.1", "given_up", age_s=4, reason="stale"),
        event("0.6.1.1", "dropped", age_s=4, reason="stale"),
        event("0.7.1.1", "trained", age_s=1000, step=0),
    ]
    producer.send(ingest, events=events)
    with reading(store) as (connection, run):
        account = lineage.account(connection, run, now_s=NOW_S, stuck_after_s=600)
    first, second, third = account.oldest
    assert (first.group_id, first.row_index, first.state) == ("0.1.1.1", 4, "generating")
    assert (first.age_s, first.in_state_s, first.holder) == (900, 890, "generator-1")
    assert (second.group_id, second.holder) == ("0.2.1.1", None)
    assert (third.group_id, third.holder) == ("0.3.1.1", "trainer-0")
    assert (account.num_stuck, account.stuck) == (2, (first, second))
    assert account.given_up == ("0.5.1.1", "0.4.1.1")
    assert account.counts.reasons == {
        "given_up": {"failed": 1, "stale": 1},
        "dropped": {"stale": 1},
    }
    assert (account.dispatched, account.counts.in_flight, account.balanced) == (7, 3, True)


def test_groups_that_were_given_up_are_named_after_they_were_pruned(
    store: Store, ingest: Ingest
) -> None:
    events = [event(f"0.{n}.1.1", "given_up", age_s=100 - n) for n in range(5)]
    Producer("trainer-0").send(ingest, events=events)
    prune(store, keep_groups=2)
    with reading(store) as (connection, run):
        account = lineage.account(connection, run, now_s=NOW_S, stuck_after_s=600)
    assert sorted(account.given_up) == [f"0.{n}.1.1" for n in range(5)]
    assert account.given_up[:2] == ("0.4.1.1", "0.3.1.1")


def test_from_steps_to_rows_and_back_also_where_groups_were_pruned(
    store: Store, ingest: Ingest
) -> None:
    """Row 17 in two epochs, twice in the first; step 3 made again by attempt 2."""
    events = [
        event("0.5.1.1", "dropped", row_index=17, reason="stale", age_s=90),
        event("0.5.1.2", "trained", row_index=17, step=3, age_s=80),
        event("0.5.1.2", "rolled_back", age_s=60),
        event("0.9.1.1", "trained", row_index=2, step=3, age_s=80),
        event("0.9.1.1", "rolled_back", age_s=60),
        event("0.5.2.1", "trained", row_index=17, step=3, age_s=50),
        event("1.40.2.1", "generating", row_index=17, age_s=10),
        event("1.41.2.1", "trained", row_index=2, step=4, age_s=10),
    ]
    Producer("trainer-0").send(ingest, events=events)
    for pruned in (0, 3):
        assert prune(store, keep_groups=5 - pruned) == pruned
        with reading(store) as (connection, run):
            of_row, number = lineage.of_row(connection, run, 17)
            of_step, _ = lineage.of_step(connection, run, 3)
            assert lineage.latest_step(connection, run) == 4
            assert lineage.of_step(connection, run, 5) == ([], 0)
        assert number == 4
        assert [(str(each.group), each.state, each.step) for each in of_row] == [
            ("0.5.1.1", "dropped", None),
            ("0.5.1.2", "rolled_back", 3),
            ("0.5.2.1", "trained", 3),
            ("1.40.2.1", "generating", None),
        ]
        assert [(str(each.group), each.row_index) for each in of_step] == [
            ("0.5.1.2", 17),
            ("0.5.2.1", 17),
            ("0.9.1.1", 2),
        ]
        assert sum(not each.in_detail for each in (*of_row, *of_step)) == (4 if pruned else 0)
