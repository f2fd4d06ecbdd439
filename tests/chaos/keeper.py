"""One process that is to be there: started, killed, stopped, started again by itself when it dies.

What becomes of it is kept: `ends` has the status of each process that ended.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

from services.common.errors import FENCED_STATUS
from services.common.lifecycle import cancel
from services.launcher import guard, logtail

ROOT = Path(__file__).parents[2]

RESTART_AFTER_S = 0.3

POLL_S = 0.05


class Guard:
    """Ends all processes of a pipeline should the harness itself be killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def tell(self, line: str) -> None:
        """`+GROUP` or `-GROUP`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """It is not needed any more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Keeper:
    """Keeps one command running.

    A process that ends with status 0 or FENCED_STATUS has come to its end and stays away; any other
    end is followed by another start, unless `held`.
    """

    def __init__(
        self, name: str, argv: Sequence[str], *, log: Path, environ: Mapping[str, str], guard: Guard
    ) -> None:
        self.name, self.argv, self.log = name, tuple(argv), log
        self.environ = dict(environ)
        self.ends: list[int] = []
        """Statuses, oldest first; those by a signal are negative."""
        self.crashes: list[tuple[int, str]] = []
        """Status and reason of each process that ended with an error of its own."""
        self._log_start_bytes = 0
        self.starts = 0
        self.kills = 0
        """SIGKILLs sent by `signal`."""
        self.held = asyncio.Event()
        """Clear while a dead process is not started again."""
        self.held.set()
        self.process: asyncio.subprocess.Process | None = None
        self.over = asyncio.Event()
        """Set once it has come to its end."""
        self._guard = guard
        self._keeping: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether there is a process now."""
        return self.process is not None

    @property
    def pid(self) -> int | None:
        """Of the process now."""
        return None if self.process is None else self.process.pid

    def start(self) -> Self:
        """Start it, and keep it running."""
        self.over.clear()
        self.held.set()
        self._keeping = asyncio.create_task(self._keep(), name=f"keep {self.name}")
        return self

    def signal(self, number: signal.Signals) -> int | None:
        """Send a signal; the pid that got it, None where there is no process."""
        if self.process is None:
            return None
        pid = self.process.pid
        self.kills += number == signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return pid

    async def stop(self, *, patience_s: float = 30.0) -> int | None:
        """SIGTERM; the status with which it ended, None where nothing ran. It is not started
        again. Raises TimeoutError."""
        if self._keeping is None or self._keeping.done():
            return self.ends[-1] if self.ends else None
        self.over.set()
        self.held.set()
        # One that is stopped would not hear of it; one that is being born gets it in _run_once.
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        async with asyncio.timeout(patience_s):
            await asyncio.wait({self._keeping})
        return self.ends[-1] if self.ends else None

    async def kill(self) -> None:
        """SIGKILL to it and its descendants; it is not started again."""
        self.over.set()
        self.held.set()
        if self._keeping is not None:
            while not self._keeping.done():
                self._kill_group()
                await asyncio.wait({self._keeping}, timeout=0.2)

    async def _keep(self) -> None:
        while not self.over.is_set():
            status = await self._run_once()
            self.ends.append(status)
            if status > 0 and status != FENCED_STATUS:
                why = logtail.last_error(self.log, since_byte=self._log_start_bytes)
                self.crashes.append((status, why or "nothing in its log"))
            if status in (0, FENCED_STATUS):
                self.over.set()
                return
            if self.over.is_set():
                return
            await asyncio.sleep(RESTART_AFTER_S)
            await self.held.wait()

    async def _run_once(self) -> int:
        with self.log.open("ab") as log:
            self._log_start_bytes = log.tell()
            self.process = await self._spawn(log)
        self._guard.tell(f"+{self.process.pid}")
        self.starts += 1
        process = self.process
        if self.over.is_set():
            self.signal(signal.SIGTERM)
        try:
            return await process.wait()
        finally:
            self._kill_group()
            self._guard.tell(f"-{process.pid}")
            self.process = None

    async def _spawn(self, log: IO[bytes]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self.environ,
            cwd=ROOT,
            start_new_session=True,
        )

    def _kill_group(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def abandon(self) -> None:
        """Kill it and forget the keeping, whatever state it is in."""
        await self.kill()
        if self._keeping is not None:
            await cancel(self._keeping)
