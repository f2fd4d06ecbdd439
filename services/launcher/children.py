"""Processes of a run: started, restarted with back-off when they die, stopped in order, none left
behind.

A child is `starting -> running -> dead -> (back-off) -> running ...` until it is told to stop. What
its death means:

- a child with `ends_run` (the trainer) and status 0: the run is over;
- status 2: the user's mistake; the run ends with that child's own `error: …` line;
- status 75: a newer attempt has taken over; the run fails, nothing is restarted;
- anything else: restarted, at most `RestartPolicy.most` times in `window_s`, or in a row without
  having been ready between; one death more and the run fails.

waits_for: the end of processes. unblocked_by: the kernel, `stop()`, `kill()`.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from services.common.errors import FENCED_STATUS, UserError
from services.launcher import guard, logtail
from services.launcher.errors import RunFailed

GROUP_END_S = 2.0
"""How long killed descendants of a child may take to be gone."""


@dataclass(frozen=True)
class RestartPolicy:
    """How often, and how soon, a dead child comes back."""

    most: int = 5
    """Restarts within `window_s`."""
    window_s: float = 60.0
    base_s: float = 0.5
    """Pause before the first restart; doubled for each further one in the window, with jitter."""
    max_s: float = 8.0


@dataclass(frozen=True)
class ChildSpec:
    """What to start."""

    name: str
    """`service-replica`: "generator-0"."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment."""
    log: Path
    """Takes stdout and stderr, appended across restarts."""
    tier: int
    """Stopped from the lowest tier to the highest."""
    announce: Path | None = None
    """Where it writes the ports that it took; removed before each start."""
    ends_run: bool = False


