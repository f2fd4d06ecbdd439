"""The queue server as all parties use it: keys of a run, the Lua scripts, a connection that
survives outages.

Every script is atomic and safe to repeat, so a call whose reply was lost is simply made again. Any
server that speaks the Redis protocol from 6.2 on will do (Redis, Valkey), with `maxmemory-policy
noeviction`.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis.exceptions

from services.common.config import without_passwords
from services.common.errors import UserError
from services.common.queue_outages import Outages, is_outage
from services.common.queue_servers import follows, open_client
from services.common.recorder import Recorder

GROUP = "hr"
"""The one consumer group of each stream."""

BLOCK_S = 1.0
"""A blocking read ends after so long; the socket's own timeout is far above it, so an empty read
is no error."""

MAX_BACKOFF_S = 5.0
"""Longest pause between two attempts to reach the server."""

MISSING_TRIES = 5
"""How often in a row a missing stream or group is created without a word."""

CLOCK_TOLERANCE_S = 1.0
"""How far the server's clock and ours may drift apart in one run."""

NEXT = {
    "requests": "groups",
    "groups": "samples",
    "eval_requests": "eval_groups",
    "eval_groups": "evals",
}
"""The stream that a stage hands on to."""

EVALUATION_OF = {"requests": "eval_requests", "groups": "eval_groups", "samples": "evals"}
"""Its twin for evaluation."""

T = TypeVar("T")


@dataclass(frozen=True)
class Keys:
    """Redis keys of one run. `{run}` is a hash tag, so that a cluster keeps them together."""

    run: str

    def __getattr__(self, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return f"hr:{{{self.run}}}:{name}"

    @property
    def streams(self) -> tuple[str, ...]:
        """All six streams, training's first."""
        names = ("requests", "groups", "samples", "eval_requests", "eval_groups", "evals")
        return tuple(getattr(self, name) for name in names)


def _load_scripts() -> dict[str, str]:
    folder = Path(__file__).parent / "scripts"
    prelude = (folder / "prelude.lua").read_text()
    return {
        path.stem: prelude + path.read_text()
        for path in folder.glob("*.lua")
        if path.stem != "prelude"
    }


SCRIPTS = _load_scripts()
"""Script texts by name, prelude included."""


class QueueClient:
    """A connection for one run: scripts by name, repeated through outages with jittered back-off.

    `no_takeover_before_s` says until when nobody may take over entries: idle times count a server's
    downtime, so after each outage all workers are given `claim_after_s` to renew what they hold.
    """

    def __init__(self, client: Any, run: str, *, claim_after_s: float) -> None:
        self.raw = client
        self.keys = Keys(run)
        self.outages = Outages()
        self.no_takeover_before_s = 0.0
        self.reconnects = 0
        self._claim_after_s = claim_after_s
        self._scripts = {name: client.register_script(text) for name, text in SCRIPTS.items()}
        client.boot.on_change = self._reconnected

    @property
    def recorder(self) -> Recorder | None:
        """Who is told how long the server was away."""
        return self.outages.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self.outages.recorder = recorder

    async def script(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run a script, again after outages until the server answers; bytes become str, nested
        lists kept.

        The reply is the script's; `data` never comes back through a script.
        """
        return _text(await self.call(lambda: self._scripts[script](keys=keys, args=arguments)))

    async def call(self, command: Callable[[], Awaitable[T]]) -> T:
        """Await `command()`, again after outages until the server answers; missing streams or
        groups are created and the command repeated.

        waits_for: a server that works. unblocked_by: pauses of at most MAX_BACKOFF_S.
        Raises UserError when the server refuses the credentials, or is not what the URL says.
        """
        waiting = missing = answered = False
        tries = 0
        try:
            while True:
                try:
                    if missing:
                        await self.create_groups()
                        missing = False
                    answer = await command()
                except (redis.exceptions.RedisError, OSError) as error:
                    self._raise_if_hopeless(error)
                    missing = str(error).startswith("NOGROUP")
                    # Groups that are missing again and again are no start and no restart.
                    if not waiting and (not missing or tries >= MISSING_TRIES):
                        waiting = True
                        self.outages.begin()
                    if waiting:
                        self.outages.failed(error)
                        self._no_takeover()
                else:
                    answered = True
                    if waiting:
                        self._reconnected()
                    return answer
                tries += 1
                await asyncio.sleep(backoff_s(tries))
        finally:
            if waiting:
                self.outages.end(answered=answered)

    def _reconnected(self) -> None:
        self.reconnects += 1
        self._no_takeover()

    def _no_takeover(self) -> None:
        self.no_takeover_before_s = time.monotonic() + self._claim_after_s

    def _raise_if_hopeless(self, error: redis.exceptions.RedisError | OSError) -> None:
        """Let errors through that no repetition will mend."""
        if isinstance(error, redis.exceptions.AuthenticationError):
            raise UserError(
                f"queue.url: the queue server refuses the credentials ({error})"
            ) from None
        if isinstance(error, redis.exceptions.MovedError) and not follows(self.raw):
            raise UserError(
                "queue.url: the server is a node of a cluster, and another one has the run's keys; "
                "write redis+cluster://host:port,host:port"
            ) from None
        if not is_outage(error) and not str(error).startswith("NOGROUP"):
            raise error

    async def create_groups(self) -> None:
        """Create all streams and their group at id 0, so that nothing added meanwhile is missed."""
        for stream in self.keys.streams:
            try:
                await self.raw.xgroup_create(stream, GROUP, id="0", mkstream=True)
            except redis.exceptions.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    async def close(self) -> None:
        """Close all connections."""
        await self.raw.aclose()


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [_text(item) for item in value]
    return value


async def connect(
    url: str | None,
    *,
    run: str,
    claim_after_s: float,
    waiting: Callable[[str], None] = lambda text: None,
    details: MutableMapping[str, str] | None = None,
) -> QueueClient:
    """Reach the server, waiting for it as long as it takes; check that it will not evict, and
    create the groups.

    `waiting` is told what is waited for; `details` have an entry `queue` while the server is away,
    also later. Raises UserError when the server's policy could lose entries, when it is too old, or
    when it refuses the credentials.
    """
    if url is None:
        raise UserError("queue.url is not set: give the Redis URL of the run's queue server")
    client = QueueClient(open_client(url, run=run), run, claim_after_s=claim_after_s)
    if details is not None:
        client.outages.details = details
    waiting(f"waiting for the queue server at {without_passwords(url)}")
    await client.call(client.raw.ping)
    memory = await client.call(lambda: client.raw.info("memory"))
    server = await client.call(lambda: client.raw.info("server"))
    if "sentinel" in (server.get("redis_mode"), server.get("server_mode")):
        raise UserError(
            "queue.url: a Sentinel answers there; write redis+sentinel://host:port/NAME, with the "
            "name that it knows the primary by"
        )
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise UserError(
            f"queue server: maxmemory-policy is {policy}, which evicts entries; "
            "set it to noeviction"
        )
    version = str(server.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
        raise UserError(f"queue server: version {version} is too old; 6.2 or later is needed")
    await client.call(client.create_groups)
    client.no_takeover_before_s = 0.0
    return client


def backoff_s(tries: int) -> float:
    """A jittered pause after the given number of failures.

    Example: 0.05 to 0.1 s after the first, 0.1 to 0.2 s after the second, 2.5 to 5 s from the
    seventh on: within 10 s a server is asked about a dozen times.
    """
    longest_s: float = min(MAX_BACKOFF_S, 0.05 * 2 ** min(tries, 8))
    return random.uniform(0.5, 1.0) * longest_s
