"""Makes differences of published versions, in the background of training.

A version is announced at once and again with its difference. To wait for the difference would hold
the step, and every generator, for as long as it takes to make; a generator that is still fetching
when it comes makes the rest of its file from it, so little is lost on a link that is slow enough
for the difference to matter.

waits_for: a version in bfloat16 that follows another. unblocked_by: the publisher.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common import weight_delta
from services.common.recorder import Recorder
from services.common.weight_delta import Delta
from services.common.weight_files import Pieces

MAX_THREADS = 4
"""That compress: a quarter of the cores, one at least. The rest is the training's."""


@dataclass(frozen=True)
class Wanted:
    """A version, and the one before it."""

    version: int
    path: Path
    chunks: Pieces
    base_version: int
    base_sha256: str
    base: Path


class DeltaMaker:
    """One difference at a time, of the newest version. Use from the event loop."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        announce: Callable[[int, Delta, Path], Awaitable[bool]],
    ) -> None:
        """announce: called with the version, its difference and where that is; False where it is
        not wanted any more."""
        self._recorder, self._announce = recorder, announce
        self._stop = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def make(self, wanted: Wanted) -> None:
        """Begin to make a difference; one that is still being made for an earlier version is given
        up. Raises what an earlier one has failed by."""
        self.close()
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()
        self._stop = threading.Event()
        self._tasks.add(asyncio.create_task(self._make(wanted, self._stop)))

    def close(self) -> None:
        """Give up what is being made."""
        self._stop.set()

    async def _make(self, wanted: Wanted, stop: threading.Event) -> None:
        begin_s = time.monotonic()
        target = wanted.path.with_suffix(".delta")
        try:
            pieces = await asyncio.to_thread(_write, wanted, target, stop)
        except OSError as error:
            # Not the run's: whole files are there. Mostly there is no more room in memory.
            target.unlink(missing_ok=True)
            self._recorder.count("policy/delta_failed_total")
            structlog.get_logger().warning(
                "no difference of this version", version=wanted.version, why=str(error)
            )
            return
        if pieces is None:
            return
        self._recorder.observe("perf/weight_delta_s", time.monotonic() - begin_s)
        self._recorder.ratio(
            "perf/weight_delta_size_frac", pieces.size_bytes, wanted.chunks.size_bytes
        )
        delta = Delta(wanted.base_version, wanted.base_sha256, pieces)
        if not await self._announce(wanted.version, delta, target):
            target.unlink(missing_ok=True)


def _write(wanted: Wanted, target: Path, stop: threading.Event) -> Pieces | None:
    if not weight_delta.same_layout(wanted.path, wanted.base):
        return None
    return weight_delta.write(
        target,
        of=wanted.path,
        base=wanted.base,
        chunks=wanted.chunks,
        stop=stop,
        threads=max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 4)),
    )
