"""Calls that are sent together, on real servers: each is answered as if it were alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import get_args

import pytest
from redis.exceptions import ResponseError

from services.common import queue
from services.common.lifecycle import cancel
from services.common.queue import GROUP, QueueClient
from services.common.queue_servers import open_client
from services.common.streams import Entry, Outcome, Stage
from services.common.together import BATCH_BYTES, MAX_CALLS, Together
from tests.services.common.test_streams import connected, stage, started, take
from tests.waiting import until


async def calls(client: QueueClient) -> int:
    """Scripts that the server has been asked for by their names."""
    seen = await client.raw.info("commandstats")
    return int(seen.get("cmdstat_evalsha", {"calls": 0})["calls"])


async def taken(worker: Stage, number: int) -> dict[str, Entry]:
    entries = list[Entry]()
    while len(entries) < number:
        entries += await take(worker, number)
    return {entry.group_id: entry for entry in entries}


async def test_results_that_are_ready_together_are_sent_together(queue_url: str) -> None:
    names = [f"0.{number}.1.0" for number in range(40)]
    async with connected(queue_url) as client:
        await started(client, *names)
        worker = stage(client)
        entries = await taken(worker, 40)
        first = next(iter(entries.values()))
        await worker.hand_off(first, data=b"loads the script", n=1)
        before = await calls(client)
        words = await asyncio.gather(
            *(
                worker.hand_off(entry, data=name.encode(), n=1)
                for name, entry in entries.items()
                if entry is not first
            )
        )
        assert await calls(client) == before + 1
        assert set(words) == {"done"}
        found = await client.raw.xrange(client.keys.groups)
        assert [fields[b"id"] for _, fields in found] == [name.encode() for name in names]
        assert all(fields[b"data"] == fields[b"id"] for _, fields in found[1:])
        assert worker.held == 0
        assert await client.raw.xlen(client.keys.requests) == 0


async def test_each_is_answered_for_itself(queue_url: str) -> None:
    names = ["settled", "claimed", "good", "good too", "too many"]
    async with connected(queue_url) as client:
        run = await started(client, *names)
        worker = stage(client, capacity=2)
        entries = await taken(worker, 5)
        await run.settle([("", "settled")], step=1)
        claimed = entries["claimed"].entry_id
        await client.raw.xclaim(client.keys.requests, GROUP, "another", 0, [claimed])
        tasks = [
            asyncio.create_task(worker.hand_off(entries[name], data=b"x", n=1)) for name in names
        ]
        done, blocked = await asyncio.wait(tasks, timeout=1.0)
        assert blocked == {tasks[4]}
        assert done == set(tasks[:4])
        assert [task.result() for task in tasks[:4]] == ["void", "lost", "done", "done"]
        await client.raw.xtrim(client.keys.groups, maxlen=0, approximate=False)
        assert await tasks[4] == "done"
        [(_, fields)] = await client.raw.xrange(client.keys.groups)
        assert fields[b"id"] == b"too many"


async def test_results_and_tombstones_go_where_they_belong(queue_url: str) -> None:
    async with connected(queue_url) as client:
        await started(client, "a", "b", "c")
        worker = stage(client)
        entries = await taken(worker, 3)
        ends = [
            worker.hand_off(entries["a"], data=b"x", n=1),
            worker.tombstone(entries["b"], reason="failed"),
            worker.hand_off(entries["c"], data=b"x", n=1),
        ]
        assert await asyncio.gather(*ends) == ["done"] * 3
        groups = await client.raw.xrange(client.keys.groups)
        assert [fields[b"id"] for _, fields in groups] == [b"a", b"c"]
        [(_, fields)] = await client.raw.xrange(client.keys.samples)
        assert (fields[b"id"], fields[b"reason"]) == (b"b", b"failed")


async def test_large_results_are_sent_alone(valkey_url: str) -> None:
    async with connected(valkey_url) as client:
        await started(client, *"abcd")
        worker = stage(client)
        entries = await taken(worker, 4)
        await worker.hand_off(entries["a"], data=b"loads the script", n=1)
        before = await calls(client)
        data = b"x" * (BATCH_BYTES // 2 + 1)
        ends = [worker.hand_off(entries[name], data=data, n=1) for name in "bcd"]
        assert await asyncio.gather(*ends) == ["done"] * 3
        assert await calls(client) == before + 3


async def test_what_is_cancelled_before_it_is_sent_is_not(valkey_url: str) -> None:
    async with connected(valkey_url) as client:
        await started(client, "a", "b")
        worker = stage(client)
        entries = await taken(worker, 2)
        gone, stays = (
            asyncio.create_task(worker.hand_off(entries[name], data=b"x", n=1)) for name in "ab"
        )
        # Both have asked, and nothing is sent before the next turn of the loop.
        asyncio.get_running_loop().call_soon(gone.cancel)
        assert await stays == "done"
        with pytest.raises(asyncio.CancelledError):
            await gone
        [(_, fields)] = await client.raw.xrange(client.keys.groups)
        assert fields[b"id"] == b"b"
        assert await worker.give_back() == 1


async def test_an_error_is_raised_by_all_that_it_befell(valkey_url: str) -> None:
    async with connected(valkey_url) as client:
        await started(client, "a", "b")
        worker = stage(client)
        entries = await taken(worker, 2)
        await client.raw.delete(client.keys.groups)
        await client.raw.set(client.keys.groups, "no stream")
        ends = [worker.hand_off(entry, data=b"x", n=1) for entry in entries.values()]
        errors = await asyncio.gather(*ends, return_exceptions=True)
        assert [type(error) for error in errors] == [ResponseError] * 2
        assert all("WRONGTYPE" in str(error) for error in errors)


@asynccontextmanager
async def asking_in_vain(number: int) -> AsyncIterator[tuple[Together, list[asyncio.Task[str]]]]:
    """So many who ask a server that is away, each for other keys."""
    client = QueueClient(open_client("redis://127.0.0.1:1/0", run="r"), "r", claim_after_s=5)
    together = Together(client, "hand_off", num_arguments=10)
    asking = [
        asyncio.create_task(together.send(["source", f"{index}", "o"], ["x"] * 10, num_bytes=1))
        for index in range(number)
    ]
    try:
        _, waiting = await asyncio.wait(asking, timeout=0.2)
        assert len(waiting) == number
        yield together, asking
    finally:
        await together.close()
        await client.close()


async def test_a_worker_that_ends_while_the_server_is_away_leaves_nobody_waiting() -> None:
    async with asking_in_vain(MAX_CALLS + 1) as (together, asking), asyncio.timeout(5):
        await together.close()
        for each in asking:
            with pytest.raises(asyncio.CancelledError):
                await each


async def test_a_call_that_nobody_waits_for_ends() -> None:
    """Else it would go on for as long as the server is away, and hold up others."""
    async with asking_in_vain(MAX_CALLS + 1) as (together, asking), asyncio.timeout(5):
        for each in asking:
            await cancel(each)
        await until(lambda: not together._calls)


def test_the_script_for_several_is_the_one_for_one() -> None:
    """Also in how many arguments it takes, and in what its words may be."""
    text = queue.SCRIPTS["hand_off"]
    assert all(f"'{word}'" in text for word in (*get_args(Outcome), "full"))
    assert "ARGV[10]" in text
    assert "ARGV[11]" not in text
