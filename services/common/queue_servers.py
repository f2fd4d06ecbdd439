"""Connections that follow a run's queue server wherever it is.

All keys of a run share a hash tag, so of a cluster a run needs one node: the one that serves this
slot. Sentinels and clusters are thus the same to us: somebody is asked where the server is now,
again whenever it fails or says that it is not the one. Pool, scripts and retries are those of one
server.
"""

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from services.common.errors import UserError
from services.common.queue_outages import ELSEWHERE, is_outage, refusal
from services.common.queue_url import Address, Place, read_url

SOCKET_TIMEOUT_S = 15.0
"""A server that does not answer for so long counts as away."""

CONNECT_TIMEOUT_S = 5.0
"""Of a new connection to it."""

ASK_TIMEOUT_S = 2.0
"""A Sentinel or node that does not say within this time where the server is: the next is asked."""

MAX_CONNECTIONS = 32
"""Of one client. A call beyond them waits for its turn: redis-py's default is an error, which would
read as an outage when a hundred results are handed off at once."""

SEED = {"sentinel": "Sentinel", "cluster": "node of a cluster"}
"""Who is asked, for people."""


def open_client(url: str, *, run: str, timeout_s: float | None = None) -> Any:
    """A client for the server of a run; nothing is sent yet. Raises UserError for a malformed URL.

    `timeout_s` bounds each answer, for who looks whether the server is there.
    """
    place, boot = read_url(url), Boot()
    options = {
        "max_connections": MAX_CONNECTIONS,
        "timeout": None,
        "socket_timeout": timeout_s or SOCKET_TIMEOUT_S,
        "socket_connect_timeout": timeout_s or CONNECT_TIMEOUT_S,
        "health_check_interval": 30,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "redis_connect_func": boot.greet,
    } | place.options
    if place.kind != "server":
        options["connection_class"] = _FollowingSSL if place.tls else _Following
        options["finder"] = Finder(place, run=run)
    client: Any = redis.asyncio.Redis.from_pool(redis.asyncio.BlockingConnectionPool(**options))
    client.boot = boot
    return client


def follows(client: Any) -> bool:
    """Whether a client of `open_client` looks for its server itself."""
    return issubclass(client.connection_pool.connection_class, _Following)


