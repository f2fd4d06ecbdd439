"""Servers that cannot work, or always refuse: what is waited for, what is told, and how often the
server is asked."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis
from redis.exceptions import ConnectionError as Away
from redis.exceptions import OutOfMemoryError, ResponseError

from services.common import queue
from services.common.partials import Count
from services.common.queue import QueueClient, backoff_s
from services.common.queue_outages import ADVICE, Outages, explained, is_outage, refusal
from services.common.queue_servers import open_client
from services.common.recorder import Recorder
from tests.services.common.test_durability import Server, admin, connected
from tests.services.common.test_durability import server as server
from tests.services.common.test_streams import SETTINGS, recorder, stage, started, take
from tests.waiting import until


def unavailable_s(recorder: Recorder) -> float:
    """What has been recorded of it."""
    found = recorder.snapshot().items()
    return sum(
        partial.sum
        for (key, *_), partial in found
        if key == "queue/unavailable_s" and isinstance(partial, Count)
    )


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OutOfMemoryError("command not allowed", status_code="OOM"), "OOM"),
        (ResponseError("MISCONF Errors writing to the AOF file: No space left"), "MISCONF"),
        (
            ResponseError(
                "ERR Error running script (call to f_12): @user_script:18: @user_script: 18: "
                "-OOM command not allowed when used memory > 'maxmemory'."
            ),
            "OOM",
        ),
        (ResponseError("ERR unknown command 'BUSY', with args beginning with:"), None),
        (ResponseError("BUSYGROUP Consumer Group name already exists"), None),
        (ResponseError("NOGROUP No such key"), None),
        (OSError("OOM"), None),
    ],
)
def test_refusals(error: Exception, word: str | None) -> None:
    assert refusal(error) == word
    assert is_outage(error) == (word is not None or isinstance(error, OSError))
    if word is not None:
        told = explained(error)
        assert word in told
        assert told.endswith(ADVICE[word])


def test_an_outage_is_counted_once_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of Outages: two calls, from 10 s and 12 s to 15 s and 16 s."""
    now_s = 10.0
    outages, recorded = Outages(), recorder()
    outages.recorder = recorded
    monkeypatch.setattr("services.common.queue_outages.time.monotonic", lambda: now_s)
    outages.begin()
    outages.failed(Away("gone"))
    now_s = 12.0
    outages.begin()
    outages.failed(Away("gone"))
    assert outages.details == {"queue": "unavailable for 2 s: gone"}
    assert unavailable_s(recorded) == 2
    now_s = 15.0
    outages.end(answered=True)
    assert outages.lasts
    now_s = 16.0
    outages.end(answered=False)
    assert (outages.lasts, outages.details, unavailable_s(recorded)) == (False, {}, 6)
    said = capsys.readouterr().out
    assert (said.count("queue server unavailable"), said.count("queue server back")) == (1, 1)
    now_s = 40.0
    outages.begin()
    for _ in range(4):
        outages.failed(Away("gone again"))
        now_s += 5
    assert outages.details == {"queue": "unavailable for 15 s: gone again"}
    assert capsys.readouterr().out.count("queue server unavailable") == 2
    assert unavailable_s(recorded) == 21
    outages.end(answered=False)
    assert not outages.lasts
    assert "queue server back" not in capsys.readouterr().out, "nobody has seen it"


def test_pauses_grow_and_differ() -> None:
    assert all(0.05 <= backoff_s(1) <= 0.1 for _ in range(20))
    assert all(2.5 <= backoff_s(number) <= 5 for number in (7, 8, 100, 10_000))
    assert len({backoff_s(3) for _ in range(20)}) > 1


class Refusing:
    """A server that answers everything with one error, what a new connection says apart."""

    def __init__(self, error: str) -> None:
        self._error = error
        self.asked: list[float] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader()
        while data := await reader.read(65536):
            commands.feed(data)
            while (command := commands.gets()) is not False:
                if command[0] in (b"CLIENT", b"INFO"):
                    writer.write(b"+OK\r\n")
                    continue
                self.asked.append(time.monotonic())
                writer.write(f"-{self._error}\r\n".encode())
        writer.close()


@asynccontextmanager
async def refusing(error: str) -> AsyncIterator[tuple[Refusing, QueueClient]]:
    found = Refusing(error)
    served = await asyncio.start_server(found.answer, "127.0.0.1", 0)
    found.url = f"redis://127.0.0.1:{served.sockets[0].getsockname()[1]}"
    client = QueueClient(open_client(found.url, run="r"), "r", claim_after_s=5)
    try:
        yield found, client
    finally:
        await client.close()
        served.close()
        await served.wait_closed()


