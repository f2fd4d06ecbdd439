"""What counts as an outage of the queue server, what a person can do about it, and what it cost.

A server that cannot do its work now (no memory, no disk, a failover under way) is waited for like
one that is away: a service that ended would be started again into the same trouble.
"""

import re
import time
from collections.abc import MutableMapping

import redis.exceptions
import structlog

from services.common.recorder import Recorder

TELL_EVERY_S = 10.0
"""How often an outage that lasts is told in the log."""

AWAY = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)
"""What an absent or restarting server raises."""

ADVICE = {
    "OOM": "its memory is full: raise its maxmemory, or bound what may wait (queue.groups_capacity,"
    " queue.samples_capacity, queue.dead_max_bytes)",
    "MISCONF": "it cannot write to its disk: make room there, and see its log",
    "NOREPLICAS": "it has fewer replicas than its min-replicas-to-write: bring them back",
    "READONLY": "it is a replica: it becomes the primary by a failover, or queue.url names the "
    "wrong server",
    "LOADING": "it reads its data after a restart",
    "MASTERDOWN": "it is a replica without a primary: a failover must come",
    "CLUSTERDOWN": "nodes of its cluster are down: bring them back",
    "MOVED": "the run's keys have moved to another node of the cluster",
    "ASK": "the run's keys are on their way to another node of the cluster",
    "TRYAGAIN": "the run's keys are on their way to another node of the cluster",
    "BUSY": "a script of somebody else's runs for very long: SCRIPT KILL ends it",
    "UNBLOCKED": "it became a replica, or lost its data",
}
"""By the word that such a refusal begins with: what is wrong, and what to do."""

ELSEWHERE = ("READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "MOVED", "ASK", "UNBLOCKED")
"""Refusals after which another server may be the one to talk to."""

_WORD = re.compile(rf"(?:^|-)({'|'.join(ADVICE)})\b")


def refusal(error: BaseException) -> str | None:
    """The word of `ADVICE` by which a server refuses to work now; None for any other error.

    redis-py cuts the word off where it knows it, and Redis 6.2 wraps what a script was told:
    `ERR Error running script (…): @user_script: 18: -OOM command not allowed …` is "OOM".
    """
    if not isinstance(error, redis.exceptions.RedisError):
        return None
    if error.status_code in ADVICE:
        return error.status_code
    found = _WORD.search(str(error))
    return found[1] if found else None


def is_outage(error: BaseException) -> bool:
    """Whether the same call may succeed later."""
    return isinstance(error, AWAY) or refusal(error) is not None


def explained(error: BaseException) -> str:
    """What the server said, and what to do about it, for people."""
    word = refusal(error)
    said = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
    if word is None:
        return said
    return f"{said if said.startswith(word) else f'{word} {said}'}: {ADVICE[word]}"


class Outages:
    """The outages of one client, each told and counted once, however many of its calls wait.

    `details` of a service's status then say since when, and `queue/unavailable_s` grows while an
    outage lasts.

    Example: calls fail at 10 s and 12 s, and succeed at 15 s and 16 s: one outage of 6 s.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.details: MutableMapping[str, str] = {}
        self.waiting = 0
        """Calls that wait for the server now."""
        self._answered = False
        self._began_s = self._counted_s = self._told_s = 0.0

    @property
    def lasts(self) -> bool:
        """Whether a call waits for the server now."""
        return self.waiting > 0

    def begin(self) -> None:
        """A call waits from now on; `end` says when it no longer does."""
        if not self.waiting:
            self._began_s = self._counted_s = time.monotonic()
            self._told_s = self._began_s - TELL_EVERY_S
            self._answered = False
        self.waiting += 1

    def failed(self, error: BaseException) -> None:
        """A call that waits has failed once more."""
        now_s = self._count()
        why, away_s = explained(error), now_s - self._began_s
        self.details["queue"] = f"unavailable for {away_s:.0f} s: {why}"
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            structlog.get_logger().warning(
                "queue server unavailable", why=why, unavailable_s=round(away_s, 1)
            )

    def end(self, *, answered: bool) -> None:
        """A call no longer waits: it was answered, or nobody wants it any more."""
        now_s = self._count()
        self.waiting -= 1
        self._answered |= answered
        if self.waiting:
            return
        self.details.pop("queue", None)
        if self._answered:
            structlog.get_logger().warning(
                "queue server back", unavailable_s=round(now_s - self._began_s, 1)
            )

    def _count(self) -> float:
        now_s = time.monotonic()
        if self.recorder is not None and now_s > self._counted_s:
            self.recorder.count("queue/unavailable_s", now_s - self._counted_s)
            self._counted_s = now_s
        return now_s
