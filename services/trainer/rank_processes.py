"""The other ranks as processes of the trainer: started, watched, ended.

A rank that ends before it is told to ends the trainer: the optimizer's state is in pieces on all of
them. Whoever started the trainer starts it again, as a whole, from the last checkpoint.

waits_for: the end of a rank. unblocked_by: the kernel, `end()`.
"""

import asyncio
import contextlib
import os
import sys
from asyncio import FIRST_COMPLETED
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from services.common.background import guarded
from services.common.config import Recipe
from services.common.errors import Fenced, UserError
from services.common.worker_process import to_frame
from services.trainer.ranks import Place, open_place

MODULE = "services.trainer.rank"

END_WITHIN_S = 5.0
"""What a rank that is told to end may take; then it is killed."""

SAID_WITHIN_S = 5.0
"""How long after a failure it is asked whether a rank has ended."""

T = TypeVar("T")


class RankEnded(RuntimeError):
    """A rank is gone, and with it a part of the policy."""

    def __init__(self, rank: int, status: int) -> None:
        super().__init__(
            f"rank {rank} ended with status {status}; the ranks hold the policy together, so the "
            "trainer ends, to be started again from its last checkpoint; what the rank said is "
            "above in this log"
        )
        self.status = 2 if status == 2 else 1
        """The trainer's: 2 for a mistake of the user's, which the rank has said."""


class RankProcesses:
    """Ranks 1 to n - 1 on this machine; none when n is 1."""

    def __init__(self, place: Place | None, processes: list[asyncio.subprocess.Process]) -> None:
        self.place = place
        """Rank 0's own."""
        self._processes = processes

    @classmethod
    async def start(cls, recipe: Recipe) -> "RankProcesses":
        """Start them; each joins once it has loaded the model."""
        size = recipe.trainer.ranks
        if size == 1:
            return cls(None, [])
        place = open_place(size)
        # Threads of all ranks share the cores (rank_learner.py divides what it finds).
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        frame = to_frame(recipe.model_dump(exclude_none=True))
        processes: list[asyncio.subprocess.Process] = []
        for rank in range(1, size):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", MODULE),
                stdin=asyncio.subprocess.PIPE,
                # Both of its outputs are the trainer's log.
                stdout=2,
                env={**os.environ, **threads, **place.environment(rank)},
            )
            assert process.stdin is not None
            process.stdin.write(frame)
            processes.append(process)
        return cls(place, processes)

    async def beside(self, body: Coroutine[Any, Any, T]) -> T:
        """The result of `body`, as long as all ranks run. Raises RankEnded once one has ended; and
        instead of what `body` raises when that is why: whoever waits for a rank that is gone learns
        of a broken connection first."""
        try:
            return await guarded(body, self._watch())
        except (UserError, Fenced, RankEnded):
            raise
        except Exception as error:
            if self._processes:
                waits = self._waits()
                await asyncio.wait(waits, timeout=SAID_WITHIN_S, return_when=FIRST_COMPLETED)
            if (ended := self._ended()) is not None:
                raise ended from error
            raise

    async def _watch(self) -> None:
        """Wait for ever; raises RankEnded once one of them has ended."""
        if not self._processes:
            await asyncio.get_running_loop().create_future()
        await asyncio.wait(self._waits(), return_when=FIRST_COMPLETED)
        ended = self._ended()
        assert ended is not None
        raise ended

    def _waits(self) -> "list[asyncio.Task[int]]":
        return [asyncio.create_task(process.wait()) for process in self._processes]

    def _ended(self) -> RankEnded | None:
        """What to raise for a rank that has ended; None while all run."""
        for rank, process in enumerate(self._processes, start=1):
            if process.returncode is not None:
                return RankEnded(rank, process.returncode)
        return None

    async def end(self) -> None:
        """Tell them to end, and wait until they have."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_WITHIN_S)
            if process.returncode is None:
                process.kill()
                await process.wait()
