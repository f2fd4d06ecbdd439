"""The delivery rules on real servers: Valkey 9, Redis 7, Redis 6.2. Each test runs on all three."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis
from redis.exceptions import ResponseError

from services.common import queue
from services.common.config import Queue
from services.common.config import Recorder as RecorderSettings
from services.common.errors import Fenced, UserError
from services.common.partials import Count
from services.common.queue import GROUP, QueueClient
from services.common.recorder import Recorder
from services.common.streams import Entry, Stage
from services.trainer.run_queue import QueueLost, RunQueue
from tests.waiting import always

SETTINGS = Queue(claim_after_s=0.3, max_work_s=60)


def recorder() -> Recorder:
    return Recorder(
        run="r", producer="p", service="scorer", settings=RecorderSettings(), channel=None
    )


def counted(worker: Stage, key: str) -> float:
    """What a worker's recorder has counted under this key."""
    total = 0.0
    for (name, *_), partial in worker._recorder.snapshot().items():
        if name == key:
            assert isinstance(partial, Count)
            total += partial.sum
    return total


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[QueueClient]:
    client = await queue.connect(url, run="r", claim_after_s=SETTINGS.claim_after_s)
    try:
        yield client
    finally:
        await client.close()


def stage(
    client: QueueClient, name: str = "requests", consumer: str = "w", capacity: int = 100
) -> Stage:
    return Stage(
        client,
        name=name,
        consumer=consumer,
        settings=SETTINGS,
        capacity=capacity,
        recorder=recorder(),
    )


async def started(client: QueueClient, *groups: str) -> RunQueue:
    run = RunQueue(client)
    await run.start(floor=1, recipe="x")
    for group in groups:
        await run.dispatch(group, b"request")
    return run


async def take(worker: Stage, limit: int = 10) -> list[Entry]:
    for _ in range(20):
        entries = await worker.take(limit)
        if entries:
            return entries
    return []


async def test_a_group_goes_through_all_stages_and_leaves_nothing(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client, "0.0.1.0")
        generator, scorer = stage(client), stage(client, "groups", "s")
        [entry] = await generator.take(5, version=always(7))
        assert (entry.group_id, entry.data, entry.evaluation) == ("0.0.1.0", b"request", False)
        assert entry.wait_s is not None
        assert 0 <= entry.wait_s < 60
        assert (await run.outstanding())["0.0.1.0"] == "requests:trainer:1|7|w:1"
        assert await generator.hand_off(entry, data=b"group", n=1) == "done"
        assert (await run.outstanding())["0.0.1.0"] == "groups:w:1|7|"
        [entry] = await scorer.take(5)
        assert await scorer.hand_off(entry, data=b"samples", n=8) == "done"
        [delivery] = await run.take(5)
        assert (delivery.group_id, delivery.data, delivery.reason) == ("0.0.1.0", b"samples", "")
        await run.settle([(delivery.entry_id, delivery.group_id)], step=1)
        assert await run.outstanding() == {}
        assert all(fill.waiting == fill.held == 0 for fill in (await run.gauge()).values())
        assert await stage(client).take(1) == []


async def test_a_wait_by_a_stepped_clock_is_unknown_and_counted(queue_url: str) -> None:
    """Entries of 1970 and of the next hour, around one of now. That the run began in 1970, too,
    excuses nothing: this worker has known the run for less."""
    async with connected(queue_url) as client:
        await started(client)
        worker = stage(client)
        await worker._renew("requests")
        await client.raw.hset(client.keys.clock, "started_ms", "5")
        seconds, _ = await client.raw.time()
        for group, entry_id in (("a", "5-0"), ("b", "*"), ("c", f"{(seconds + 3600) * 1000}-0")):
            await client.raw.hset(client.keys.outstanding, group, "requests:trainer:1||")
            await client.raw.xadd(client.keys.requests, {"id": group, "data": b""}, id=entry_id)
        epoch, now, ahead = await worker.take(5)
        assert (epoch.wait_s, ahead.wait_s) == (None, None)
        assert now.wait_s is not None
        assert 0 <= now.wait_s < 60
        assert counted(worker, "queue/bad_wait_total") == 2


async def test_dispatch_twice_is_once(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client, "0.0.1.0", "0.0.1.0")
        assert (await run.gauge())["requests"].waiting == 1


