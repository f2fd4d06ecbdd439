"""What every worker owes the run, in plain redis-py: take, renew, hand off, refuse, give back.

The rules are in docs/custom-services.md. One entry at a time; start several workers to be faster.
"""

import contextlib
import itertools
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

GROUP = "hr"
MAX_DELIVERIES, MAX_WORK_S = 3, 3600.0  # the recipe's queue.max_deliveries and queue.max_work_s
DEAD_LIMITS = (1000, 256 << 20)  # queue.dead_max_entries and queue.dead_max_bytes
NEXT = {"groups": "samples", "eval_groups": "evals", "requests": "groups"}
NEXT["eval_requests"] = "eval_groups"


class Entry:
    """An entry that this worker holds: the claim is (consumer, deliveries)."""

    def __init__(self, stream: str, entry_id: bytes, fields: dict[bytes, bytes], deliveries: int):
        self.stream, self.id, self.deliveries = stream, entry_id, deliveries
        self.group, self.data = fields.get(b"id", b""), fields.get(b"data", b"")
        self.evaluation = stream.startswith("eval")
        self.tracked = "0" if self.evaluation else "1"
        self.last = "evals" if self.evaluation else "samples"
        self.taken_s = time.monotonic()


class Stage:
    """A worker of the stage that reads `stream` ("groups" or "requests") and evaluation's twin."""

    def __init__(
        self, url: str, run: str, stream: str, *, scripts: Path, claim_after_s: float, capacity: int
    ):
        self.streams = (f"eval_{stream}", stream)  # evaluation is taken first
        self.me, self.stopping = f"custom-{uuid.uuid4().hex[:8]}", threading.Event()
        self._run, self._claim_after_s, self._capacity = run, claim_after_s, capacity
        self._held: Entry | None = None
        self._take_over_at_s = 0.0
        self._redis: Any = redis.Redis.from_url(
            url, protocol=2, socket_timeout=15, retry=Retry(NoBackoff(), 0)
        )
        prelude = (scripts / "prelude.lua").read_text()
        self._scripts = {
            name: self._redis.register_script(prelude + (scripts / f"{name}.lua").read_text())
            for name in ("begin", "renew", "hand_off", "refuse", "give_back")
        }
        self._renewal = threading.Thread(target=self._renew_for_ever, daemon=True)
        self._renewal.start()

    def take(self) -> Entry | None:
        """An entry to work on; None after about a second without one."""
        if not self._renewal.is_alive():
            raise RuntimeError("renewal has ended: without it nothing may be taken")
        if time.monotonic() >= self._take_over_at_s:
            self._take_over_at_s = time.monotonic() + 1
            for stream in self.streams:
                if (left := self._take_over(stream)) is not None:
                    return self._begin(left)
        for stream, block_ms in zip(self.streams, (None, 1000), strict=True):
            source = {self._key(stream): ">"}
            read = self._redis.xreadgroup
            if found := self._call(read, GROUP, self.me, source, count=1, block=block_ms):
                [(entry_id, fields)] = found[0][1]
                return self._begin(Entry(stream, entry_id, fields, 1))
        return None

    def hand_off(self, entry: Entry, data: bytes, *, n: int) -> None:
        """Add a result to the next stream, when there is room, in the same step that ends the
        entry."""
        self._finish(entry, NEXT[entry.stream], n, data, "")

    def tombstone(self, entry: Entry, *, reason: str) -> None:
        """End a group without a result; the trainer is told why."""
        self._finish(entry, entry.last, 0, b"", reason)

    def refuse(self, entry: Entry, *, reason: str) -> None:
        """Move what can never be worked on to the dead letters; the trainer is told."""
        arguments = [self.me, entry.id, entry.deliveries, entry.group, reason, entry.data]
        arguments += [entry.stream, *DEAD_LIMITS, entry.tracked, "1" if entry.group else "0"]
        keys = (entry.stream, "dead", entry.last, "outstanding", "clock")
        self._script("refuse", keys, *arguments, f"{entry.stream}:{self.me}:{entry.deliveries}")
        self._held = None

    def _finish(self, entry: Entry, target: str, n: int, data: bytes, reason: str) -> None:
        capacity = 0 if reason or entry.evaluation else self._capacity
        token = f"{target}:{self.me}:{entry.deliveries}"
        arguments = [self.me, entry.id, entry.deliveries, entry.group, n, data]
        arguments += [capacity, token, entry.tracked, reason]
        keys = (entry.stream, target, "outstanding")
        while self._script("hand_off", keys, *arguments) == b"full":
            if self.stopping.wait(0.2):  # somebody else will find the room
                idle_ms = int(self._claim_after_s * 1000) + 1
                back = (self.me, idle_ms, entry.id, entry.deliveries, entry.group)
                self._script("give_back", (entry.stream, "outstanding"), *back)
                break
        self._held = None  # also after `lost` and `void`: the result is thrown away

    def _take_over(self, stream: str) -> Entry | None:
        """What a dead worker left: nobody has renewed it for claim_after_s."""
        idle_ms, key = int(self._claim_after_s * 1000), self._key(stream)
        pending, everything = self._redis.xpending_range, {"min": "-", "max": "+", "count": 1}
        for found in self._call(pending, key, GROUP, idle=idle_ms, **everything):
            entry_id, deliveries = found["message_id"], found["times_delivered"] + 1
            claim = self._redis.xclaim
            claimed = self._call(claim, key, GROUP, self.me, idle_ms, [entry_id])
            if claimed and claimed[0][0] is not None:
                return Entry(stream, entry_id, claimed[0][1], deliveries)
            if not self._call(self._redis.xrange, key, entry_id, entry_id):  # its body is gone
                self._call(self._redis.xack, key, GROUP, entry_id)
        return None

    def _begin(self, entry: Entry) -> Entry | None:
        self._held = entry  # renewed from now on
        keys = (entry.stream, "outstanding", "clock")
        arguments = (self.me, "", entry.tracked, entry.id, entry.deliveries, entry.group)
        _, words = self._script("begin", keys, *arguments)
        if words != [b"held"]:
            self._held = None
        elif entry.deliveries > MAX_DELIVERIES:
            self.refuse(entry, reason=f"its worker died {MAX_DELIVERIES} times")
        return self._held

    def _renew_for_ever(self) -> None:
        while True:
            time.sleep(self._claim_after_s / 3)
            entry = self._held
            if entry is not None and time.monotonic() - entry.taken_s < MAX_WORK_S:
                keys = (entry.stream, "clock")
                self._script("renew", keys, self.me, entry.id, entry.deliveries)

    def _key(self, name: str) -> str:
        return f"hr:{{{self._run}}}:{name}"

    def _script(self, name: str, keys: Sequence[str], *arguments: Any) -> Any:
        return self._call(self._scripts[name], keys=[*map(self._key, keys)], args=arguments)

    def _call(self, command: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Until the server answers: everything that is asked of it here may be asked again."""
        for tries in itertools.count():
            try:
                return command(*arguments, **options)
            except redis.ResponseError as error:
                if not str(error).startswith(("NOGROUP", "READONLY")):
                    raise
                for stream in self.streams:
                    with contextlib.suppress(redis.ResponseError):  # it exists
                        self._redis.xgroup_create(self._key(stream), GROUP, id="0", mkstream=True)
            except (redis.ConnectionError, redis.TimeoutError):
                # Idle times count the outage: who is alive renews before anybody takes over.
                self._take_over_at_s = time.monotonic() + self._claim_after_s
            time.sleep(random.uniform(0.5, 1) * min(5, 0.05 * 2 ** min(tries, 8)))
