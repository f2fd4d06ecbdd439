"""The stage rule: take an entry from one stream, work on it, hand it off to the next, in one atomic
step.

A `Stage` is one worker's hold on its source stream. It renews its claims in the background, takes
over what dead workers left, and refuses to hand off what it has lost meanwhile. Claim token:
(consumer, delivery count). See docs/architecture.md for the rules and the Lua scripts beside this
file for their exact form.

waits_for: entries in the source stream, room in the target stream. unblocked_by: the stage before,
the stage after.
"""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import structlog

from services.common.config import Queue
from services.common.lifecycle import cancel
from services.common.queue import (
    BLOCK_S,
    CLOCK_TOLERANCE_S,
    EVALUATION_OF,
    GROUP,
    NEXT,
    QueueClient,
)
from services.common.recorder import Recorder
from services.common.together import Together

TAKEOVER_EVERY_S = 1.0
"""How often a worker looks for entries of dead workers."""

ALONE_AFTER_DELIVERIES = 2
"""An entry delivered so often before is worked on alone: one poison group must not take healthy
ones with it."""

RETURNED = b"~returned"
"""Holds what its worker gave back (scripts/give_back.lua): nobody fell silent."""

Outcome = Literal["done", "void", "lost"]
"""done: handed off. void: the group was settled meanwhile. lost: the claim was lost, the result
is to be thrown away."""

BLOCKED_KEY = {"requests": "rollout/score_block_s", "groups": "rollout/backpressure_s"}
"""Metric for time that a full target stream held a result back."""


@dataclass(frozen=True)
class Clock:
    """The run's clock, as the queue server told it with the last take or renewal."""

    attempt: int = 0
    step: int = 0
    state: str = ""
    """ "running", "done", or "" before a trainer has started."""


@dataclass(eq=False)
class Entry:
    """One entry that this worker holds."""

    stream: str
    """Name of the stream it was taken from: "requests", "eval_requests", ..."""
    entry_id: str
    group_id: str
    data: bytes
    deliveries: int
    wait_s: float | None = None
    """Seconds it waited in the stream by the server's clock; None when unknown (taken over, or a
    stepped clock)."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the claim is lost: cancel the work."""
    taken_s: float = field(default_factory=time.monotonic)
    blocked_s: float = 0.0

    @property
    def evaluation(self) -> bool:
        """True for entries of the evaluation streams."""
        return self.stream.startswith("eval")