async def test_a_repeated_hand_off_answers_done_also_after_the_next_stage_began(
    queue_url: str,
) -> None:
    async with connected(queue_url) as client:
        await started(client, "a")
        generator, scorer = stage(client), stage(client, "groups", "s")
        [entry] = await generator.take(1)
        assert await generator.hand_off(entry, data=b"x", n=1) == "done"
        assert await generator.hand_off(entry, data=b"x", n=1) == "done"
        [_] = await scorer.take(1)
        assert await generator.hand_off(entry, data=b"x", n=1) == "done"
        assert await client.raw.xlen(client.keys.groups) == 1


async def test_a_result_is_refused_once_another_worker_has_taken_over(queue_url: str) -> None:
    async with connected(queue_url) as client:
        await started(client, "a")
        first, second = stage(client, consumer="one"), stage(client, consumer="two")
        [entry] = await first.take(1)
        await asyncio.sleep(SETTINGS.claim_after_s * 1.5)
        [again] = await take(second)
        assert again.deliveries == 2
        assert again.wait_s is None
        assert counted(second, "queue/takeover_total") == 1
        assert await first.hand_off(entry, data=b"late", n=1) == "lost"
        assert await second.hand_off(again, data=b"good", n=1) == "done"
        [(_, fields)] = await client.raw.xrange(client.keys.groups)
        assert fields[b"data"] == b"good"


async def test_renewal_keeps_slow_work_and_a_stolen_claim_is_noticed(queue_url: str) -> None:
    async with connected(queue_url) as client:
        await started(client, "a")
        async with stage(client, consumer="slow") as slow:
            thief = stage(client, consumer="thief")
            [entry] = await slow.take(1)
            await asyncio.sleep(SETTINGS.claim_after_s * 3)
            assert await thief.take(1) == []
            key = client.keys.requests
            await client.raw.xclaim(key, GROUP, "thief", 0, [entry.entry_id])
            await asyncio.wait_for(entry.lost.wait(), 5)
            assert slow.held == 0


async def test_a_worker_whose_renewal_has_failed_takes_nothing_more(queue_url: str) -> None:
    async with connected(queue_url) as client:
        await started(client, "a")
        async with stage(client) as worker:
            await client.raw.delete(client.keys.clock)
            await client.raw.set(client.keys.clock, "not a hash")  # what no retry will mend
            assert worker._renewal is not None
            await asyncio.wait({worker._renewal}, timeout=5)
            with pytest.raises(ResponseError):
                await worker.take(1)


async def test_renewal_of_a_zombie_does_not_steal_back(queue_url: str) -> None:
    async with connected(queue_url) as client:
        await started(client, "a")
        zombie, heir = stage(client, consumer="zombie"), stage(client, consumer="heir")
        [_] = await zombie.take(1)
        await asyncio.sleep(SETTINGS.claim_after_s * 1.5)
        [entry] = await take(heir)
        await zombie._renew("requests")  # what runs first after SIGCONT
        assert zombie.held == 0
        assert await heir.hand_off(entry, data=b"x", n=1) == "done"


async def test_capacity_counts_what_waits_not_what_is_held(queue_url: str) -> None:
    async with connected(queue_url) as client:
        await started(client, "a", "b", "c")
        generator, scorer = stage(client, capacity=1), stage(client, "groups", "s")
        a, b, c = await generator.take(3)
        assert await generator.hand_off(a, data=b"", n=1) == "done"
        blocked = asyncio.create_task(generator.hand_off(b, data=b"", n=1))
        await asyncio.sleep(0.1)
        assert not blocked.done()
        assert len(await scorer.take(1)) == 1
        assert await asyncio.wait_for(blocked, 5) == "done"
        assert await generator.tombstone(c, reason="failed") == "done"
        assert b.blocked_s > 0


async def test_a_settled_group_is_void(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client, "a", "b")
        worker = stage(client)
        [a] = await worker.take(1)
        await run.settle([("", "a"), ("", "b")], step=0)
        assert await worker.hand_off(a, data=b"x", n=1) == "void"
        assert await worker.take(5) == []
        assert await client.raw.xlen(client.keys.groups) == 0
        assert await client.raw.xlen(client.keys.requests) == 0


