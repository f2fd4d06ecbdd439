"""What is done to a pipeline, each kind by its name, at moments drawn by a seed.

A fault is a coroutine that returns once it is lifted: the stopped process goes on, the server
is back, the network is as it was. What it returns says in a few words what was done.
"""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from services.common.errors import FENCED_STATUS
from tests.chaos.keeper import Keeper
from tests.chaos.pipeline import Pipeline

OFF_S = 5.0
"""How wrong a wall clock is."""

DELAY_S = 0.2
"""Of each direction."""

FENCED_WITHIN_S = 90.0
"""A second trainer has replaced the first before this, its start included."""

ENTRY_WITHIN_S = 5.0
"""How long is waited for an entry that can be delivered once more."""


class FaultFailed(AssertionError):
    """What was to happen did not."""


Fault = Callable[[Pipeline, random.Random], Awaitable[str]]


async def _until_running(keeper: Keeper) -> None:
    while not keeper.running:  # noqa: ASYNC110 - no event: it is started by its keeper
        await asyncio.sleep(0.05)


def _killed(keepers: Callable[[Pipeline], Sequence[Keeper]]) -> Fault:
    async def fault(pipeline: Pipeline, draw: random.Random) -> str:
        keeper = draw.choice(keepers(pipeline))
        await _until_running(keeper)
        keeper.signal(signal.SIGKILL)
        return keeper.name

    return fault


def _stopped(keepers: Callable[[Pipeline], Sequence[Keeper]]) -> Fault:
    """Longer than `claim_after_s`: others have taken its entries over when it wakes up."""

    async def fault(pipeline: Pipeline, draw: random.Random) -> str:
        keeper, seconds = draw.choice(keepers(pipeline)), draw.uniform(1.5, 3.0)
        await _until_running(keeper)
        keeper.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds * pipeline.plan.claim_after_s)
        keeper.signal(signal.SIGCONT)
        return f"{keeper.name} for {seconds * pipeline.plan.claim_after_s:.1f} s"

    return fault


async def aggregator_away(pipeline: Pipeline, draw: random.Random) -> str:
    seconds = draw.uniform(1.0, 4.0)
    pipeline.aggregator.held.clear()
    pipeline.aggregator.signal(signal.SIGKILL)
    await asyncio.sleep(seconds)
    pipeline.aggregator.held.set()
    return f"for {seconds:.1f} s"


async def queue_killed(pipeline: Pipeline, draw: random.Random) -> str:
    await pipeline.queue.kill()
    await asyncio.sleep(draw.uniform(0.0, 1.5))
    await pipeline.queue.start()
    return "with its data"


async def queue_emptied(pipeline: Pipeline, draw: random.Random) -> str:
    await pipeline.queue.kill()
    pipeline.queue.empty()
    await asyncio.sleep(draw.uniform(0.0, 1.0))
    await pipeline.queue.start()
    return "without its data"


async def queue_put_back(pipeline: Pipeline, draw: random.Random) -> str:
    copied: Path = pipeline.folder / "copied"
    seconds = draw.uniform(0.5, 4.0)
    pipeline.queue.copy(copied)
    await asyncio.sleep(seconds)
    await pipeline.queue.kill()
    pipeline.queue.restore(copied)
    await pipeline.queue.start()
    return f"to {seconds:.1f} s ago"


async def queue_tail_cut(pipeline: Pipeline, draw: random.Random) -> str:
    before = pipeline.queue.appended.stat().st_size
    await asyncio.sleep(draw.uniform(0.3, 2.0))
    await pipeline.queue.kill()
    grown = pipeline.queue.appended.stat().st_size - before
    lost = pipeline.queue.cut_to(before + draw.randrange(max(1, grown)))
    await pipeline.queue.start()
    return f"{lost} of {grown} bytes"


async def queue_stopped(pipeline: Pipeline, draw: random.Random) -> str:
    seconds = draw.uniform(0.5, 3.0) * pipeline.plan.claim_after_s
    pipeline.queue.signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    pipeline.queue.signal(signal.SIGCONT)
    return f"for {seconds:.1f} s"


async def connections_cut(pipeline: Pipeline, draw: random.Random) -> str:
    cut = 0
    for _ in range(draw.randint(1, 3)):
        cut += await pipeline.queue_proxy.cut()
        await asyncio.sleep(draw.uniform(0.0, 0.5))
    return f"{cut} connections"


async def connections_refused(pipeline: Pipeline, draw: random.Random) -> str:
    seconds = draw.uniform(0.5, 3.0)
    await pipeline.queue_proxy.refuse()
    await asyncio.sleep(seconds)
    await pipeline.queue_proxy.accept()
    return f"for {seconds:.1f} s"


async def delayed(pipeline: Pipeline, draw: random.Random) -> str:
    seconds = draw.uniform(2.0, 5.0)
    pipeline.queue_proxy.delay_s = DELAY_S
    await asyncio.sleep(seconds)
    pipeline.queue_proxy.delay_s = 0.0
    return f"{DELAY_S} s each way for {seconds:.1f} s"


