"""The proxy does what a network does, and nothing else: bytes come whole and in order."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.proxy import Proxy
from tests.conftest import free_port
from tests.waiting import PATIENCE_S


@asynccontextmanager
async def echo(word: bytes = b"") -> AsyncIterator[int]:
    """A server that sends back what comes, behind `word`; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(word)
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def connect(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the connection has come to its end, once it has."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await reader.read(1) == b""
        except ConnectionError:
            return True


async def test_bytes_come_back_whole_in_pieces_and_with_a_delay_that_changes() -> None:
    sent = bytes(range(256)) * 8192
    async with echo() as port, Proxy(free_port(), target=port) as proxy:
        reader, writer = await connect(proxy)
        reading = asyncio.create_task(reader.readexactly(len(sent)))
        for start in range(0, len(sent), 1 << 18):
            proxy.delay_s = 0.02 if start % (1 << 19) else 0.0
            writer.write(sent[start : start + (1 << 18)])
            await writer.drain()
        assert await asyncio.wait_for(reading, PATIENCE_S) == sent
        writer.close()


async def test_a_delay_is_there_in_each_direction_and_ends() -> None:
    loop = asyncio.get_running_loop()
    async with echo() as port, Proxy(free_port(), target=port) as proxy:
        reader, writer = await connect(proxy)
        proxy.delay_s = 0.2
        begin_s = loop.time()
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        assert loop.time() - begin_s >= 0.4
        proxy.delay_s = 0.0
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"
        writer.close()


async def test_a_cut_ends_all_connections_and_takes_new_ones() -> None:
    async with echo() as port, Proxy(free_port(), target=port) as proxy:
        both = [await connect(proxy) for _ in range(2)]
        for reader, writer in both:
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
        assert proxy.connections == 2
        assert await proxy.cut() == 2
        assert [await ended(reader) for reader, _ in both] == [True, True]
        reader, writer = await connect(proxy)
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        for each in (writer, *(writer for _, writer in both)):
            each.close()


async def test_nobody_is_let_in_until_it_accepts_again() -> None:
    async with echo() as port, Proxy(free_port(), target=port) as proxy:
        reader, writer = await connect(proxy)
        await proxy.refuse()
        assert await ended(reader)
        with pytest.raises(ConnectionRefusedError):
            await connect(proxy)
        await proxy.accept()
        again, second = await connect(proxy)
        second.write(b"z")
        assert await again.readexactly(1) == b"z"
        writer.close()
        second.close()


async def test_new_connections_go_to_another_server_and_one_that_is_away_ends_them() -> None:
    async with (
        echo(b"1") as first,
        echo(b"2") as second,
        Proxy(free_port(), target=first) as proxy,
    ):
        reader, writer = await connect(proxy)
        assert await reader.readexactly(1) == b"1"
        proxy.target = second
        other, other_writer = await connect(proxy)
        assert await other.readexactly(1) == b"2"
        proxy.target = free_port()
        none, none_writer = await connect(proxy)
        assert await ended(none)
        for each in (writer, other_writer, none_writer):
            each.close()