ERRORS = (
    "NOGROUP No such key 'hr:{r}:samples' or consumer group 'hr'",
    "LOADING Redis is loading the dataset in memory",
    "MISCONF Errors writing to the AOF file: No space left on device",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "CLUSTERDOWN The cluster is down",
    "READONLY You can't write against a read only replica.",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "NOREPLICAS Not enough good replicas to write.",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "BUSY Redis is busy running a script.",
    "UNBLOCKED the stream key no longer exists",
    "ERR max number of clients reached",
)


async def test_a_server_that_always_refuses_is_asked_a_few_times_a_second() -> None:
    await asyncio.gather(*(_is_asked_seldom(error) for error in ERRORS))


async def _is_asked_seldom(error: str) -> None:
    """By one call, in 1.5 s: with the shortest pauses (0.05, 0.1, 0.2, 0.4 and 0.8 s) six times."""
    async with refusing(error) as (server, client):
        key = client.keys.samples
        asking = asyncio.create_task(
            client.call(lambda: client.raw.xreadgroup("hr", "w", {key: ">"}))
        )
        await asyncio.sleep(1.5)
        assert not asking.done()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert 2 <= len(server.asked) <= 8, error
        assert not client.outages.lasts


def failed_to_save(server: Server) -> bool:
    with admin(server) as control:
        told: dict[str, Any] = control.info("persistence")
    return told["rdb_last_bgsave_status"] == "err" and not told["rdb_bgsave_in_progress"]


async def test_a_full_disk_is_waited_for(server: Server) -> None:
    details: dict[str, str] = {}
    async with connected(server) as client:
        client.recorder = recorder()
        client.outages.details = details
        run = await started(client)
        in_the_way = server.folder / "dump.rdb"
        in_the_way.mkdir()
        (in_the_way / "x").touch()
        with admin(server) as control:
            control.config_set("save", "3600 1")
            control.bgsave()
            await until(lambda: failed_to_save(server))
            dispatching = asyncio.create_task(run.dispatch("a", b"request"))
            await until(lambda: "queue" in details)
            assert "MISCONF" in details["queue"]
            assert ADVICE["MISCONF"] in details["queue"]
            (in_the_way / "x").unlink()
            in_the_way.rmdir()
            control.bgsave()
        await dispatching
        assert await run.outstanding() == {"a": "requests:trainer:1||"}
        assert details == {}
        assert unavailable_s(client.recorder) > 0


async def test_a_server_that_comes_back_empty_after_a_long_time_is_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long: more failures in a row than pass without a word where a group is missing."""
    monkeypatch.setattr(queue, "MAX_BACKOFF_S", 0.1)
    server = Server(tmp_path, changed="appendonly no\n")
    try:
        async with connected(server) as client:
            server.end(signal.SIGKILL)
            reading = asyncio.create_task(
                client.call(
                    lambda: client.raw.xreadgroup("hr", "w", {client.keys.requests: ">"}, block=9)
                )
            )
            await asyncio.sleep(0.2 * queue.MISSING_TRIES)
            await asyncio.to_thread(server.start)
            assert not await reading
            with admin(server) as control:
                assert control.exists(*client.keys.streams) == 6
            assert client.reconnects > 0
    finally:
        server.end(signal.SIGKILL)


async def test_nobody_takes_over_what_an_outage_has_let_grow_old(server: Server) -> None:
    async with connected(server) as client:
        await started(client, "a")
        holder, other = stage(client, consumer="h"), stage(client, consumer="o")
        [_] = await take(holder, 1)
        await asyncio.sleep(SETTINGS.claim_after_s * 1.2)
        choose = other._choose

        async def through_an_outage(stream: str, limit: int) -> list[tuple[str, int, bytes]]:
            chosen = await choose(stream, limit)
            if chosen:
                client.no_takeover_before_s = time.monotonic() + 60
            return chosen

        other._choose = through_an_outage  # type: ignore[method-assign]
        assert await other.take(1) == []
        with redis.Redis.from_url(server.url) as control:
            [found] = control.xpending_range(client.keys.requests, "hr", "-", "+", 10)
        assert found["consumer"] == b"h"


async def test_a_restart_between_two_calls_is_noticed(server: Server) -> None:
    """The connections are idle meanwhile, and replaced without an error."""
    async with connected(server) as client:
        before = client.reconnects
        server.end(signal.SIGKILL)
        server.start()
        await asyncio.sleep(0.1)  # for the event loop to see that they have been closed
        client.no_takeover_before_s = 0.0
        await client.call(client.raw.ping)
        assert client.reconnects > before
        assert client.no_takeover_before_s > time.monotonic()
        # A new connection to the same start of it means nothing.
        before = client.reconnects
        await client.raw.connection_pool.disconnect()
        await client.call(client.raw.ping)
        assert client.reconnects == before