@dataclass(eq=False)
class Child:
    """One child and its history."""

    spec: ChildSpec
    process: asyncio.subprocess.Process | None = None
    """The running process, or None between two."""
    started_s: float = 0.0
    """When it was started last, monotonic."""
    ready: bool = False
    """Whether the present process has said that it does its work; who asks it sets this."""
    ended_s: float = 0.0
    """When a process of it ended last, monotonic."""
    starts: int = 0
    log_start_bytes: int = 0
    """Where the log of the present process begins."""
    last_death: str = ""
    """How the last process ended, "" while it never did."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    killed: bool = False
    """Whether SIGKILL was asked for: a process that is just being born must not escape it."""
    deaths_s: deque[float] = field(default_factory=deque)
    watch: "asyncio.Task[None] | None" = None

    @property
    def restarts(self) -> int:
        """Times that it was started again."""
        return max(0, self.starts - 1)


class Supervisor:
    """Starts children and answers for them: `async with Supervisor() as s: s.start(spec); await
    s.over`.
    """

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        self.children: dict[str, Child] = {}
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the run is over; carries UserError or RunFailed when it cannot go on."""
        self._policy = policy or RestartPolicy()
        self._guard: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        # PIPE's write end is ours alone (descriptors are not inherited), so its end is our end.
        self._guard = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(guard.__file__))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        await self._watched(list(self.children.values()))
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        await self._guard.wait()
        if self.over.done() and not self.over.cancelled():
            self.over.exception()  # Read, so that asyncio does not report it as never retrieved.

    def start(self, spec: ChildSpec) -> Child:
        """Start a child and keep it running."""
        child = self.children[spec.name] = Child(spec)
        child.watch = asyncio.create_task(self._keep(child), name=f"keep {spec.name}")
        return child

    async def stop(self, tier: int, *, grace_s: float) -> None:
        """SIGTERM to the children of a tier; what is left after `grace_s` is killed with all its
        descendants.
        """
        chosen = [child for child in self.children.values() if child.spec.tier == tier]
        for child in chosen:
            child.stopping.set()
            self._signal(child, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._watched(chosen)
        except TimeoutError:
            for child in chosen:
                child.killed = True
                self._signal_group(child)
            await self._watched(chosen)

    def kill(self) -> None:
        """SIGKILL to every child and its descendants, at once."""
        for child in self.children.values():
            child.killed = True
            child.stopping.set()
            self._signal_group(child)

    async def _watched(self, children: Sequence[Child]) -> None:
        """Wait until these have ended; a timeout around it does not disturb them."""
        tasks = [child.watch for child in children if child.watch is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def _keep(self, child: Child) -> None:
        try:
            while not child.stopping.is_set():
                await self._run_once(child)
                if child.stopping.is_set() or self.over.done():
                    return
                pause_s = self._pause_s(child)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.stopping.wait(), pause_s)
        except Exception as error:
            if not self.over.done():
                self.over.set_exception(error)

    async def _run_once(self, child: Child) -> None:
        """Start the process, wait for its end, kill what it left behind, and judge."""
        process = await self._spawn(child)
        child.process, child.started_s = process, time.monotonic()
        child.starts += 1
        child.ready = False
        self._tell_guard(f"+{process.pid}")
        if child.killed:
            self._signal_group(child)
        elif child.stopping.is_set():
            self._signal(child, signal.SIGTERM)
        status = await process.wait()
        await _end_group(process.pid)
        self._tell_guard(f"-{process.pid}")
        child.process, child.ended_s = None, time.monotonic()
        child.last_death = how_it_ended(status)
        if not child.stopping.is_set() and not self.over.done():
            self._judge(child, status)

    async def _spawn(self, child: Child) -> asyncio.subprocess.Process:
        spec = child.spec
        with _prepared_log(spec) as log:
            child.log_start_bytes = log.tell()
            return await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(spec.env),
                # A session of its own: Ctrl-C reaches the launcher alone, and the group is ours to
                # kill.
                start_new_session=True,
            )

    def _judge(self, child: Child, status: int) -> None:
        name, log, since = child.spec.name, child.spec.log, child.log_start_bytes
        if status == 2:
            line = logtail.user_error(log, since_byte=since)
            line = line or f"{name} refused to start; see {log}"
            self.over.set_exception(UserError(line))
        elif status == FENCED_STATUS:
            why = logtail.last_error(log, since_byte=since)
            self.over.set_exception(RunFailed(f"{name} was replaced: {why}; log: {log}"))
        elif child.spec.ends_run and status == 0:
            self.over.set_result(None)

    def _pause_s(self, child: Child) -> float:
        """Seconds until the next start. Raises RunFailed when it has died too often."""
        policy, now = self._policy, time.monotonic()
        child.deaths_s.append(now)
        # A process that takes minutes to fail at its start would else be started for ever.
        while child.ready and child.deaths_s[0] < now - policy.window_s:
            child.deaths_s.popleft()
        deaths = len(child.deaths_s)
        if deaths > policy.most:
            log = child.spec.log
            why = logtail.last_error(log, since_byte=child.log_start_bytes) or "its log is empty"
            raise RunFailed(
                f"{child.spec.name} died {deaths} times within {now - child.deaths_s[0]:.0f} s, "
                f"the last time it {child.last_death}: {why}; log: {log}"
            )
        pause_s = min(policy.max_s, policy.base_s * 2.0 ** (deaths - 1))
        return pause_s * random.uniform(0.5, 1.5)

    def _signal(self, child: Child, number: signal.Signals) -> None:
        if child.process is not None:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    def _signal_group(self, child: Child) -> None:
        if child.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)

    def _tell_guard(self, line: str) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{line}\n".encode())


async def _end_group(group: int) -> None:
    """Kill what is left of a process group, and give it GROUP_END_S to be gone: an engine that
    still holds its memory would starve the next one. (Zombies that nobody reaps stay members.)
    """
    with contextlib.suppress(TimeoutError, ProcessLookupError, PermissionError):
        async with asyncio.timeout(GROUP_END_S):
            while True:
                os.killpg(group, signal.SIGKILL)
                await asyncio.sleep(0.02)


def _prepared_log(spec: ChildSpec) -> BinaryIO:
    """The log, open for appending; the announcement of an earlier process is gone."""
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    if spec.announce is not None:
        spec.announce.parent.mkdir(parents=True, exist_ok=True)
        spec.announce.unlink(missing_ok=True)
    return spec.log.open("ab")


def how_it_ended(status: int) -> str:
    """ "exited with status 1", "was killed by SIGKILL"."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"exited with status {status}"
