"""How a service lives: what it is doing (phase), whether it is ready, and how it ends.

A service is one coroutine. SIGTERM and SIGINT set `stopping`; the coroutine then stops taking
work, gives the rest back and returns, and the process exits 0. A user's mistake (UserError) is
one line and exit status 2; anything else is a traceback in the log and exit status 1.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from services.common.errors import FENCED_STATUS, EndedWith, Fenced, UserError

USER_ERROR_STATUS = 2


@dataclass(frozen=True)
class Snapshot:
    """What GetStatus answers."""

    service: str
    producer: str
    ready: bool
    phase: str
    phase_s: float
    uptime_s: float
    details: dict[str, str]


@dataclass
class Lifecycle:
    """State of one process, read by status calls and probes. Use from the event loop that runs
    the service."""

    service: str
    """ "generator", "scorer", "trainer" or "aggregator"."""
    replica: str = ""
    """Which one: the pod's name, or a number given by the launcher."""
    phase: str = "starting"
    ready: bool = False
    details: dict[str, str] = field(default_factory=dict)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _born_s: float = field(default_factory=time.monotonic)
    _phase_since_s: float = field(default_factory=time.monotonic)
    _listeners: list[Callable[[bool], Awaitable[None]]] = field(default_factory=list)

    @property
    def producer(self) -> str:
        """`service-replica`: the name in metrics and in the queue."""
        return f"{self.service}-{self.replica}" if self.replica else self.service

    def enter(self, phase: str) -> None:
        """Say what the service does or waits for now."""
        if phase != self.phase:
            self.phase = phase
            self._phase_since_s = time.monotonic()
            structlog.get_logger().info("phase", phase=phase)

    async def set_ready(self, ready: bool) -> None:
        """Tell probes; a no-op when nothing changes."""
        if ready == self.ready:
            return
        self.ready = ready
        structlog.get_logger().info("ready" if ready else "not ready", phase=self.phase)
        for listener in self._listeners:
            await listener(ready)

    def on_ready_change(self, listener: Callable[[bool], Awaitable[None]]) -> None:
        """Call `listener` at each change of readiness."""
        self._listeners.append(listener)

    def snapshot(self) -> Snapshot:
        """The present state."""
        now = time.monotonic()
        return Snapshot(
            service=self.service,
            producer=self.producer,
            ready=self.ready,
            phase=self.phase,
            phase_s=now - self._phase_since_s,
            uptime_s=now - self._born_s,
            details=dict(self.details),
        )

    async def stopped_within(self, timeout_s: float) -> bool:
        """Sleep, but wake at once when the service is asked to stop; True when it is."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), timeout_s)
        return self.stopping.is_set()


async def cancel(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and wait for their end, whatever they end with.

    redis-py swallows a cancellation that arrives within a command, so one cancel() is not enough.
    The wait goes on when the caller is itself cancelled meanwhile, and the cancellation is raised
    afterwards: else a task that had swallowed its own would go on alone.
    """
    running = {task for task in tasks if not task.done()}
    interrupted = False
    while running:
        for task in running:
            task.cancel()
        try:
            _, running = await asyncio.wait(running, timeout=0.1)
        except asyncio.CancelledError:
            interrupted = True
            running = {task for task in running if not task.done()}
    if interrupted:
        raise asyncio.CancelledError


def configure_logging() -> None:
    """Structured lines on stderr: readable on a terminal, JSON elsewhere."""
    human = sys.stderr.isatty()
    # Tracebacks are plain: structlog's pretty ones print local variables, and tokens with them.
    renderer: Any = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if human
        else structlog.processors.JSONRenderer()
    )
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not human:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def default_replica() -> str:
    """The pod's or host's name, made fit for names in metrics and in the queue."""
    name = os.environ.get("HOSTNAME") or socket.gethostname().split(".")[0]
    return re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-") or "0"


def announce(path: str | None, **fields: Any) -> None:
    """Write the ports that were taken as JSON to `path`, for a launcher that passed port 0.

    A reader finds the whole text or no file: it appears by a rename. Raises UserError.
    """
    if path is None:
        return
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(fields))
        temporary.rename(target)
    except OSError as error:
        raise UserError(f"--announce {path}: cannot be written: {error.strerror}") from error


def exit_status(error: BaseException) -> int:
    """What a process that ends by `error` returns; says to stderr or the log why.

    A task group wraps the errors of its tasks: it is a user's mistake when all of them are, and
    the run has been taken over when any of them says so.
    """
    causes = list(_causes(error))
    status = status_of(error)
    if isinstance(error, EndedWith):
        structlog.get_logger().info("ended", why=str(error), status=status)
    elif status == FENCED_STATUS:
        print(f"error: {next(c for c in causes if isinstance(c, Fenced))}", file=sys.stderr)
    elif status == USER_ERROR_STATUS:
        for line in dict.fromkeys(line for cause in causes for line in str(cause).splitlines()):
            print(f"error: {line}", file=sys.stderr)
    else:
        structlog.get_logger().error("failed", exc_info=error)
    return status


def status_of(error: BaseException) -> int:
    """What a process that ends by `error` returns; nothing is said."""
    if isinstance(error, EndedWith):
        return error.status
    causes = list(_causes(error))
    if any(isinstance(cause, Fenced) for cause in causes):
        return FENCED_STATUS
    return USER_ERROR_STATUS if all(isinstance(cause, UserError) for cause in causes) else 1


def _causes(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
    else:
        yield error


def run(
    lifecycle_of: Callable[[], Lifecycle], main: Callable[[Lifecycle], Coroutine[Any, Any, None]]
) -> int:
    """Run a service until it returns or a signal stops it; the exit status.

    A second signal ends the process at once with status 130.
    """
    configure_logging()

    async def supervised() -> None:
        lifecycle = lifecycle_of()
        loop = asyncio.get_running_loop()
        signals = 0

        def stop() -> None:
            # Counted, since others than a signal may have asked it to stop.
            nonlocal signals
            signals += 1
            if signals > 1:
                os._exit(130)
            lifecycle.enter("draining")
            lifecycle.stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await main(lifecycle)

    assert inspect.iscoroutinefunction(main)
    try:
        asyncio.run(supervised())
    except Exception as error:
        return exit_status(error)
    return 0
