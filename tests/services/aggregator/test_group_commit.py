"""Batches that arrive together share a commit, and nothing else."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import schema
from services.aggregator.batch import BadBatch
from services.aggregator.group_commit import GroupCommit
from services.aggregator.ingest import Ingest, Receipt
from services.aggregator.store import Store
from tests.services.aggregator.making import NOW_S, Producer, count, event, observed
from tests.services.aggregator.test_ingest import value


class Writer:
    """One thread, which counts what it is given."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.calls = 0

    async def __call__(self, work: Callable[[], Any]) -> Any:
        self.calls += 1
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)


async def test_what_arrives_together_is_committed_together(store: Store, ingest: Ingest) -> None:
    writer = Writer()
    batches = GroupCommit(ingest, write=writer)
    requests = [
        Producer(f"generator-{number}").request([("rollout/failed_total", count(1))])
        for number in range(20)
    ]
    receipts = await asyncio.gather(
        *(batches.take(request, arrived_s=NOW_S) for request in [*requests, *requests])
    )
    assert [each.duplicate for each in receipts] == [False] * 20 + [True] * 20
    assert writer.calls <= 2
    assert value(store, "rollout/failed_total", "sum") == 20
    with store.engine.begin() as connection:
        assert connection.scalar(select(func.count()).select_from(schema.changes)) == writer.calls


async def test_a_batch_that_cannot_be_committed_takes_no_others_along(
    store: Store, ingest: Ingest
) -> None:
    with store.engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TRIGGER broken BEFORE INSERT ON ledger_groups "
                "BEGIN SELECT RAISE(ABORT, 'the disk broke'); END"
            )
        )
    batches = GroupCommit(ingest, write=Writer())
    good = [
        Producer(f"p{n}").request([("reward", observed([float(n)]))], age_s=1.0) for n in range(3)
    ]
    bad = Producer("bad").request(
        [("reward", observed([9.0]))], events=[event("0.0.1.0", "dispatched")]
    )
    outcomes = await asyncio.gather(
        *(batches.take(each, arrived_s=NOW_S) for each in (good[0], bad, *good[1:])),
        return_exceptions=True,
    )
    assert isinstance(outcomes[1], SQLAlchemyError)
    assert not any(isinstance(outcomes[index], Exception) for index in (0, 2, 3))
    assert value(store, "reward", "mean") == 1.0
    with pytest.raises(SQLAlchemyError, match="the disk broke"):
        await batches.take(bad, arrived_s=NOW_S)
    with store.engine.begin() as connection:
        connection.execute(text("DROP TRIGGER broken"))
    assert not (await batches.take(bad, arrived_s=NOW_S)).duplicate
    assert value(store, "reward", "max") == 9.0


async def test_a_batch_without_a_name_is_refused_and_the_others_are_not(
    store: Store, ingest: Ingest
) -> None:
    batches = GroupCommit(ingest, write=Writer())
    good = Producer("p").request([("reward", observed([1.0]))])
    refused, taken = await asyncio.gather(
        batches.take(Producer("").request(), arrived_s=NOW_S),
        batches.take(good, arrived_s=NOW_S),
        return_exceptions=True,
    )
    assert isinstance(refused, BadBatch)
    assert isinstance(taken, Receipt)
    with pytest.raises(BadBatch):
        await batches.take(Producer("").request(), arrived_s=NOW_S)


async def test_a_caller_that_goes_away_stops_nothing(store: Store, ingest: Ingest) -> None:
    batches = GroupCommit(ingest, write=Writer())
    first = asyncio.create_task(
        batches.take(Producer("p").request([("reward", observed([1.0]))]), arrived_s=NOW_S)
    )
    await asyncio.sleep(0)
    first.cancel()
    await batches.take(Producer("q").request([("reward", observed([3.0]))]), arrived_s=NOW_S)
    assert value(store, "reward", "mean") == 2.0
