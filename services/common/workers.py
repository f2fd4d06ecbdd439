"""A bounded pool of worker processes for user functions, so that user code can hang, crash or hold
the GIL alone.

In the service: `Pool`, for asyncio. In each process (`python -m services.common.workers`): one call
at a time, in the main thread, of a `module:function`. A call past its timeout is ended by killing
its process, and a new one takes its place; a thread could not be ended, and a function that holds
the GIL would stall the service's renewals and probes.

The channel is the worker's standard input and output: frames of an 8-byte big-endian length and
UTF-8 JSON. Both ends are this file, so NaN and the infinities travel as the literals that Python's
json module reads back. The worker moves the channel to private descriptors first: what user code
prints goes to the service's log and cannot be taken for an answer. A worker ends when its input
does: no service, no worker.
"""

import asyncio
import contextlib
import ctypes
import json
import numbers
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, Self

HEADER = struct.Struct(">Q")
"""Length of the frame that follows."""

LOG_ARGUMENT = "log_metric"
"""The argument by which a function can say numbers beside its result: `log_metric(name, value)`."""

START_TIMEOUT_S = 120.0
"""Of a worker's start with all its imports."""

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent ends (prctl(2))."""


class WorkerError(RuntimeError):
    """A call that gave no result; the message says why in one line."""


class CallTimedOut(WorkerError):
    """The function did not return in time; its process was killed."""


class WorkerDied(WorkerError):
    """The process ended during the call: a crash, the memory limit, os._exit()."""


class CallRaised(WorkerError):
    """The function raised, or returned what JSON cannot carry."""

    def __init__(self, message: str, *, traceback_text: str) -> None:
        super().__init__(message)
        self.traceback_text = traceback_text
        """The traceback in the user's code."""


class LoadFailed(CallRaised):
    """The function could not be imported in the worker."""


def plain(value: Any) -> Any:
    """Numbers and arrays of other libraries as Python's own: numpy and torch values by `tolist()`.

    Raises TypeError for what has no JSON form.
    """
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent as JSON")


def _frame(message: Any) -> bytes:
    body = json.dumps(message, allow_nan=True, separators=(",", ":"), default=plain).encode()
    return HEADER.pack(len(body)) + body


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
                "services.common.workers",
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


class Pool:
    """At most `size` worker processes. Use within one event loop; `async with` starts and closes
    it.

    `preload` are modules, or `module:function` references, that each worker imports before its
    first call, so that no call's timeout pays for them.
    """

    def __init__(self, size: int, *, preload: Sequence[str] = ()) -> None:
        self._size = size
        self._preload = list(preload)
        self._places = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start all workers now, not at the first calls. Raises LoadFailed or WorkerDied."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._start_one()) for _ in range(self._size)]
        except* WorkerError as errors:
            await self.close()
            raise errors.exceptions[0] from None
        self._idle.extend(task.result() for task in tasks)

    async def call(
        self,
        reference: str,
        kwargs: Mapping[str, Any],
        *,
        timeout_s: float,
        took: Callable[[float], None] | None = None,
        logged: Callable[[str, float], None] | None = None,
    ) -> Any:
        """Call `reference` with `kwargs` (JSON values) in a worker; its result, as JSON brings it
        back.

        Waiting for a free worker is part neither of `timeout_s` nor of the seconds that `took` is
        told, however the call ends. With `logged` the function gets LOG_ARGUMENT, and what it says
        by it is told when it has returned. Cancelling the call kills its process.
        Raises CallTimedOut, WorkerDied, LoadFailed or CallRaised.
        """
        logs = logged is not None
        frame = _frame({"call": reference, "kwargs": dict(kwargs), "logs": logs})
        async with self._places:
            worker = await self._take()
            begin_s = time.monotonic()
            try:
                answer = await worker.ask(frame, timeout_s=timeout_s)
            except BaseException:
                # Whatever interrupted it, the user's function may still be running in there.
                self._discard(worker)
                raise
            finally:
                if took is not None:
                    took(time.monotonic() - begin_s)
            self._idle.append(worker)
        value = _checked(answer)
        if logged is not None:
            for name, number in answer["logged"]:
                logged(name, number)
        return value

    async def close(self) -> None:
        """Kill all workers and wait until they are gone; running calls raise WorkerDied."""
        self._closed = True
        self._idle.clear()
        for worker in self._alive:
            worker.kill()
        for worker in list(self._alive):
            await worker.process.wait()
        self._alive.clear()

    async def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.returncode is None:
                return worker
            self._discard(worker)
        return await self._start_one()

    async def _start_one(self) -> _Worker:
        if self._closed:
            raise WorkerDied("the pool of workers is closed")
        worker = await _Worker.spawn()
        self._alive.add(worker)
        try:
            if self._closed:
                raise WorkerDied("the pool of workers was closed while a worker started")
            _checked(await worker.ask(_frame({"load": self._preload}), timeout_s=START_TIMEOUT_S))
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _discard(self, worker: _Worker) -> None:
        """Kill a worker; the event loop reaps it, close() waits for those of this moment."""
        worker.kill()
        self._alive = {other for other in self._alive if other.process.returncode is None}


def _load(reference: str) -> Callable[..., Any] | None:
    """Import a module, or what a `module:function` names in it (imported here: the pool itself
    needs nothing of it).
    """
    import importlib

    module_name, _, path = reference.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found if path else None


def _answer(request: dict[str, Any], loaded: dict[str, Callable[..., Any]]) -> bytes:
    """Do what one frame asks; the frame to send back. Never raises: SystemExit of user code is an
    answer, too.
    """
    stage = "load"
    try:
        for reference in request.get("load", [request.get("call")]):
            if reference not in loaded:
                function = _load(reference)
                if function is not None:
                    loaded[reference] = function
        if "load" in request:
            return _frame({"value": None})
        stage = "call"
        logged: list[tuple[str, float]] = []
        kwargs = request["kwargs"]
        if request["logs"]:
            kwargs[LOG_ARGUMENT] = lambda name, value: logged.append((str(name), float(value)))
        value = loaded[request["call"]](**kwargs)
        return _frame({"value": value, "logged": logged})
    except BaseException as error:
        # The first frame is this function's own; what the user can act on begins below it.
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, below))
        what = str(error).splitlines()[0] if str(error) else ""
        return _frame(
            {"while": stage, "error": f"{type(error).__name__}: {what}", "traceback": text}
        )


def _die_with_parent() -> None:
    """End at once when the service is killed, also in the middle of a call that never returns
    (Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame, or None at the end of the input."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    body = stream.read(length)
    if len(body) < length:
        return None
    request: dict[str, Any] = json.loads(body)
    return request


def _serve() -> None:
    """Answer frames until the input ends."""
    _die_with_parent()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    assert hasattr(sys.stdout, "reconfigure")
    sys.stdout.reconfigure(line_buffering=True)
    loaded: dict[str, Callable[..., Any]] = {}
    while (request := _read(requests)) is not None:
        answers.write(_answer(request, loaded))
        answers.flush()
    # Not by returning: a thread that user code left running would keep the process.
    os._exit(0)


if __name__ == "__main__":
    _serve()