class Stage:
    """One worker on one source stream ("requests" or "groups"), evaluation's twin included.

    `async with stage:` runs renewal in the background. `capacity` bounds the entries waiting in the
    target.
    """

    def __init__(
        self,
        client: QueueClient,
        *,
        name: str,
        consumer: str,
        settings: Queue,
        capacity: int,
        recorder: Recorder,
    ) -> None:
        self.clock = Clock()
        self._run_began_s = -math.inf
        """By our monotonic clock, once the server has said it."""
        self.consumer = consumer
        self._client, self._keys = client, client.keys
        self._name = name
        self._settings, self._capacity, self._recorder = settings, capacity, recorder
        self._held: dict[tuple[str, str], Entry] = {}
        self._hand_offs = Together(client, "hand_off", num_arguments=10)
        self._next_takeover_s = 0.0
        self._reconnects = client.reconnects
        self._renewal: asyncio.Task[None] | None = None
        client.recorder = recorder

    async def __aenter__(self) -> Self:
        self._renewal = asyncio.create_task(self._renew_for_ever())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._renewal is not None:
            await cancel(self._renewal)
        await self._hand_offs.close()

    @property
    def held(self) -> int:
        """Entries that this worker holds."""
        return len(self._held)

    async def take(
        self, limit: int, *, version: Callable[[], Awaitable[int]] | None = None
    ) -> list[Entry]:
        """Up to `limit` entries (evaluation first), waiting about a second for one; [] when none
        came.

        `version` tells the policy version that a generator serves: it is awaited when entries have
        come (they are held meanwhile), and noted as the one that their groups began with.
        """
        if self._renewal is not None and self._renewal.done():
            self._renewal.result()  # raises what ended it: without renewal nothing may be taken
        if limit < 1 or any(e.deliveries > ALONE_AFTER_DELIVERIES for e in self._held.values()):
            await asyncio.sleep(0.05)
            return []
        entries = await self._take_over(limit)
        if not entries:
            entries = await self._read(limit)
        if not entries:
            return []
        return await self._begin(entries, version)

    async def hand_off(self, entry: Entry, *, data: bytes, n: int) -> Outcome:
        """Add the result to the next stream and remove the entry, atomically; waits while the
        next stream is full."""
        return await self._finish(
            entry, data=data, n=n, capacity=0 if entry.evaluation else self._capacity
        )

    async def tombstone(self, entry: Entry, *, reason: str) -> Outcome:
        """End a group without a result: the trainer is told, and nothing waits for room."""
        return await self._finish(entry, data=b"", n=0, reason=reason, capacity=0)

    async def refuse(self, entry: Entry, *, reason: str) -> Outcome:
        """Move what cannot be processed to the dead letters, with its bytes and reason; the
        trainer is told."""
        settings = self._settings
        token = f"{entry.stream}:{self.consumer}:{entry.deliveries}"
        last = "evals" if entry.evaluation else "samples"
        answer = await self._client.script(
            "refuse",
            [
                self._key(entry.stream),
                self._keys.dead,
                self._key(last),
                self._keys.outstanding,
                self._keys.clock,
            ],
            [
                self.consumer,
                entry.entry_id,
                entry.deliveries,
                entry.group_id,
                reason,
                entry.data,
                entry.stream,
                settings.dead_max_entries,
                settings.dead_max_bytes,
                "0" if entry.evaluation else "1",
                "1" if entry.group_id else "0",
                token,
            ],
        )
        self._recorder.count("queue/dead_total")
        structlog.get_logger().error(
            "refused to the dead letters", group=entry.group_id, reason=reason
        )
        return self._ended(entry, answer)

    async def give_back(self) -> int:
        """Make everything still held claimable at once (SIGTERM), without counting it as a
        delivery; how many."""
        count = 0
        for stream in (self._name, EVALUATION_OF[self._name]):
            held = [e for (name, _), e in self._held.items() if name == stream]
            triples = [x for e in held for x in (e.entry_id, e.deliveries, e.group_id)]
            idle_ms = int(self._settings.claim_after_s * 1000) + 1
            count += await self._client.script(
                "give_back",
                [self._key(stream), self._keys.outstanding],
                [self.consumer, idle_ms, *triples],
            )
            for entry in held:
                entry.lost.set()
        self._held.clear()
        return count

    def _key(self, stream: str) -> str:
        return str(getattr(self._keys, stream))

    async def _read(self, limit: int) -> list[Entry]:
        evaluation, main = EVALUATION_OF[self._name], self._name
        read = self._client.raw.xreadgroup
        for stream in (evaluation, main):
            source = {self._key(stream): ">"}
            found = await self._client.call(
                partial(read, GROUP, self.consumer, source, count=limit)
            )
            if found:
                return self._entries(found, deliveries=1)
        sources = {self._key(evaluation): ">", self._key(main): ">"}
        block_ms = int(BLOCK_S * 1000)
        found = await self._client.call(
            partial(read, GROUP, self.consumer, sources, count=1, block=block_ms)
        )
        return self._entries(found, deliveries=1)

    def _entries(self, found: Any, *, deliveries: int) -> list[Entry]:
        entries = []
        for key, items in found or ():
            stream = key.decode().rsplit(":", 1)[1]
            for entry_id, fields in items:
                entries.append(self._entry(stream, entry_id, fields, deliveries))
        return entries

    def _entry(
        self, stream: str, entry_id: bytes, fields: dict[bytes, bytes] | None, deliveries: int
    ) -> Entry:
        fields = fields or {}
        return Entry(
            stream=stream,
            entry_id=entry_id.decode(),
            group_id=fields.get(b"id", b"").decode(errors="replace"),
            data=fields.get(b"data", b""),
            deliveries=deliveries,
        )

    async def _take_over(self, limit: int) -> list[Entry]:
        """Claim entries whose workers have not renewed them for claim_after_s; at the last
        delivery, refuse them."""
        now = time.monotonic()
        if now < max(self._next_takeover_s, self._client.no_takeover_before_s):
            return []
        self._next_takeover_s = now + TAKEOVER_EVERY_S
        for stream in (EVALUATION_OF[self._name], self._name):
            chosen = await self._choose(stream, limit)
            taken, silent = [], 0
            for entry_id, deliveries, holder in chosen:
                if time.monotonic() < self._client.no_takeover_before_s:
                    break  # the server was away meanwhile: idle times count that
                entry = await self._claim(stream, entry_id, deliveries)
                if entry is None:
                    continue
                if deliveries >= self._settings.max_deliveries:
                    self._held[stream, entry.entry_id] = entry
                    await self.refuse(entry, reason=f"its worker died {deliveries} times")
                    continue
                taken.append(entry)
                silent += holder != RETURNED
            if silent:
                self._recorder.count("queue/takeover_total", silent)
            if taken:
                return taken
        return []

    async def _choose(self, stream: str, limit: int) -> list[tuple[str, int, bytes]]:
        """Entries to claim: id, deliveries, who holds them."""
        idle_ms = int(self._settings.claim_after_s * 1000)
        cursor, chosen = "-", list[tuple[str, int, bytes]]()
        while len(chosen) < limit:
            page = await self._client.call(
                partial(
                    self._client.raw.xpending_range,
                    self._key(stream),
                    GROUP,
                    min=cursor,
                    max="+",
                    count=100,
                    idle=idle_ms,
                )
            )
            for item in page:
                entry_id, deliveries = item["message_id"].decode(), int(item["times_delivered"])
                if (stream, entry_id) in self._held:
                    continue
                one = (entry_id, deliveries, item["consumer"])
                if deliveries >= ALONE_AFTER_DELIVERIES:
                    if not self._held and not chosen:
                        return [one]
                    continue
                chosen.append(one)
            if len(page) < 100:
                break
            cursor = f"({page[-1]['message_id'].decode()}"
        return chosen[:limit]

    async def _claim(self, stream: str, entry_id: str, deliveries: int) -> Entry | None:
        idle_ms = int(self._settings.claim_after_s * 1000)
        key = self._key(stream)
        found = await self._client.call(
            lambda: self._client.raw.xclaim(key, GROUP, self.consumer, idle_ms, [entry_id])
        )
        live = [item for item in found or () if item and item[0] is not None]
        if not live:
            # Another worker was faster, or the body is gone (6.2 then answers None and keeps it
            # pending).
            if not await self._client.call(
                lambda: self._client.raw.xrange(key, entry_id, entry_id)
            ):
                await self._client.call(lambda: self._client.raw.xack(key, GROUP, entry_id))
            return None
        return self._entry(stream, live[0][0], live[0][1], deliveries + 1)

    async def _begin(
        self, entries: list[Entry], version: Callable[[], Awaitable[int]] | None
    ) -> list[Entry]:
        held = []
        # Before any call: what it takes must be renewed from the first moment.
        self._held |= {(entry.stream, entry.entry_id): entry for entry in entries}
        served = "" if version is None else await version()
        for stream in {e.stream for e in entries}:
            mine = [e for e in entries if e.stream == stream]
            triples = [x for e in mine for x in (e.entry_id, e.deliveries, e.group_id)]
            tracked = "0" if stream.startswith("eval") else "1"
            clock, words = await self._client.script(
                "begin",
                [self._key(stream), self._keys.outstanding, self._keys.clock],
                [self.consumer, served, tracked, *triples],
            )
            self._set_clock(clock)
            for entry, word in zip(mine, words, strict=True):
                if word != "held":
                    self._drop(entry, count_lost=word == "lost")
                    continue
                self._note_wait(entry, now_ms=clock[3])
                if entry.deliveries > 1:
                    self._recorder.count("queue/redelivered_total")
                held.append(entry)
        return held

    def _note_wait(self, entry: Entry, *, now_ms: int) -> None:
        if entry.deliveries > 1:
            return
        wait_s = (now_ms - int(entry.entry_id.split("-")[0])) / 1000
        # No group is older than its run; by the server's clock alone a step of it would age both.
        if not 0 <= wait_s <= time.monotonic() - self._run_began_s + CLOCK_TOLERANCE_S:
            self._recorder.count("queue/bad_wait_total")
            return
        entry.wait_s = wait_s

    def _set_clock(self, clock: list[Any]) -> None:
        self.clock = Clock(attempt=int(clock[0]), step=int(clock[1]), state=clock[2])
        now_ms, started_ms = clock[3:5]
        if started_ms and self._run_began_s == -math.inf:
            self._run_began_s = time.monotonic() - (now_ms - started_ms) / 1000
        self._recorder.set_clock(attempt=self.clock.attempt, step=self.clock.step)

    async def _finish(
        self, entry: Entry, *, data: bytes, n: int, capacity: int, reason: str = ""
    ) -> Outcome:
        target = NEXT[entry.stream]
        if reason:
            target = "evals" if entry.evaluation else "samples"
        keys = [self._key(entry.stream), self._key(target), self._keys.outstanding]
        token = f"{target}:{self.consumer}:{entry.deliveries}"
        tracked = "0" if entry.evaluation else "1"
        arguments = [
            self.consumer,
            entry.entry_id,
            entry.deliveries,
            entry.group_id,
            n,
            data,
            capacity,
            token,
            tracked,
            reason,
        ]
        pause_s = 0.01
        while True:
            answer = await self._hand_offs.send(keys, arguments, num_bytes=len(data))
            if answer != "full":
                return self._ended(entry, answer)
            blocked = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(entry.lost.wait(), pause_s * random.uniform(0.5, 1.0))
            pause_s = min(0.5, pause_s * 2)
            seconds = time.monotonic() - blocked
            entry.blocked_s += seconds
            self._recorder.count(BLOCKED_KEY[self._name], seconds)

    def _ended(self, entry: Entry, answer: str) -> Outcome:
        self._drop(entry, count_lost=answer == "lost")
        assert answer in ("done", "void", "lost"), answer
        return answer  # type: ignore[return-value]

    def _drop(self, entry: Entry, *, count_lost: bool) -> None:
        self._held.pop((entry.stream, entry.entry_id), None)
        entry.lost.set()
        if count_lost:
            self._recorder.count("queue/lost_total")

    async def _renew_for_ever(self) -> None:
        every_s = self._settings.claim_after_s / 3
        next_s = time.monotonic() + every_s
        while True:
            await asyncio.sleep(min(0.25, every_s / 4))
            reconnected = self._client.reconnects != self._reconnects
            if time.monotonic() < next_s and not reconnected:
                continue
            self._reconnects = self._client.reconnects
            next_s = time.monotonic() + every_s
            for stream in (self._name, EVALUATION_OF[self._name]):
                await self._renew(stream)

    async def _renew(self, stream: str) -> None:
        """Renew what is in this worker's own table and below max_work_s; also how an idle worker
        learns the clock."""
        now, limit_s = time.monotonic(), self._settings.max_work_s
        mine = [
            e
            for (name, _), e in self._held.items()
            if name == stream and now - e.taken_s - e.blocked_s < limit_s
        ]
        pairs = [x for e in mine for x in (e.entry_id, e.deliveries)]
        clock, words = await self._client.script(
            "renew", [self._key(stream), self._keys.clock], [self.consumer, *pairs]
        )
        self._set_clock(clock)
        for entry, word in zip(mine, words, strict=True):
            if word == "lost" and (entry.stream, entry.entry_id) in self._held:
                self._drop(entry, count_lost=True)