async def weights_cut(pipeline: Pipeline, draw: random.Random) -> str:
    cut = 0
    for _ in range(draw.randint(1, 4)):
        while not pipeline.trainer_proxy.connections:  # noqa: ASYNC110 - generators come by themselves
            await asyncio.sleep(0.05)
        cut += await pipeline.trainer_proxy.cut()
        await asyncio.sleep(draw.uniform(0.0, 0.5))
    return f"{cut} connections to the trainer"


async def delivered_twice(pipeline: Pipeline, draw: random.Random) -> str:
    """A copy of entries, held or waiting, is added to the end of their stream."""
    done = []
    for _ in range(draw.randint(1, 3)):
        stream, _, fields = await _some_entry(pipeline, draw, held=True)
        await pipeline.client.xadd(stream, fields)
        done.append(_short(stream))
    return ", ".join(done)


async def out_of_order(pipeline: Pipeline, draw: random.Random) -> str:
    """Entries that wait change their place: to the end of their stream. `outstanding` is theirs
    as before, so they are the same deliveries, later."""
    done = []
    for _ in range(draw.randint(1, 3)):
        stream, entry, fields = await _some_entry(pipeline, draw, held=False)
        async with pipeline.client.pipeline(transaction=True) as both:
            both.xdel(stream, entry)
            both.xadd(stream, fields)
            await both.execute()
        done.append(_short(stream))
    return ", ".join(done)


async def _some_entry(pipeline: Pipeline, draw: random.Random, *, held: bool) -> Any:
    """Stream, id and fields of an entry; of one that no consumer has yet, unless `held`.

    Of a stream that is drawn, since `requests` has nearly always some; of any where it stays
    empty.
    """
    streams = [pipeline.keys.requests, pipeline.keys.groups, pipeline.keys.samples]
    drawn, loop = draw.choice(streams), asyncio.get_running_loop()
    begin_s = loop.time()
    while (waited_s := loop.time() - begin_s) < ENTRY_WITHIN_S:
        for stream in [drawn] if waited_s < ENTRY_WITHIN_S / 2 else streams:
            after = "-"
            if not held:
                groups = await pipeline.client.xinfo_groups(stream)
                after = "(" + groups[0]["last-delivered-id"].decode() if groups else "-"
            if found := await pipeline.client.xrange(stream, min=after, count=20):
                entry, fields = draw.choice(found)
                return stream, entry, fields
        await asyncio.sleep(0.01)
    raise FaultFailed(f"no entry in any stream for {ENTRY_WITHIN_S:g} s")


def _short(stream: str) -> str:
    return stream.rpartition(":")[2]


async def second_trainer(pipeline: Pipeline, draw: random.Random) -> str:
    """Started beside the first, which is refused from then on and ends."""
    old, new = pipeline.second_trainer()
    try:
        async with asyncio.timeout(FENCED_WITHIN_S):
            waits = [asyncio.create_task(each.over.wait()) for each in (old, new)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        raise FaultFailed(f"neither {old.name} nor {new.name} was replaced") from None
    finally:
        for wait in waits:
            wait.cancel()
    ended = old if old.over.is_set() else new
    if ended.ends[-1] not in (FENCED_STATUS, 0):
        raise FaultFailed(f"{ended.name} ended with {ended.ends[-1]}")
    if ended is new:
        pipeline.go_on_with(old)
    return f"{ended.name} ended with status {ended.ends[-1]}"


async def clock_off(pipeline: Pipeline, draw: random.Random) -> str:
    """From its restart on, one process lives OFF_S in the past or in the future."""
    keeper = draw.choice([*pipeline.generators, *pipeline.scorers, pipeline.aggregator])
    seconds = draw.choice([-OFF_S, OFF_S])
    await keeper.stop()
    pipeline.switch_clock(keeper, seconds)
    keeper.start()
    return f"{keeper.name} {seconds:+g} s"


def _scaled(service: str) -> Fault:
    async def fault(pipeline: Pipeline, draw: random.Random) -> str:
        workers = pipeline.scorers if service == "scorer" else pipeline.generators
        if len(workers) < 2 or (len(workers) < 3 and draw.random() < 0.5):
            return f"{pipeline.add(service).name} added"
        keeper = draw.choice(workers)
        return f"{keeper.name} removed, status {await pipeline.remove(keeper)}"

    return fault


FAULTS: dict[str, Fault] = {
    "trainer killed": _killed(lambda pipeline: [pipeline.trainer]),
    "trainer stopped": _stopped(lambda pipeline: [pipeline.trainer]),
    "generator killed": _killed(lambda pipeline: pipeline.generators),
    "generator stopped": _stopped(lambda pipeline: pipeline.generators),
    "scorer killed": _killed(lambda pipeline: pipeline.scorers),
    "scorer stopped": _stopped(lambda pipeline: pipeline.scorers),
    "aggregator away": aggregator_away,
    "queue killed": queue_killed,
    "queue emptied": queue_emptied,
    "queue put back": queue_put_back,
    "queue tail cut": queue_tail_cut,
    "queue stopped": queue_stopped,
    "connections cut": connections_cut,
    "connections refused": connections_refused,
    "delayed": delayed,
    "weights cut": weights_cut,
    "delivered twice": delivered_twice,
    "out of order": out_of_order,
    "second trainer": second_trainer,
    "clock off": clock_off,
    "generators scaled": _scaled("generator"),
    "scorers scaled": _scaled("scorer"),
}
