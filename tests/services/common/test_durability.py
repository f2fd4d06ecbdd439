"""What is left of a run when its queue server restarts: real servers with the settings of the
embedded one, ended in every way.
"""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from services.common import queue
from services.common.queue import GROUP, QueueClient
from services.common.streams import Entry
from services.launcher import embedded_queue
from services.trainer.run_queue import Delivery, RunQueue
from tests.conftest import free_port
from tests.services.common.test_streams import SETTINGS, stage
from tests.waiting import always, until


class Server:
    """A Valkey in a folder, with the embedded queue's configuration, that can be ended and started
    again."""

    def __init__(self, folder: Path, *, changed: str = "") -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._config = embedded_queue.write_config(folder, port=self.port)
        # The last of a setting's values counts.
        self._config.write_text(self._config.read_text() + changed)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it has read what it kept."""
        with (self.folder / "log").open("ab") as log:
            command = [str(embedded_queue.binary()), str(self._config)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.BusyLoadingError):
                    assert self._process.poll() is None, (self.folder / "log").read_text()

    def end(self, how: signal.Signals) -> None:
        """End it by a signal."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    @property
    def appended(self) -> Path:
        """The file that the server appends its commands to."""
        [path] = (self.folder / "appendonlydir").glob("*.incr.aof")
        return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = Server(tmp_path)
    yield found
    found.end(signal.SIGKILL)


@contextmanager
def admin(server: Server) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as client:
        yield client


class Run:
    """A run with a group at each place that there is."""

    def __init__(self, client: QueueClient) -> None:
        self.client, self.trainer = client, RunQueue(client)
        self.generator = stage(client, consumer="g")
        self.scorer = stage(client, "groups", "s")
        self.dead, self.heir = stage(client, consumer="dead"), stage(client, consumer="h")

    async def fill(self) -> None:
        """a: refused; b: with the trainer; c: waits for the trainer; d: with a scorer; e: with a
        generator, taken over once; f: waits for a generator."""
        await self.trainer.start(floor=4, recipe="x")
        for group in "abcdef":
            await self.trainer.dispatch(group, b"request of " + group.encode())
        a, b, c, d = await self.generator.take(4, version=always(7))
        await self.generator.refuse(a, reason="bad")
        for entry in (b, c, d):
            await self.generator.hand_off(entry, data=b"group", n=2)
        b, c, self.d = await self.scorer.take(3)
        for entry in (b, c):
            await self.scorer.hand_off(entry, data=b"samples", n=2)
        [tombstone, self.b] = await self.trainer.take(2)
        await self.trainer.settle([(tombstone.entry_id, "a")], step=3)
        [_] = await self.dead.take(1)
        await asyncio.sleep(SETTINGS.claim_after_s * 1.2)
        [self.e] = await self.heir.take(1, version=always(7))

    d: Entry
    b: Delivery
    e: Entry


def kept(server: Server) -> dict[str, Any]:
    """All that the server has of the run, idle times and consumers' times apart."""
    found: dict[str, Any] = {}
    with admin(server) as client:
        for key in sorted(client.keys("hr:*")):
            name = key.decode()
            if client.type(key) == b"hash":
                found[name] = client.hgetall(key)
                continue
            found[name] = client.xrange(key)
            if name.endswith("dead"):
                continue
            pending = client.xpending_range(key, GROUP, "-", "+", 100)
            found[f"{name} pending"] = [
                (each["message_id"], each["consumer"], each["times_delivered"]) for each in pending
            ]
            [group] = client.xinfo_groups(key)
            found[f"{name} delivered"] = group["last-delivered-id"]
    return found