async def test_tombstones_reach_the_trainer(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client, "a")
        worker = stage(client)
        [a] = await worker.take(1)
        assert await worker.tombstone(a, reason="failed") == "done"
        [delivery] = await run.take(1)
        assert (delivery.group_id, delivery.reason, delivery.data) == ("a", "failed", b"")


async def test_poison_goes_to_the_dead_letters_with_its_bytes(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client, "a")
        worker = stage(client)
        [a] = await worker.take(1)
        assert await worker.refuse(a, reason="does not parse") == "done"
        assert await worker.refuse(a, reason="does not parse") == "done"
        [(_, dead)] = await client.raw.xrange(client.keys.dead)
        assert dead[b"data"] == b"request"
        assert dead[b"reason"] == b"does not parse"
        assert dead[b"deliveries"] == b"1"
        [delivery] = await run.take(5)
        assert delivery.reason == "poison"


async def test_dead_letters_are_bounded_by_count_and_bytes(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client, *[f"g{i}" for i in range(6)])
        small = Queue(dead_max_entries=100, dead_max_bytes=3 * len(b"request"))
        worker = Stage(
            client, name="requests", consumer="w", settings=small, capacity=9, recorder=recorder()
        )
        for entry in await worker.take(6):
            assert await worker.refuse(entry, reason="bad") == "done"
        dead = await client.raw.xrange(client.keys.dead)
        assert [fields[b"id"] for _, fields in dead] == [b"g3", b"g4", b"g5"]
        assert len(await run.take(10)) == 6


async def test_an_entry_that_kills_its_workers_is_worked_on_alone_then_refused(
    queue_url: str,
) -> None:
    async with connected(queue_url) as client:
        run = await started(client, "poison", "good")
        await stage(client, consumer="dead1").take(1)
        key = client.keys.requests
        await asyncio.sleep(SETTINGS.claim_after_s * 1.2)
        victim = stage(client, consumer="dead2")
        [poison] = await take(victim, 1)
        assert (poison.group_id, poison.deliveries) == ("poison", 2)
        await asyncio.sleep(SETTINGS.claim_after_s * 1.2)
        busy = stage(client, consumer="busy")
        [good] = await busy._begin(await busy._read(1), None)
        assert await busy.take(5) == []  # holds something: leaves the suspect alone
        loner = stage(client, consumer="loner")
        [poison] = await take(loner, 5)
        assert (poison.group_id, poison.deliveries) == ("poison", 3)
        assert await loner.take(5) == []  # alone with it
        assert await busy.hand_off(good, data=b"x", n=1) == "done"
        await asyncio.sleep(SETTINGS.claim_after_s * 1.2)
        judge = stage(client, consumer="judge")
        assert await judge.take(5) == []
        assert [fields[b"id"] for _, fields in await client.raw.xrange(client.keys.dead)] == [
            b"poison"
        ]
        assert (await client.raw.xpending(key, GROUP))["pending"] == 0
        assert [d.reason for d in await run.take(5)] == ["poison"]


async def test_an_entry_without_a_body_is_acknowledged(queue_url: str) -> None:
    async with connected(queue_url) as client:
        await started(client, "a")
        [entry] = await stage(client, consumer="dead").take(1)
        await client.raw.xdel(client.keys.requests, entry.entry_id)
        await asyncio.sleep(SETTINGS.claim_after_s * 1.2)
        assert await stage(client).take(1) == []
        assert (await client.raw.xpending(client.keys.requests, GROUP))["pending"] == 0


async def test_give_back_is_claimable_at_once_and_costs_no_delivery(queue_url: str) -> None:
    async with connected(queue_url) as client:
        await started(client, "a", "b")
        leaver, heir = stage(client, consumer="leaver"), stage(client, consumer="heir")
        a, b = await leaver.take(2)
        assert await leaver.give_back() == 2
        assert a.lost.is_set()
        names = {c["name"] for c in await client.raw.xinfo_consumers(client.keys.requests, GROUP)}
        assert b"leaver" not in names
        entries = await heir.take(5)
        assert [(e.group_id, e.deliveries) for e in entries] == [("a", 1), ("b", 1)]
        assert counted(heir, "queue/takeover_total") == 0, "nobody fell silent"
        assert await leaver.hand_off(b, data=b"x", n=1) == "lost"


