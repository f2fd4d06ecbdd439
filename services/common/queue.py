"""The queue server as all parties use it: keys of a run, the Lua scripts, a connection that
survives outages.

Every script is atomic and safe to repeat, so a call whose reply was lost is simply made again. Any
server that speaks the Redis protocol from 6.2 on will do (Redis, Valkey), with `maxmemory-policy
noeviction`.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio
import redis.exceptions
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.common.errors import UserError
from services.common.recorder import Recorder

GROUP = "hr"
"""The one consumer group of each stream."""

BLOCK_S = 1.0
"""A blocking read ends after so long; the socket's own timeout is far above it, so an empty read
is no error."""

SOCKET_TIMEOUT_S = 15.0
"""A server that does not answer for so long counts as away."""

MAX_CONNECTIONS = 32
"""Of one client. A call beyond them waits for its turn: redis-py's default is an error, which would
read as an outage when a hundred results are handed off at once."""

MAX_BACKOFF_S = 5.0
"""Longest pause between two attempts to reach the server."""

AWAY = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.BusyLoadingError,
    redis.exceptions.ReadOnlyError,
    OSError,
)
"""What an absent, restarting or failing-over server raises."""

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
    """A connection for one run: scripts by name, retried through outages with jittered back-off.

    `unavailable_until_s` says until when nobody may take over entries: idle times count a server's
    downtime, so after each outage all workers are given `claim_after_s` to renew what they hold.
    """

    def __init__(self, client: Any, run: str, *, claim_after_s: float) -> None:
        self.raw = client
        self.keys = Keys(run)
        self.recorder: Recorder | None = None
        self.no_takeover_before_s = 0.0
        self.reconnects = 0
        self._claim_after_s = claim_after_s
        self._scripts = {name: client.register_script(text) for name, text in SCRIPTS.items()}

    async def script(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run a script, again after outages until the server answers; bytes become str, nested
        lists kept.

        The reply is the script's; `data` never comes back through a script.
        """
        return _text(await self.call(lambda: self._scripts[script](keys=keys, args=arguments)))

    async def call(self, command: Callable[[], Awaitable[T]]) -> T:
        """Await `command()`, again after outages; missing streams or groups are created and the
        command repeated."""
        away_since_s: float | None = None
        told_s = 0.0
        tries = 0
        while True:
            try:
                answer = await command()
            except redis.exceptions.AuthenticationError as error:
                raise UserError(
                    f"queue.url: the queue server refuses the credentials ({error})"
                ) from None
            except redis.exceptions.ResponseError as error:
                if not str(error).startswith("NOGROUP") or tries > 5:
                    raise
                await self.create_groups()
            except AWAY as error:
                now = time.monotonic()
                away_since_s = away_since_s or now
                if now - told_s > 10:
                    told_s = now
                    structlog.get_logger().warning("queue server away", error=str(error)[:200])
            else:
                if away_since_s is not None:
                    self._back(time.monotonic() - away_since_s)
                return answer
            tries += 1
            await asyncio.sleep(
                random.uniform(0.5, 1.0) * min(MAX_BACKOFF_S, 0.05 * 2 ** min(tries, 8))
            )

    def _back(self, away_s: float) -> None:
        self.reconnects += 1
        self.no_takeover_before_s = time.monotonic() + self._claim_after_s
        structlog.get_logger().warning("queue server back", away_s=round(away_s, 1))
        if self.recorder is not None:
            self.recorder.count("queue/unavailable_s", away_s)

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


def open_client(url: str) -> Any:
    """A client for a URL; nothing is sent yet. Raises UserError for a malformed URL."""
    try:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=None,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
            health_check_interval=30,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        raise UserError(
            f"queue.url: {url!r} is not a Redis URL ({error}); write redis://host:port/0"
        ) from None
    return redis.asyncio.Redis.from_pool(pool)


async def connect(
    url: str | None,
    *,
    run: str,
    claim_after_s: float,
    waiting: Callable[[str], None] = lambda text: None,
) -> QueueClient:
    """Reach the server, waiting for it as long as it takes; check that it will not evict, and
    create the groups.

    `waiting` is told what is waited for. Raises UserError when the server's policy could lose
    entries, when it is too old, or when it refuses the credentials.
    """
    if url is None:
        raise UserError("queue.url is not set: give the Redis URL of the run's queue server")
    client = QueueClient(open_client(url), run, claim_after_s=claim_after_s)
    waiting(f"waiting for the queue server at {url.split('@')[-1]}")
    await client.call(client.raw.ping)
    memory = await client.call(lambda: client.raw.info("memory"))
    server = await client.call(lambda: client.raw.info("server"))
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
