"""A bounded pool of worker processes for user functions, so that user code can hang, crash or hold
the GIL alone.

`Pool` is for asyncio; what runs in each process is services/common/worker_process.py. A call past
its timeout is ended by killing its process, and a new one takes its place when one is needed; a
thread could not be ended, and a function that holds the GIL would stall the service's renewals and
probes.

A caller has a worker by a `Lease`, for one call or for many: what a function leaves in the globals
of its module is there at the lease's next call. Workers are handed over first come, first served,
and the one that was used last is used next, so that quick calls stay on few processes.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import structlog

from services.common.worker_process import HEADER, to_frame
from services.common.worker_process import LOG_ARGUMENT as LOG_ARGUMENT
from services.common.worker_process import plain as plain

START_TIMEOUT_S = 120.0
"""Of a worker's start with all its imports."""

GROW_AFTER_S = 0.2
"""A caller that has waited this long for a worker gets one more process, where the size allows it:
the others are in slow calls. A burst of quick ones is over before that."""

GROW_AGAIN_S = 5.0
"""How long the pool does not grow after a process that could not be started."""


class WorkerError(RuntimeError):
    """A call that gave no result; the message says why in one line."""


class CallTimedOut(WorkerError):
    """The function did not return in time; its process was killed."""


class WorkerDied(WorkerError):
    """The process ended during the call: a crash, the memory limit, os._exit()."""


class CallRaised(WorkerError):
    """The function raised, or returned what JSON cannot carry."""

    def __init__(self, text: str, *, traceback_text: str) -> None:
        super().__init__(text.partition("\n")[0])
        self.text = text
        """`Type: message` with all lines of the message; str() has the first."""
        self.traceback_text = traceback_text
        """The traceback in the user's code."""


class LoadFailed(CallRaised):
    """The function could not be imported in the worker."""