async def test_evaluation_comes_first_and_is_not_outstanding(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client, "a")
        await run.dispatch("eval.0.1.5", b"q", evaluation=True)
        worker, scorer = stage(client), stage(client, "groups", "s")
        [entry] = await worker.take(1)
        assert entry.evaluation
        assert list(await run.outstanding()) == ["a"]
        assert await worker.hand_off(entry, data=b"r", n=1) == "done"
        [entry] = await scorer.take(1)
        assert await scorer.tombstone(entry, reason="unscored") == "done"
        [delivery] = await run.take(9, evaluation=True)
        assert (delivery.group_id, delivery.reason) == ("eval.0.1.5", "unscored")
        await run.discard_evaluation([delivery.entry_id])


async def test_a_second_trainer_fences_the_first_and_inherits(queue_url: str) -> None:
    async with connected(queue_url) as client:
        first = await started(client, "a", "b")
        for entry in await (generator := stage(client)).take(2):
            await generator.hand_off(entry, data=b"g", n=1)
        for entry in await (scorer := stage(client, "groups", "s")).take(1):
            await scorer.hand_off(entry, data=b"s", n=1)
        [held] = await first.take(5)
        second = RunQueue(client)
        attempt, places = await second.start(floor=7, recipe="x")
        assert attempt == 7
        assert set(places) == {"a", "b"}
        with pytest.raises(Fenced):
            await first.dispatch("c", b"")
        with pytest.raises(Fenced):
            await first.settle([(held.entry_id, "a")], step=1)
        pending = await client.raw.xpending_range(client.keys.samples, GROUP, "-", "+", 10)
        assert [item["consumer"] for item in pending] == [b"trainer-7"]
        assert (await second.start(floor=1, recipe="x"))[0] == 8


async def test_another_recipe_is_refused(queue_url: str) -> None:
    async with connected(queue_url) as client:
        await started(client)
        with pytest.raises(UserError, match="another recipe"):
            await RunQueue(client).start(floor=1, recipe="y")


async def test_settling_what_the_server_lost_is_fatal_and_repeating_is_not(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client, "a")
        [entry] = await (generator := stage(client)).take(1)
        await generator.tombstone(entry, reason="failed")
        [held] = await run.take(1)
        await client.raw.delete(client.keys.samples)
        with pytest.raises(QueueLost):
            await run.settle([(held.entry_id, held.group_id)], step=1)
        call = [run.attempt, 1, "same-call", "", "x"]
        keys = [client.keys.clock, client.keys.samples, client.keys.outstanding]
        assert await client.script("settle", keys, call) == "done"
        assert await client.script("settle", keys, call) == "done"


async def test_finish_empties_everything_and_workers_see_it(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client, "a", "b", "c")
        worker = stage(client)
        entries = await worker.take(2)
        await run.finish()
        assert await worker.hand_off(entries[0], data=b"x", n=1) == "lost"
        await worker._renew("requests")
        assert worker.clock.state == "done"
        assert entries[1].lost.is_set()
        assert await run.outstanding() == {}
        assert all(fill.waiting == fill.held == 0 for fill in (await run.gauge()).values())


async def test_groups_come_back_after_the_server_lost_everything(queue_url: str) -> None:
    async with connected(queue_url) as client:
        worker = stage(client)
        with redis.Redis.from_url(queue_url) as admin:
            admin.flushall()
        run = await started(client, "a")
        [entry] = await take(worker)
        assert await worker.hand_off(entry, data=b"x", n=1) == "done"
        assert (await run.gauge())["groups"].waiting == 1


async def test_an_evicting_server_is_refused(queue_url: str) -> None:
    with redis.Redis.from_url(queue_url) as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(UserError, match="noeviction"):
                async with connected(queue_url):
                    pass
        finally:
            admin.config_set("maxmemory-policy", "noeviction")


async def test_gauge_sees_waiting_held_and_age(queue_url: str) -> None:
    async with connected(queue_url) as client:
        run = await started(client, "a", "b", "c")
        await stage(client).take(1)
        fill = (await run.gauge())["requests"]
        assert (fill.waiting, fill.held) == (2, 1)
        assert fill.oldest_wait_s is not None
        assert (await run.gauge())["samples"].oldest_wait_s is None
