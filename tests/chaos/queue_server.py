"""A real queue server with the embedded one's settings (append-only file, forced to disk once a
second), which can be killed, emptied, and put back to what it was some seconds ago."""

import asyncio
import shutil
import signal
from pathlib import Path

import redis
import redis.asyncio
from redis.exceptions import BusyLoadingError

from services.launcher import embedded_queue
from tests.chaos.keeper import Guard


class QueueServer:
    """A Valkey in a folder of its own."""

    def __init__(self, folder: Path, *, port: int, guard: Guard) -> None:
        self.folder, self.port = folder, port
        self._config = embedded_queue.write_config(folder, port=port)
        self._guard = guard
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Its own address, past any proxy."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """Start it, and wait until it has read what it kept."""
        with (self.folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(embedded_queue.binary()),
                str(self._config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._guard.tell(f"+{self._process.pid}")
        client = redis.asyncio.Redis.from_url(self.url)
        try:
            while True:
                try:
                    await client.ping()
                    return
                except (redis.ConnectionError, BusyLoadingError, OSError):
                    assert self._process.returncode is None, (self.folder / "log").read_text()
                    await asyncio.sleep(0.05)
        finally:
            await client.aclose()

    async def kill(self) -> None:
        """SIGKILL; what it has answered is with the operating system."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        self._guard.tell(f"-{self._process.pid}")
        self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def empty(self) -> None:
        """Lose all data. It must not be running."""
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)

    @property
    def appended(self) -> Path:
        """The file that the server appends its commands to."""
        [path] = (self.folder / "appendonlydir").glob("*.incr.aof")
        return path

    def copy(self, to: Path) -> None:
        """Copy the data as they are, also while it runs."""
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.folder / "appendonlydir", to)

    def restore(self, copied: Path) -> None:
        """Put a copy in the place of the data. It must not be running."""
        self.empty()
        shutil.copytree(copied, self.folder / "appendonlydir")

    def cut_to(self, num_bytes: int) -> int:
        """Cut what was appended behind `num_bytes`, in the middle of a command or not; how many
        bytes were lost. It must not be running."""
        path = self.appended
        size = path.stat().st_size
        kept = min(num_bytes, size)
        with path.open("r+b") as file:
            file.truncate(kept)
        return size - kept