class _Worker:
    """One process and its channel, as the pool sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def spawn(cls) -> Self:
        # What this process can import, the worker can: a test's or a notebook's path included.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.common.worker_process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path},
                # A session of its own: Ctrl-C goes to the service, which decides; and one signal
                # ends the worker together with whatever the user's function started.
                start_new_session=True,
            )
        )

    async def ask(self, frame: bytes, *, timeout_s: float) -> dict[str, Any]:
        """One request, one answer. Raises CallTimedOut or WorkerDied; the worker is of no further
        use then.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                self.process.stdin.write(frame)
                await self.process.stdin.drain()
                (length,) = HEADER.unpack(await self.process.stdout.readexactly(HEADER.size))
                answer: dict[str, Any] = json.loads(await self.process.stdout.readexactly(length))
                return answer
        except TimeoutError:
            raise CallTimedOut(f"did not return within {timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            self.kill()
            status = await self.process.wait()
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            raise WorkerDied(f"its process {how}") from None

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _checked(answer: dict[str, Any]) -> Any:
    """The value of an answer; raises what it reports."""
    if "value" in answer:
        return answer["value"]
    kind = LoadFailed if answer["while"] == "load" else CallRaised
    raise kind(answer["error"], traceback_text=answer["traceback"])


class Lease:
    """A worker of a pool for one caller, until `release` or `discard`. One call at a time."""

    def __init__(self, pool: "Pool", worker: _Worker) -> None:
        self._pool = pool
        self._worker: _Worker | None = worker
        self._busy = False

    async def call(
        self,
        reference: str,
        kwargs: Mapping[str, Any],
        *,
        timeout_s: float,
        took: Callable[[float], None] | None = None,
        logged: Callable[[str, float], None] | None = None,
    ) -> Any:
        """Call `reference` with `kwargs` (JSON values) in the worker; its result, as JSON brings it
        back.

        `took` is told the call's seconds, however it ends. With `logged` the function gets
        LOG_ARGUMENT, and what it says by it is told when it has returned. Cancelling the call kills
        the process. Raises CallTimedOut or WorkerDied, after which the lease is of no further use
        (each later call raises WorkerDied), LoadFailed or CallRaised.
        """
        assert not self._busy, "a lease has one call at a time"
        frame = to_frame({"call": reference, "kwargs": dict(kwargs), "logs": logged is not None})
        if self._worker is None:
            raise WorkerDied("its process has been ended")
        self._busy = True
        begin_s = time.monotonic()
        try:
            answer = await self._worker.ask(frame, timeout_s=timeout_s)
        except BaseException:
            # Whatever interrupted it, the user's function may still be running in there.
            self.discard()
            raise
        finally:
            self._busy = False
            if took is not None:
                took(time.monotonic() - begin_s)
        value = _checked(answer)
        if logged is not None:
            for name, number in answer["logged"]:
                logged(name, number)
        return value

    @property
    def ended(self) -> bool:
        """No call is possible any more."""
        return self._worker is None or self._worker.ended

    def release(self) -> None:
        """Give the worker to others, who find in it what the calls left there. A worker in the
        middle of a call is killed instead. Does nothing the second time.
        """
        if self._busy:
            self.discard()
        elif self._worker is not None:
            worker, self._worker = self._worker, None
            self._pool._give(worker)

    def discard(self) -> None:
        """Kill the worker, with all that its calls left there. Does nothing the second time."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            self._pool._discard(worker)


class _Waiting(NamedTuple):
    """A caller without a worker yet."""

    since_s: float
    worker: asyncio.Future[_Worker]


class Pool:
    """At most `size` worker processes. Use within one event loop; `async with` starts and closes
    it.

    `preload` are modules, or `module:function` references, that each worker imports before its
    first call, so that no call's timeout pays for them. `start` starts `ready` workers (default
    `size`); one that has ended is replaced when a caller needs it, and beyond `ready` one is added
    when a caller has waited GROW_AFTER_S, as many at a time as there are processors: calls stuck in
    slow functions do not hold up the rest, and quick calls need no more than `ready` processes.
    """

    def __init__(self, size: int, *, preload: Sequence[str] = (), ready: int | None = None) -> None:
        self._size = size
        self._ready = size if ready is None else min(ready, size)
        self._preload = list(preload)
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._ending: set[_Worker] = set()
        """Killed, not known to be gone yet."""
        self._waiting: deque[_Waiting] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._growth: asyncio.TimerHandle | None = None
        self._no_growth_before_s = 0.0
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def alive(self) -> int:
        """Workers that are started and not killed: idle ones and those of leases."""
        return len(self._alive)

    @property
    def idle(self) -> int:
        """Workers that wait for a caller."""
        return len(self._idle)

    async def start(self) -> None:
        """Start `ready` workers now, not at the first calls. Raises LoadFailed or WorkerDied."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._start_one()) for _ in range(self._ready)]
        except BaseException as error:
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        self._idle.extend(task.result() for task in tasks)

    async def lease(self) -> Lease:
        """A worker to call as often as wanted, for this caller alone until it is released or
        discarded. Raises WorkerDied where the pool is closed or no process can be started, and
        LoadFailed.
        """
        if self._closed:
            raise WorkerDied("the pool of workers is closed")
        while self._idle:
            worker = self._idle.pop()
            if not worker.ended:
                return Lease(self, worker)
            self._discard(worker)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(loop.time(), loop.create_future())
        self._waiting.append(waiting)
        self._grow()
        try:
            return Lease(self, await waiting.worker)
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.worker.cancelled() and waiting.worker.exception() is None:
                # Handed over in the same turn of the event loop as the cancellation.
                self._give(waiting.worker.result())
            raise

    async def call(
        self,
        reference: str,
        kwargs: Mapping[str, Any],
        *,
        timeout_s: float,
        took: Callable[[float], None] | None = None,
        logged: Callable[[str, float], None] | None = None,
    ) -> Any:
        """One call in any worker, as `Lease.call` describes it.

        Waiting for a free worker is part neither of `timeout_s` nor of the seconds that `took` is
        told. Raises CallTimedOut, WorkerDied, LoadFailed or CallRaised.
        """
        lease = await self.lease()
        try:
            return await lease.call(
                reference, kwargs, timeout_s=timeout_s, took=took, logged=logged
            )
        finally:
            lease.release()

    async def close(self) -> None:
        """Kill all workers and wait until they are gone; running calls raise WorkerDied."""
        self._closed = True
        if self._growth is not None:
            self._growth.cancel()
        self._idle.clear()
        while (waiting := self._next_waiting()) is not None:
            waiting.set_exception(WorkerDied("the pool of workers is closed"))
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for worker in list(self._alive):
            self._discard(worker)
        for worker in list(self._ending):
            await worker.process.wait()
        self._ending.clear()

    def _give(self, worker: _Worker) -> None:
        """Hand a worker to who has waited longest, or keep it for the next caller."""
        if self._closed or worker.ended:
            self._discard(worker)
        elif (waiting := self._next_waiting()) is not None:
            waiting.set_result(worker)
        else:
            self._idle.append(worker)

    def _next_waiting(self) -> asyncio.Future[_Worker] | None:
        """Who has waited longest, no longer in the queue; those just cancelled are passed over."""
        while self._waiting:
            waiting = self._waiting.popleft().worker
            if not waiting.done():
                return waiting
        return None

    def _discard(self, worker: _Worker) -> None:
        """Kill a worker; the event loop reaps it. Who waits may get another in its place."""
        worker.kill()
        self._alive.discard(worker)
        self._ending = {other for other in self._ending if not other.ended} | {worker}
        self._grow()

    def _grow(self) -> None:
        """Start the processes that callers are waiting for and may have; called whenever one
        begins to wait and whenever a process is started or killed.
        """
        loop = asyncio.get_running_loop()
        while len(self._starting) < len(self._waiting) and not self._closed:
            num_workers = len(self._alive) + len(self._starting)
            if num_workers >= self._size:
                return
            if num_workers >= max(self._ready, 1):
                if len(self._starting) >= (os.cpu_count() or 1):
                    return
                # Those before it are who the starting ones will be for.
                since_s = self._waiting[len(self._starting)].since_s
                due_s = max(since_s + GROW_AFTER_S, self._no_growth_before_s)
                if loop.time() < due_s:
                    if self._growth is not None:
                        self._growth.cancel()
                    self._growth = loop.call_at(due_s, self._grow)
                    return
            task = loop.create_task(self._add_one(beyond=num_workers >= max(self._ready, 1)))
            self._starting.add(task)
            task.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if not task.cancelled():
            task.result()
        self._grow()

    async def _add_one(self, *, beyond: bool) -> None:
        """Start a worker for whoever waits by then. Where none can be started who has waited
        longest is told; not so `beyond` the ready ones, where others are at work and become free.
        """
        try:
            worker = await self._start_one()
        except Exception as error:
            if beyond and self._alive:
                structlog.get_logger().warning("no further worker process", why=str(error))
                self._no_growth_before_s = asyncio.get_running_loop().time() + GROW_AGAIN_S
            elif (waiting := self._next_waiting()) is not None:
                waiting.set_exception(error)
            return
        self._give(worker)

    async def _start_one(self) -> _Worker:
        if self._closed:
            raise WorkerDied("the pool of workers is closed")
        try:
            worker = await _Worker.spawn()
        except OSError as error:
            # No memory, or the limit of processes: a call that fails, not a service.
            raise WorkerDied(f"its process could not be started: {error}") from error
        try:
            if self._closed:
                raise WorkerDied("the pool of workers was closed while a worker started")
            _checked(await worker.ask(to_frame({"load": self._preload}), timeout_s=START_TIMEOUT_S))
        except BaseException:
            self._discard(worker)
            raise
        self._alive.add(worker)
        return worker
