"""A service of benchmarks/overhead.py, with its recording timed or turned off:

    overhead_service.py on|off FOLDER services.NAME ARGUMENTS…

What is recorded passes a handful of functions (RECORDING, and the recorder's own methods). They are
replaced before the service is imported. On: each is timed on its thread's CPU clock, and so is the
thread that sends; FOLDER/NAME-PID.json has the sums when the process ends. Off: they do nothing, so
that nothing is sent either.
"""

import atexit
import importlib
import json
import os
import random
import runpy
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.recorder import Recorder

RECORDING: dict[str, dict[str, tuple[str, ...]]] = {
    "services.trainer": {
        "services.trainer.measure": (
            *("record_step", "record_queue", "record_drop", "record_dropped_samples"),
        ),
        "services.trainer.evaluation": ("record_evaluation",),
    },
    "services.generator": {"services.generator.measure": ("measure",)},
    "services.scorer": {"services.scorer.scoring": ("record", "record_seconds")},
}
"""Functions that compute what is then recorded, by service and module."""

METHODS = ("count", "observe", "observe_many", "ratio", "event", "trace")

CALIBRATION_CALLS = 20_000

EMPTY_FRAC = 0.125
"""Of the calls that would be timed, those in whose place one that does nothing is."""


@dataclass
class Spent:
    """What recording has cost this process."""

    calls: int = 0
    """A recorder's method within a function of RECORDING is part of that."""
    inner_calls: int = 0
    seconds: float = 0.0
    """CPU seconds within calls, what timing itself costs taken off."""
    timing_s: float = 0.0
    """What that costs a call, where the calls are made."""
    sender_s: float = 0.0
    """CPU seconds of the sending thread."""
    lifetime_cpu_s: float = 0.0
    """Of the whole process."""


@dataclass
class Timed:
    """The calls of one function."""

    calls: int = 0
    timed: int = 0
    seconds: float = 0.0
    """Of those that were timed."""


class Clock:
    """Times calls, each thread for itself.

    To read a thread's clock is a system call, which between pieces of other work takes several
    times as long as in a loop, and longer than most of what is timed. So what timing costs is
    measured there: some calls, drawn by chance, are not timed; one that does nothing is instead.
    """

    def __init__(self, empty_frac: float = EMPTY_FRAC) -> None:
        self.spent = Spent()
        self._empty_frac = empty_frac
        self._functions: list[Timed] = []
        self._empty = Timed()
        self._lock = threading.Lock()
        self._within = threading.local()

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed unless it is called within another that is."""
        within, mine = self._within, Timed()
        self._functions.append(mine)

        def call(*arguments: Any, **named: Any) -> Any:
            if getattr(within, "timed", False):
                self.spent.inner_calls += 1
                return function(*arguments, **named)
            if random.random() < self._empty_frac:
                self._time(self._empty, _nothing, arguments, named)
                with self._lock:
                    mine.calls += 1
                within.timed = True
                try:
                    return function(*arguments, **named)
                finally:
                    within.timed = False
            return self._time(mine, function, arguments, named)

        return call

    def _time(
        self, into: Timed, function: Callable[..., Any], arguments: Any, named: Mapping[str, Any]
    ) -> Any:
        within = self._within
        within.timed = True
        begin_s = time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            seconds = time.thread_time() - begin_s
            within.timed = False
            with self._lock:
                into.calls += 1
                into.timed += 1
                into.seconds += seconds

    def watch_sender(self) -> None:
        """Time the recorder's thread as a whole: what its samplers record is part of it."""
        run, clock = threading.Thread.run, self

        def timed_run(thread: threading.Thread) -> None:
            if thread.name != "recorder":
                run(thread)
                return
            clock._within.timed = True
            try:
                run(thread)
            finally:
                clock.spent.sender_s += time.thread_time()

        setattr(threading.Thread, "run", timed_run)  # noqa: B010 - mypy knows no other way

    def result(self) -> Spent:
        """What was spent, without what timing cost."""
        found, self.spent = self.spent, Spent()
        for each in self._functions:
            found.calls += each.calls
            if each.timed:
                found.seconds += each.seconds * each.calls / each.timed
        if self._empty.timed:
            found.timing_s = self._empty.seconds / self._empty.timed
        empty = self.timed(_nothing)
        self._within.timed = True
        begin_s = time.thread_time()
        for _ in range(CALIBRATION_CALLS):
            empty()
        of_inner_s = (time.thread_time() - begin_s) / CALIBRATION_CALLS
        self._within.timed = False
        taken_off = found.calls * found.timing_s + found.inner_calls * of_inner_s
        found.seconds = max(0.0, found.seconds - taken_off)
        found.lifetime_cpu_s = time.process_time()
        return found


def _nothing(*_: Any, **__: Any) -> None:
    """What recording is where it is off; a trace is not taken (None reads as False)."""


def main() -> None:
    """Replace, then be the service."""
    mode, folder, service = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    clock = Clock()
    replaced = clock.timed if mode == "on" else lambda _: _nothing
    for method in METHODS:
        setattr(Recorder, method, replaced(getattr(Recorder, method)))
    for name, functions in RECORDING.get(service, {}).items():
        module = importlib.import_module(name)
        for function in functions:
            setattr(module, function, replaced(getattr(module, function)))
    if mode == "on":
        clock.watch_sender()
        path = folder / f"{service.rpartition('.')[2]}-{os.getpid()}.json"
        atexit.register(lambda: path.write_text(json.dumps(asdict(clock.result()))))
    sys.argv = sys.argv[3:]
    runpy.run_module(service, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
