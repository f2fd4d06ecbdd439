"""A TCP proxy of ours between services and a server: cuts connections, refuses them, delays bytes,
and can be pointed at another server."""

import asyncio
import contextlib
from typing import Self

from services.common.lifecycle import cancel

CHUNK_BYTES = 1 << 16

QUEUED_CHUNKS = 64
"""On their way in one direction of one connection, at most."""


class Proxy:
    """Listens on `port` of the loopback for whoever wants the server at `target`.

    `async with Proxy(port, target=server_port) as proxy:`
    """

    def __init__(self, port: int, *, target: int) -> None:
        self.port = port
        self.target = target
        """New connections go there."""
        self.delay_s = 0.0
        """What a chunk takes, in each direction."""
        self.num_connections = 0
        """That were ever accepted."""
        self._pairs: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    async def accept(self) -> None:
        """Take connections (again)."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def refuse(self) -> None:
        """Cut all connections and refuse new ones, until `accept`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.cut()

    async def cut(self) -> int:
        """End all connections, as a network does: what is on its way is lost. How many there
        were."""
        pairs = list(self._pairs)
        await cancel(*pairs)
        return len(pairs)

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._pairs)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pairs.add(task)
        self.num_connections += 1
        try:
            await self._join(reader, writer)
        except asyncio.CancelledError:
            # By `cut`. Raised again it would be reported as an error of the server.
            pass
        finally:
            self._pairs.discard(task)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            return
        ways = [
            asyncio.create_task(self._carry(reader, forth)),
            asyncio.create_task(self._carry(back, writer)),
        ]
        try:
            # Either end's end ends both: nobody here uses half-open connections.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(*ways)
            forth.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, in order, each chunk as late as the delay was when it came."""
        loop = asyncio.get_running_loop()
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_CHUNKS)

        async def deliver() -> None:
            while True:
                due_s, data = await late.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                writer.write(data)
                await writer.drain()
                if not data:
                    return

        delivering = asyncio.create_task(deliver())
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(CHUNK_BYTES):
                    await late.put((loop.time() + self.delay_s, data))
                await late.put((loop.time() + self.delay_s, b""))
                await delivering
        finally:
            await cancel(delivering)
            if not delivering.cancelled():
                delivering.exception()
