"""The trainer's side of the queue where replies are lost; the scripts are tested in
tests/services/common/test_streams.py."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common import queue
from services.common.config import Queue
from services.common.errors import Fenced, UserError
from services.common.queue import GROUP, QueueClient
from services.trainer.run_queue import Delivery, QueueLost, RunQueue


@asynccontextmanager
async def started(url: str, *groups: str) -> AsyncIterator[tuple[QueueClient, RunQueue]]:
    """An attempt with scored groups in `samples`."""
    client = await queue.connect(url, run="r", claim_after_s=5)
    try:
        run = RunQueue(client)
        await run.start(floor=1, recipe="x")
        for group in groups:
            await client.raw.hset(client.keys.outstanding, group, "samples:w:1||")
            await client.raw.xadd(
                client.keys.samples, {"id": group, "data": b"data of " + group.encode()}
            )
        yield client, run
    finally:
        await client.close()


async def lose_reply(client: QueueClient, run: RunQueue, stream: str) -> None:
    """The server delivers all to the trainer; the connection breaks before it hears of it."""
    key = getattr(client.keys, stream)
    await client.raw.xreadgroup(GROUP, run.consumer, {key: ">"})
    client.reconnects += 1


def names(deliveries: list[Delivery]) -> list[str]:
    return [delivery.group_id for delivery in deliveries]


async def test_entries_of_a_lost_reply_come_again_and_those_held_do_not(valkey_url: str) -> None:
    async with started(valkey_url, "a", "b", "c", "d") as (client, run):
        held = await run.take(1)
        await lose_reply(client, run, "samples")
        assert names(held) == ["a"]
        assert names(await run.take(2)) == ["b", "c"]
        assert names(await run.take(2)) == ["d"]
        assert await run.take(2, wait=False) == []
        await run.settle([(held[0].entry_id, "a")], step=1)
        client.reconnects += 1
        assert await run.take(2, wait=False) == []


async def test_entries_of_an_evaluation_come_again_too(valkey_url: str) -> None:
    async with started(valkey_url) as (client, run):
        await client.raw.xadd(client.keys.evals, {"id": "eval.0-0.1.0", "data": b"x"})
        await lose_reply(client, run, "evals")
        [delivery] = await run.take(5, evaluation=True)
        assert (delivery.group_id, delivery.data) == ("eval.0-0.1.0", b"x")
        await run.discard_evaluation([delivery.entry_id])
        assert await client.raw.xlen(client.keys.evals) == 0


async def test_the_clock_does_not_go_back(valkey_url: str) -> None:
    async with started(valkey_url, "a") as (client, run):
        await run.settle([], step=5)
        await run.settle([("", "a")], step=4)
        assert await client.raw.hget(client.keys.clock, "step") == b"5"


async def test_settlements_wait_for_each_other(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated settlement is known by being the last one: another between its two tries would
    make it look as if the server had lost what it had removed itself."""
    async with started(valkey_url, "a", "b") as (client, run):
        deliveries = await run.take(2)
        script = client.script

        async def twice(name: str, *arguments: object) -> object:
            await script(name, *arguments)  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
            return await script(name, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(client, "script", twice)
        await asyncio.gather(
            *(run.settle([(each.entry_id, each.group_id)], step=1) for each in deliveries)
        )
        monkeypatch.undo()
        assert await run.outstanding() == {}
        with pytest.raises(QueueLost):
            await run.settle([(deliveries[0].entry_id, "a")], step=1)


async def test_what_a_server_lost_in_an_outage_is_settled_all_the_same(valkey_url: str) -> None:
    """A replica took over that had not received what the trainer took last."""
    async with started(valkey_url, "a", "b", "c") as (client, run):
        a, b, c = await run.take(3)
        samples = client.keys.samples

        async def lose(delivery: Delivery) -> None:
            await client.raw.xack(samples, GROUP, delivery.entry_id)
            await client.raw.xdel(samples, delivery.entry_id)

        await lose(a)
        await lose(b)
        client.reconnects += 1
        await run.settle([(a.entry_id, "a")], step=1)
        assert await run.take(1, wait=False) == []
        await run.settle([(b.entry_id, "b")], step=2)
        assert await run.outstanding() == {"c": "samples:w:1||"}
        # What has been seen to be there since is not lost by that outage.
        await lose(c)
        with pytest.raises(QueueLost):
            await run.settle([(c.entry_id, "c")], step=3)


async def test_dead_letters_of_the_trainer_are_bounded_as_those_of_workers(valkey_url: str) -> None:
    async with started(valkey_url, "a", "b", "c") as (client, run):
        by_count, by_bytes = Queue(dead_max_entries=2), Queue(dead_max_bytes=20)
        for delivery in await run.take(3):
            await run.bury(delivery, reason="broken", settings=by_count)
        found = await client.raw.xrange(client.keys.dead)
        assert [fields[b"id"] for _, fields in found] == [b"b", b"c"]
        assert found[0][1][b"deliveries"] == b"1"
        assert await client.raw.hget(client.keys.clock, "dead_bytes") == b"18"
        late = Delivery("9-9", "d", b"data of d", reason="", wait_s=None)
        await run.bury(late, reason="broken", settings=by_bytes)
        found = await client.raw.xrange(client.keys.dead)
        assert [fields[b"id"] for _, fields in found] == [b"c", b"d"]
        assert await client.raw.hget(client.keys.clock, "dead_bytes") == b"18"


async def test_a_wait_by_a_stepped_clock_is_unknown(valkey_url: str) -> None:
    """Entries of 1970 and of the next hour, around one of now: neither an epoch time nor a negative
    one is a wait."""
    async with started(valkey_url) as (client, run):
        seconds, _ = await client.raw.time()
        for entry_id in ("5-0", "*", f"{(seconds + 3600) * 1000}-0"):
            await client.raw.xadd(client.keys.samples, {"id": "a", "data": b""}, id=entry_id)
        epoch, now, ahead = await run.take(5)
        assert (epoch.wait_s, ahead.wait_s) == (None, None)
        assert now.wait_s is not None
        assert 0 <= now.wait_s < 60


async def test_a_server_that_lost_its_data_is_told_again(valkey_url: str) -> None:
    """It has forgotten the attempt, and is no newer one: nothing is fenced, held entries are no
    surprise."""
    async with started(valkey_url, "a") as (client, run):
        [held] = await run.take(1)
        await client.raw.flushall()
        await run.dispatch("b", b"x")
        assert (run.forgotten, run.reconnects) == (1, 1)
        await run.settle([(held.entry_id, "a")], step=3)
        assert list(await run.outstanding()) == ["b"]
        clock = await client.raw.hgetall(client.keys.clock)
        assert (clock[b"attempt"], clock[b"state"], clock[b"recipe"]) == (b"1", b"running", b"x")
        assert clock[b"step"] == b"3"
        await run.check()
        assert run.forgotten == 1


async def test_held_entries_that_a_forgetful_server_still_has_are_removed(valkey_url: str) -> None:
    """It has lost the clock alone: what was held is there, and must not be left behind."""
    async with started(valkey_url, "a") as (client, run):
        [held] = await run.take(1)
        await client.raw.delete(client.keys.clock)
        await run.check()
        assert run.forgotten == 1
        client.reconnects += 1
        assert await run.take(1, wait=False) == []
        await run.settle([(held.entry_id, "a")], step=3)
        assert await client.raw.xlen(client.keys.samples) == 0
        assert await run.outstanding() == {}


async def test_a_server_that_went_back_to_an_attempt_before_is_told_again(valkey_url: str) -> None:
    async with started(valkey_url) as (client, old):
        run = RunQueue(client)
        await run.start(floor=7, recipe="x")
        await client.raw.hset(client.keys.clock, "attempt", 1)
        await run.check()
        assert await client.raw.hget(client.keys.clock, "attempt") == b"7"
        with pytest.raises(Fenced, match="attempt 1 of run r was replaced"):
            await old.check()


async def test_what_a_replaced_trainer_read_late_is_not_lost(valkey_url: str) -> None:
    async with started(valkey_url, "a") as (client, old):
        run = RunQueue(client)
        await run.start(floor=1, recipe="x")
        assert names(await old.take(1)) == ["a"]  # a read is not fenced
        assert await run.take(1, wait=False) == []
        await run.check()
        assert names(await run.take(1, wait=False)) == ["a"]


async def test_a_start_brings_what_was_pending_before_it(valkey_url: str) -> None:
    async with started(valkey_url, "a", "b") as (client, old):
        await old.take(1)
        run = RunQueue(client)
        await run.start(floor=1, recipe="x", step=51)
        assert await client.raw.hget(client.keys.clock, "step") == b"51"
        assert names(await run.take(5, wait=False)) == ["a"]
        assert names(await run.take(5, wait=False)) == ["b"]


async def test_a_run_that_is_over_begins_again_only_when_asked_to(valkey_url: str) -> None:
    async with started(valkey_url) as (client, run):
        await run.finish()
        with pytest.raises(UserError, match="run r is complete in the queue"):
            await RunQueue(client).start(floor=1, recipe="x")
        with pytest.raises(UserError, match="another recipe"):
            await RunQueue(client).start(floor=1, recipe="y", mode="again")
        assert (await RunQueue(client).start(floor=1, recipe="x", mode="again"))[0] == 2
        with pytest.raises(UserError, match="run r has begun in the queue"):
            await RunQueue(client).start(floor=1, recipe="x", mode="first")


async def test_an_evaluation_that_a_replaced_trainer_read_late_is_not_lost(valkey_url: str) -> None:
    async with started(valkey_url) as (client, old):
        run = RunQueue(client)
        await run.start(floor=1, recipe="x")
        await client.raw.xadd(client.keys.evals, {"id": "eval.0.2.0", "data": b"x"})
        assert names(await old.take(1, evaluation=True)) == ["eval.0.2.0"]
        await run.check()
        assert names(await run.take(1, evaluation=True, wait=False)) == ["eval.0.2.0"]