def written(server: Server) -> bool:
    """Whether the server has given everything to the operating system."""
    with admin(server) as client:
        found = client.info("persistence")
    return found["aof_buffer_length"] == 0 and not found.get("aof_pending_bio_fsync", 0)


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[QueueClient]:
    client = await queue.connect(server.url, run="r", claim_after_s=SETTINGS.claim_after_s)
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_restart_keeps_everything_and_the_work_goes_on(
    server: Server, how: signal.Signals
) -> None:
    async with connected(server) as client:
        run = Run(client)
        await run.fill()
        before = kept(server)
        assert len(before["hr:{r}:outstanding"]) == 5
        assert before["hr:{r}:clock"][b"attempt"] == b"4"
        assert len(before["hr:{r}:dead"]) == 1
        assert before["hr:{r}:requests pending"] == [(run.e.entry_id.encode(), b"h", 2)]
        await until(lambda: written(server))
        server.end(how)
        server.start()
        assert kept(server) == before

        # Whoever held something still does, and hands it off.
        assert await run.scorer.hand_off(run.d, data=b"samples", n=2) == "done"
        assert await run.heir.hand_off(run.e, data=b"group", n=2) == "done"
        await run.trainer.settle([(run.b.entry_id, run.b.group_id)], step=4)
        assert client.reconnects > 0
        assert [d.group_id for d in await run.trainer.take(5)] == ["c", "d"]
        [f] = await run.generator.take(5)
        assert (f.group_id, f.data) == ("f", b"request of f")


async def test_an_append_only_file_cut_anywhere_holds_whole_scripts_only(server: Server) -> None:
    """Power fails: the last bytes of the file are missing. A hand-off is there, or it is not; never
    the result beside the entry, or neither."""
    async with connected(server) as client:
        run = Run(client)
        await run.trainer.start(floor=1, recipe="x")
        await run.trainer.dispatch("a", b"request")
        [a] = await run.generator.take(1, version=always(7))
        await until(lambda: written(server))
        before = server.appended.stat().st_size
        await run.generator.hand_off(a, data=b"group", n=2)
        await until(lambda: written(server))
    server.end(signal.SIGKILL)
    whole = server.appended.read_bytes()
    places = []
    cuts = range(before, len(whole) + 1, max(1, (len(whole) - before) // 12))
    for cut in (*cuts, len(whole)):
        server.appended.write_bytes(whole[:cut])
        server.start()
        found = kept(server)
        server.end(signal.SIGKILL)
        place = found["hr:{r}:outstanding"][b"a"].split(b":")[0].decode()
        places.append(place)
        other = {"requests": "groups", "groups": "requests"}[place]
        assert len(found[f"hr:{{r}}:{place}"]) == 1
        assert found[f"hr:{{r}}:{other}"] == []
        held = [(a.entry_id.encode(), b"g", 1)] if place == "requests" else []
        assert found["hr:{r}:requests pending"] == held
    assert places == ["requests"] * (len(places) - places.count("groups")) + ["groups"] * (
        places.count("groups")
    )
    assert set(places) == {"requests", "groups"}


async def test_without_an_append_only_file_a_restart_loses_the_run(tmp_path: Path) -> None:
    """The trainer's memory is then all that is left: its groups are compared, lost, and due
    again."""
    server = Server(tmp_path, changed="appendonly no\n")
    try:
        async with connected(server) as client:
            run = Run(client)
            await run.fill()
            server.end(signal.SIGTERM)
            server.start()
            assert kept(server) == {}
            assert await run.scorer.hand_off(run.d, data=b"samples", n=2) == "lost"
            assert await run.generator.take(1) == []
            assert await run.trainer.outstanding() == {}
    finally:
        server.end(signal.SIGKILL)


async def test_a_full_server_is_waited_for_and_loses_nothing(server: Server) -> None:
    """`noeviction`: what would need memory is refused, and not a script half done."""
    async with connected(server) as client:
        run = Run(client)
        await run.fill()
        before = kept(server)
        with admin(server) as control:
            control.config_set("maxmemory", "1mb")
        dispatching = asyncio.create_task(run.trainer.dispatch("z", b"x" * 1000))
        handing = asyncio.create_task(run.scorer.hand_off(run.d, data=b"samples", n=2))
        await until(lambda: client.outages.waiting == 2)
        assert kept(server) == before
        with admin(server) as control:
            control.config_set("maxmemory", "0")
        await dispatching
        assert await handing == "done"
        assert not client.outages.lasts
        assert set(kept(server)["hr:{r}:outstanding"]) == {b"b", b"c", b"d", b"e", b"f", b"z"}
