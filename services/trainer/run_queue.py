"""The trainer's side of the queue: attempts, dispatch, intake, settlement, the end, and the gauges.

The trainer alone starts attempts, frees places, and declares a group trained or dropped. Everything
here is fenced: once a newer attempt has started, the next call raises Fenced and this trainer
writes nothing more. A server that has lost its data, or went back to older ones, is told again
which attempt this is; what becomes of the groups is then seen by comparing (see comparison.py).
"""

import asyncio
import itertools
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from services.common.config import Queue
from services.common.errors import Fenced, UserError
from services.common.queue import BLOCK_S, CLOCK_TOLERANCE_S, GROUP, QueueClient, backoff_s
from services.common.together import Together

CONSUMER_IDLE_MS = 3_600_000
"""A consumer idle for so long with nothing pending belonged to a worker that is gone."""

DISPATCHES = 8
"""Under way at a time: they go to the server together."""

GAUGED = ("requests", "groups", "samples")
"""Streams whose fill is measured."""


class QueueLost(RuntimeError):
    """An entry that the trainer held is gone from the queue, and no outage explains it: somebody
    else has removed it. The checkpoint is what is left."""


@dataclass(frozen=True)
class Delivery:
    """One entry of `samples` or `evals`, held by the trainer until its group is settled."""

    entry_id: str
    group_id: str
    data: bytes
    reason: str
    """Of a tombstone; empty for a result."""
    wait_s: float | None
    """Seconds in the stream by the server's clock; None when that clock was stepped meanwhile: less
    than none, or more than this attempt has lasted."""


@dataclass(frozen=True)
class Fill:
    """How full one stream is."""

    waiting: int
    held: int
    oldest_wait_s: float | None


