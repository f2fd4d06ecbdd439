"""The other ranks as processes of the trainer, or of another node: started, watched, ended.

A rank that ends before it is told to ends the trainer: the optimizer's state is in pieces on all of
them. Whoever started the trainer starts it again, as a whole, from the last checkpoint.

waits_for: the end of a rank, or the loss of a node. unblocked_by: the kernel, `end()`.
"""

import asyncio
import contextlib
import os
import sys
from asyncio import FIRST_COMPLETED
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import torch

from services.common.background import guarded
from services.common.config import Recipe
from services.common.errors import Fenced, UserError
from services.common.worker_process import to_frame
from services.trainer.meeting import Meeting
from services.trainer.rank_ended import RankEnded, RankProcessEnded
from services.trainer.ranks import Place, open_place

MODULE = "services.trainer.rank"

END_WITHIN_S = 5.0
"""What a rank that is told to end may take; then it is killed."""

SAID_WITHIN_S = 5.0
"""How long after a failure it is asked whether a rank has ended."""

T = TypeVar("T")


class RankProcesses:
    """Ranks on this machine other than the first of all; none when that one is alone."""

    def __init__(
        self,
        place: Place | None,
        processes: Mapping[int, asyncio.subprocess.Process],
        *,
        node: int = 0,
        meeting: Meeting | None = None,
    ) -> None:
        self.place = place
        """Rank 0's own; on other nodes that of their first rank."""
        self._processes = processes
        self._node, self._meeting = node, meeting

    @classmethod
    async def start(
        cls, recipe: Recipe, place: Place | None = None, *, meeting: Meeting | None = None
    ) -> "RankProcesses":
        """Start those on rank 0's machine; each joins once it has loaded the model.

        place: what `meeting` gave, where there are several nodes.
        """
        if place is None:
            if recipe.trainer.ranks == 1:
                return cls(None, {})
            place = open_place(recipe.trainer.ranks)
        numbers = range(1, place.local_size)
        return cls(place, await _started(recipe, place, numbers), meeting=meeting)

    @classmethod
    async def host(cls, recipe: Recipe, place: Place, node: int) -> "RankProcesses":
        """Start those on another node, whose first one has this place."""
        numbers = range(place.rank, place.rank + place.local_size)
        return cls(place, await _started(recipe, place, numbers), node=node)

    @property
    def numbers(self) -> str:
        """Of the ranks, for people: "4 to 7"."""
        first, last = min(self._processes), max(self._processes)
        return str(first) if first == last else f"{first} to {last}"

    async def beside(self, body: Coroutine[Any, Any, T]) -> T:
        """The result of `body`, as long as all ranks run. Raises RankEnded once one has ended, or a
        node is lost; and instead of what `body` raises when that is why: whoever waits for a rank
        that is gone learns of a broken connection first."""
        watching = [self._watch()]
        if self._meeting is not None:
            watching.append(self._meeting.watch())
        try:
            return await guarded(body, *watching)
        except (UserError, Fenced, RankEnded):
            raise
        except Exception as error:
            if (ended := await self._ended_soon()) is not None:
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

    async def _ended_soon(self) -> RankEnded | None:
        """What is wrong with the other ranks, as far as it shows within SAID_WITHIN_S."""
        waits = self._waits()
        if self._meeting is not None:
            waits.append(asyncio.create_task(self._meeting.watch()))
        if not waits:
            return None
        done, pending = await asyncio.wait(
            waits, timeout=SAID_WITHIN_S, return_when=FIRST_COMPLETED
        )
        for each in pending:
            each.cancel()
        for each in done:
            each.exception()  # asked for: it is raised below
        return self._ended()

    def _waits(self) -> "list[asyncio.Task[Any]]":
        return [asyncio.create_task(process.wait()) for process in self._processes.values()]

    def _ended(self) -> RankEnded | None:
        """What to raise for a rank that has ended; None while all run."""
        for rank, process in self._processes.items():
            if process.returncode is not None:
                return RankProcessEnded(rank, process.returncode, node=self._node)
        return None if self._meeting is None else self._meeting.lost()

    async def end(self) -> None:
        """Tell those on this machine to end, and wait until they have."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes.values():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_WITHIN_S)
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _started(
    recipe: Recipe, place: Place, numbers: Iterable[int]
) -> dict[int, asyncio.subprocess.Process]:
    # Threads of all ranks share the cores (rank_learner.py divides what it finds).
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    frame = to_frame(recipe.model_dump(exclude_none=True))
    processes = {}
    for rank in numbers:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            stdin=asyncio.subprocess.PIPE,
            # Both of its outputs are the trainer's log.
            stdout=2,
            env={**os.environ, **threads, **place.environment(rank)},
        )
        assert process.stdin is not None
        process.stdin.write(frame)
        processes[rank] = process
    return processes
