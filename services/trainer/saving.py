"""Checkpoints while the run goes on: the loop is held for a copy to memory, a thread
writes it, on every rank.

What was measured up to a checkpoint is with the aggregator before the checkpoint is there: its
steps are made and measured no second time, so what a killed trainer had not sent would be a gap.

A checkpoint that cannot be written is no end: the run goes on, and says that it would go on from
the one before.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from services.common.lifecycle import Lifecycle
from services.common.recorder import Recorder
from services.trainer.book import Book
from services.trainer.checkpoint import CheckpointFailed, Checkpoints, Files
from services.trainer.journal import Moment
from services.trainer.learner import Learner
from services.trainer.torch_thread import TorchThread

MEASURED_WITHIN_S = 2.0
"""Longest wait of a checkpoint for an aggregator that is slow; for one that is away there is
none."""


class Saver:
    """Writes the checkpoints of one attempt, one at a time."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        book: Book,
        learner: Learner,
        torch: TorchThread,
        lifecycle: Lifecycle,
        recorder: Recorder,
        *,
        last: Moment | None,
    ) -> None:
        self._checkpoints, self._book, self._learner = checkpoints, book, learner
        self._torch, self._lifecycle, self._recorder = torch, lifecycle, recorder
        self._writing: asyncio.Task[None] | None = None
        self.last = last
        """The newest that is on disk."""

    async def save(self, moment: Moment, state: Callable[[], Mapping[str, Any]]) -> float:
        """Take a checkpoint between two steps; the seconds that the loop was held.

        `state` is asked at the very moment from which the journal counts. Raises Fenced.
        """
        begin_s = time.monotonic()
        await self.finish()
        files = await self._torch(self._learner.snapshot)
        try:
            self._book.journal.rotate(moment)
        except OSError as error:
            self._failed(moment, f"the journal cannot be begun: {error.strerror}")
            return time.monotonic() - begin_s
        # No await from the journal's new file to here: nothing may happen between them.
        said = self._book.said
        content = {**state(), "said": [record.line() for record in said]}
        self._writing = asyncio.create_task(self._write(moment, content, files, len(said)))
        return time.monotonic() - begin_s

    async def finish(self) -> None:
        """Wait for the one that is being written. Raises Fenced."""
        if self._writing is not None:
            # A cancelled waiter leaves it alone: the thread that writes cannot be stopped anyway.
            await asyncio.shield(self._writing)
            self._writing = None

    async def _write(
        self, moment: Moment, state: Mapping[str, Any], files: Files, num_said: int
    ) -> None:
        begin_s = time.monotonic()
        await asyncio.to_thread(self._recorder.flush, MEASURED_WITHIN_S)
        try:
            await asyncio.to_thread(self._checkpoints.write, moment, state, files)
        except CheckpointFailed as error:
            self._failed(moment, str(error))
            return
        self._book.saved(num_said)
        self.last = moment
        self._lifecycle.details["checkpoint"] = f"step {moment[1]}"
        structlog.get_logger().info(
            "checkpoint written", step=moment[1], seconds=round(time.monotonic() - begin_s, 2)
        )

    def _failed(self, moment: Moment, why: str) -> None:
        before = "no checkpoint" if self.last is None else f"step {self.last[1]}"
        self._lifecycle.details["checkpoint"] = f"{before}; failed at step {moment[1]}"
        structlog.get_logger().error(
            "CHECKPOINT FAILED, the run goes on", why=why, would_resume_from=before
        )