class RunQueue:
    """The queue of one run, as its trainer sees it."""

    def __init__(self, client: QueueClient) -> None:
        self._client, self._keys = client, client.keys
        self.attempt = 0
        self._recipe = ""
        self._started_s = -math.inf
        self._step = 0
        self.forgotten = 0
        """How often the server had lost this attempt, and with it what was dispatched."""
        self._settling, self._remembering = asyncio.Lock(), asyncio.Lock()
        self._dispatches = Together(client, "dispatch", num_arguments=4)
        streams = (self._keys.samples, self._keys.evals)
        self._taken: dict[str, set[str]] = {key: set() for key in streams}
        self._gone: set[str] = set()
        self._looked_back: dict[str, int | None] = dict.fromkeys(streams)
        self._sure_at = 0
        """`reconnects` of the client when all that was taken was last seen to be there."""

    @property
    def consumer(self) -> str:
        """The trainer's name in the consumer groups: one per attempt."""
        return f"trainer-{self.attempt}"

    @property
    def away(self) -> bool:
        """Whether the server does not answer at present."""
        return self._client.outages.lasts

    @property
    def reconnects(self) -> int:
        """How often the server was away and came back, or lost its data."""
        return self._client.reconnects + self.forgotten

    async def start(
        self,
        *,
        floor: int,
        recipe: str,
        step: int = 0,
        mode: Literal["", "first", "again"] = "",
    ) -> tuple[int, dict[str, str]]:
        """Begin an attempt, at least `floor`, with `step` open: its number, and the groups
        outstanding with their places.

        Raises UserError when the run was started with another recipe, is over (unless `mode` is
        "again"), or is there at all while `mode` is "first".
        """
        keys = [self._keys.clock, self._keys.samples, self._keys.outstanding]
        keys += [self._keys.eval_requests, self._keys.eval_groups, self._keys.evals]
        attempt, state, before, places, word = await self._client.script(
            "start", keys, [floor, recipe, step, mode]
        )
        if word == "refused":
            if before and before != recipe:
                raise UserError(
                    f"run {self._keys.run} exists in the queue with another recipe (model, data, "
                    "sampling, rewards, loss or seeds differ); choose another run name, or start "
                    "over with --fresh"
                )
            done = "is complete in the queue" if state == "done" else "has begun in the queue"
            raise UserError(
                f"run {self._keys.run} {done}, and its checkpoints are not here; give the folder "
                "that has them, choose another run name, or start over with --fresh"
            )
        self.attempt, self._recipe, self._step = int(attempt), recipe, step
        self._started_s = time.monotonic()
        self._sure_at = self._client.reconnects
        return self.attempt, dict(zip(places[::2], places[1::2], strict=True))

    async def check(self) -> None:
        """Look after what nothing else would find: raise Fenced when a newer attempt has begun;
        tell a server that has forgotten this one; have the entries that a replaced trainer read
        after this attempt began."""
        streams = [self._keys.samples, self._keys.evals]
        if await self._call("reclaim", [self._keys.clock, *streams], [self.attempt]) != "0":
            self._looked_back |= dict.fromkeys(streams)

    async def dispatch(self, group_id: str, data: bytes, *, evaluation: bool = False) -> None:
        """Put a request into the run; a repeated call changes nothing."""
        stream = self._keys.eval_requests if evaluation else self._keys.requests
        keys = [self._keys.clock, self._keys.outstanding, stream]
        arguments = [self.attempt, group_id, data, "0" if evaluation else "1"]
        await self._answered(lambda: self._dispatches.send(keys, arguments, num_bytes=len(data)))

    async def take(
        self, limit: int, *, evaluation: bool = False, wait: bool = True
    ) -> list[Delivery]:
        """Up to `limit` scored groups, which stay this trainer's until settled.

        With `wait`, about a second is waited for one.
        """
        key = self._keys.evals if evaluation else self._keys.samples
        entries = await self._look_back(key, limit)
        if not entries:
            entries = await self._read(
                key, ">", count=limit, block=int(BLOCK_S * 1000) if wait else None
            )
        if not entries:
            return []
        found = {entry_id.decode() for entry_id, _ in entries}
        self._taken[key].update(found)
        self._gone -= found
        now_s, micros = await self._client.call(self._client.raw.time)
        now_ms = now_s * 1000 + micros // 1000
        longest_s = time.monotonic() - self._started_s + CLOCK_TOLERANCE_S
        return [
            Delivery(
                entry_id=entry_id.decode(),
                group_id=fields.get(b"id", b"").decode(errors="replace"),
                data=fields.get(b"data", b""),
                reason=fields.get(b"reason", b"").decode(errors="replace"),
                wait_s=_wait_s(entry_id, now_ms, longest_s=longest_s),
            )
            for entry_id, fields in entries
        ]

    async def _look_back(self, key: str, limit: int) -> list[Any]:
        """At the start, and after an outage: entries that were pending for the attempt before, or
        whose delivery was lost with the server's reply. They are this trainer's, and no read of new
        ones would ever bring them again."""
        reconnects = self._client.reconnects
        if self._looked_back[key] == reconnects:
            return []
        pending = await self._read(key, "0", count=None, block=None)
        # They are there after all, also those that have been taken before; others are not: a
        # replica that became the primary had not received them yet.
        there = {entry_id.decode() for entry_id, _ in pending}
        self._gone -= there
        if key == self._keys.samples:
            self._gone |= self._taken[key] - there
            self._sure_at = reconnects
        lost = [entry for entry in pending if entry[0].decode() not in self._taken[key]]
        if len(lost) <= limit:
            self._looked_back[key] = reconnects
        return lost[:limit]

    async def _read(self, key: str, after: str, *, count: int | None, block: int | None) -> Any:
        found = await self._client.call(
            lambda: self._client.raw.xreadgroup(
                GROUP, self.consumer, {key: after}, count=count, block=block
            )
        )
        return [(entry_id, fields or {}) for entry_id, fields in found[0][1]] if found else []

    async def settle(self, pairs: Sequence[tuple[str, str]], *, step: int) -> None:
        """Take groups out of the run: (entry id or '', group id or '') each; the clock then says
        `step`, or a later one that it has said before.

        Raises Fenced, or QueueLost when an entry that was held is gone, and the server has not been
        away since it was seen to be there.
        """
        keys = [self._keys.clock, self._keys.samples, self._keys.outstanding]
        # One at a time: the server knows only the last call, so one whose reply was lost would,
        # when repeated after another, miss the entries that it has removed itself.
        async with self._settling:
            self._step = max(self._step, step)
            call = uuid.uuid4().hex

            def arguments() -> list[Any]:
                # What the server lost with all its data is no surprise: memory has the groups.
                named = [("" if entry in self._gone else entry, group) for entry, group in pairs]
                return [self.attempt, self._step, call, *(text for pair in named for text in pair)]

            sure_at = self._sure_at
            answer = await self._call("settle", keys, arguments)
        self._gone.difference_update(entry for entry, _ in pairs)
        self._taken[self._keys.samples].difference_update(entry for entry, _ in pairs)
        if answer == "lost" and sure_at == self._client.reconnects:
            raise QueueLost(
                "entries that this trainer held are gone from the queue server, which has not been "
                "away: did somebody else remove them?"
            )

    async def discard_evaluation(self, entry_ids: Sequence[str]) -> None:
        """Remove answered evaluations."""
        if entry_ids:
            await self._client.call(
                lambda: self._client.raw.xack(self._keys.evals, GROUP, *entry_ids)
            )
            await self._client.call(lambda: self._client.raw.xdel(self._keys.evals, *entry_ids))
            self._taken[self._keys.evals].difference_update(entry_ids)

    async def bury(self, delivery: Delivery, *, reason: str, settings: Queue) -> None:
        """Keep an entry of `samples` that breaks the contract in the dead letters; settle it
        afterwards."""
        keys = [self._keys.samples, self._keys.dead, self._keys.clock]
        arguments = [
            self.attempt,
            self.consumer,
            delivery.entry_id,
            delivery.group_id,
            reason,
            delivery.data,
            settings.dead_max_entries,
            settings.dead_max_bytes,
        ]
        await self._call("bury", keys, arguments)

    async def has(self, entry_id: str) -> bool:
        """Whether an entry of `samples` is still there."""
        return bool(
            await self._client.call(
                lambda: self._client.raw.xrange(self._keys.samples, min=entry_id, max=entry_id)
            )
        )

    async def outstanding(self) -> dict[str, str]:
        """All groups between dispatch and settlement, with their places."""
        found = await self._client.call(lambda: self._client.raw.hgetall(self._keys.outstanding))
        return {group.decode(): place.decode() for group, place in found.items()}

    async def finish(self) -> None:
        """Declare the run done and empty its streams."""
        keys = [self._keys.clock, self._keys.outstanding, *self._keys.streams]
        await self._call("finish", keys, [self.attempt])

    async def gauge(self) -> dict[str, Fill]:
        """How full each stream is, read in one script."""
        keys = [getattr(self._keys, name) for name in GAUGED]
        answer = await self._client.script("gauge", keys, [CONSUMER_IDLE_MS])
        return {
            name: Fill(
                waiting=waiting, held=held, oldest_wait_s=None if age_ms < 0 else age_ms / 1000
            )
            for name, (waiting, held, age_ms) in zip(GAUGED, answer, strict=True)
        }

    async def _call(
        self, script: str, keys: Sequence[str], arguments: Sequence[Any] | Callable[[], list[Any]]
    ) -> str:
        """Run a trainer's script; again once the server has been told what it had forgotten."""

        def ask() -> Awaitable[str]:
            values = arguments() if callable(arguments) else arguments
            return self._client.script(script, keys, values)

        return await self._answered(ask)

    async def _answered(self, ask: Callable[[], Awaitable[str]]) -> str:
        """The word that a script of the trainer answers; see `_call`."""
        for tries in itertools.count(1):
            forgotten = self.forgotten
            answer = str(await ask())
            self._fence(answer)
            if answer != "forgotten":
                return answer
            async with self._remembering:
                if self.forgotten == forgotten:  # else another call has told it
                    await self._remember()
            if tries > 1:
                await asyncio.sleep(backoff_s(tries))
        raise AssertionError("unreachable")

    async def _remember(self) -> None:
        """Have a server that lost its data, or went back, know this attempt."""
        self.forgotten += 1
        structlog.get_logger().error(
            "the queue server has lost its data, or went back to older ones", attempt=self.attempt
        )
        self._gone |= self._taken[self._keys.samples]
        await self._client.call(self._client.create_groups)
        arguments = [self.attempt, self._recipe, self._step]
        self._fence(str(await self._client.script("remember", [self._keys.clock], arguments)))

    def _fence(self, answer: str) -> None:
        if answer == "fenced":
            raise Fenced(
                f"attempt {self.attempt} of run {self._keys.run} was replaced by a newer trainer; "
                "this one ends"
            )


def _wait_s(entry_id: bytes, now_ms: int, *, longest_s: float) -> float | None:
    wait_s = (now_ms - int(entry_id.split(b"-")[0])) / 1000
    return wait_s if 0 <= wait_s <= longest_s else None