class Boot:
    """Which start of which server a client talks to.

    A connection that the server has closed is replaced without an error when it is used next. So a
    server that restarts between two calls would else go unnoticed, with all that it lost.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], object] = lambda: None
        """Called when it is another server than before, or another start of it."""
        self._run_id = b""

    async def greet(self, connection: Any) -> None:
        """What a new connection says first."""
        await connection.on_connect()
        await connection.send_command("INFO", "server", check_health=False)
        found = re.search(rb"\brun_id:(\w+)", await connection.read_response())
        before, self._run_id = self._run_id, found[1] if found else b""
        if before and before != self._run_id:
            self.on_change()


class Finder:
    """Where the server is now. What was found is kept until it is forgotten.

    waits_for: one answer of a seed, at most ASK_TIMEOUT_S each.
    """

    def __init__(self, place: Place, *, run: str) -> None:
        self.place = place
        self._slot = key_slot(f"hr:{{{run}}}:clock".encode())
        self._seeds = list(place.seeds)
        random.shuffle(self._seeds)
        self._nodes: list[Address] = []
        """Of a cluster, as it was seen last: its seeds may be gone by now."""
        self._address: Address | None = None
        self._lock = asyncio.Lock()
        self._failures, self._why = 0, ""

    async def find(self) -> Address:
        """Its address. Raises ConnectionError when nobody knows it, AuthenticationError when none
        of the seeds takes the credentials, and UserError when they are no Sentinels or no cluster.
        """
        address, failures = self._address, self._failures
        if address is not None:
            return address
        async with self._lock:
            if self._address is None:
                if self._failures != failures:  # another call has just asked in vain
                    raise redis.exceptions.ConnectionError(self._why)
                self._address = await self._ask_all()
            return self._address

    def forget(self, address: Address) -> None:
        """It is not there, or not the one, any more."""
        if self._address == address:
            self._address = None

    def moved(self, address: Address) -> None:
        """The server itself says where it is."""
        self._address = address

    async def _ask_all(self) -> Address:
        # Each time another one is first: one that answers is not always right.
        self._seeds.append(self._seeds.pop(0))
        errors: list[Exception] = []
        for seed in (*self._seeds, *self._nodes):
            try:
                return await self._ask(seed)
            except (redis.exceptions.RedisError, OSError) as error:
                errors.append(error)
        self._failures += 1
        said = "; ".join(dict.fromkeys((str(error).splitlines() or [""])[0] for error in errors))
        refused = [e for e in errors if isinstance(e, redis.exceptions.AuthenticationError)]
        if refused:
            raise refused[0]
        if all(not is_outage(error) for error in errors):
            raise UserError(f"queue.url: what answers there is no {SEED[self.place.kind]} ({said})")
        self._why = f"no {SEED[self.place.kind]} knows where the queue server is ({said})"
        raise redis.exceptions.ConnectionError(self._why)

    async def _ask(self, seed: Address) -> Address:
        place, (host, port) = self.place, seed
        pool = redis.asyncio.ConnectionPool(
            connection_class=redis.asyncio.SSLConnection if place.tls else redis.asyncio.Connection,
            **place.asking
            | {
                "host": host,
                "port": port,
                "socket_timeout": ASK_TIMEOUT_S,
                "socket_connect_timeout": ASK_TIMEOUT_S,
                "retry": Retry(NoBackoff(), 0),
                "protocol": 2,
            },
        )
        client: Any = redis.asyncio.Redis.from_pool(pool)
        try:
            if place.kind == "sentinel":
                found = await client.sentinel_get_master_addr_by_name(place.name)
                if found is None:
                    raise redis.exceptions.ConnectionError(
                        f"{host}:{port} watches no primary of the name {place.name}"
                    )
                return _text(found[0]), int(found[1])
            return self._served_by(await client.execute_command("CLUSTER SLOTS"), seed)
        finally:
            await client.aclose()

    def _served_by(self, ranges: Sequence[Any], seed: Address) -> Address:
        """The primary of the run's slot, from (first slot, last slot, primary, replica...) each."""
        self._nodes = [
            node
            for _, _, *nodes in ranges
            for node in (_node(each, seed) for each in nodes)
            if node not in self.place.seeds
        ]
        for first, last, primary, *_ in ranges:
            if first <= self._slot <= last:
                return _node(primary, seed)
        raise redis.exceptions.ConnectionError(f"no node serves slot {self._slot}")


class _Following(redis.asyncio.Connection):
    """A connection that looks where its server is each time that it is taken from the pool."""

    def __init__(self, *, finder: Finder, **options: Any) -> None:
        self._finder = finder
        super().__init__(**options)

    async def connect(self) -> None:
        """To where the server is now, unless connected to it already."""
        address = await self._finder.find()
        if self.is_connected:
            if (self.host, self.port) == address:
                return
            await self.disconnect()
        self.host, self.port = address
        try:
            await super().connect()  # type: ignore[no-untyped-call]
            if self._finder.place.kind == "sentinel":
                await self._check_role()
        except BaseException:
            self._finder.forget(address)
            # An answer that nobody has read would be taken for that of the next command.
            await self.disconnect(nowait=True)
            raise

    async def _check_role(self) -> None:
        """A Sentinel may be late: a replica would answer reads with what is no longer true."""
        await self.send_command("ROLE", check_health=False)
        role, *_ = await self.read_response()
        if _text(role) != "master":
            raise redis.exceptions.ConnectionError(f"{self.host}:{self.port} is a replica now")

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """The server's answer; one that says that it is not the one any more is remembered."""
        address = (self.host, self.port)
        try:
            return await super().read_response(*args, **kwargs)
        except redis.exceptions.MovedError as error:
            self._finder.moved((error.host or self.host, error.port))
            raise
        except (redis.exceptions.RedisError, OSError) as error:
            word = refusal(error)
            if word in ELSEWHERE if word else is_outage(error):
                self._finder.forget(address)
            raise


class _FollowingSSL(_Following, redis.asyncio.SSLConnection):
    """The same with TLS."""


def _node(node: Sequence[Any], seed: Address) -> Address:
    """A node's address as a cluster tells it: without a host it is that of whom was asked."""
    host = _text(node[0] or b"")
    return (seed[0] if host in ("", "?") else host), int(node[1])


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
