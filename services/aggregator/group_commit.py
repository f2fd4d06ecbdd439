"""Group commit: what arrives while one transaction is written goes into the next one together.

A commit waits for the disk, whatever it holds: batches of many producers share it. A batch that
makes a transaction fail takes no others along: each of them is then tried again alone. Batches are
decoded as they arrive: the writer's thread is in the database then, without the interpreter.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.v1 import metrics_pb2 as wire

from services.aggregator.batch import Batch, decode
from services.aggregator.ingest import Ingest, Receipt

PARTIALS_AT_ONCE = 10_000
"""About how many one transaction takes."""

Outcome = Receipt | Exception


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: wire.PushDeltasRequest
    batch: Batch
    arrived_s: float
    outcome: "asyncio.Future[Receipt]"


class GroupCommit:
    """Takes batches from the event loop; `write` runs work in the writer's thread."""

    def __init__(
        self, ingest: Ingest, *, write: Callable[[Callable[[], Any]], Awaitable[Any]]
    ) -> None:
        self._ingest = ingest
        self._write = write
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether batches wait for the writer, or are written."""
        return self._writing is not None

    async def take(self, request: wire.PushDeltasRequest, *, arrived_s: float) -> Receipt:
        """What became of a batch, once it is committed. Raises BadBatch, and SQLAlchemyError when
        it could not be committed; then nothing of it was.
        """
        batch = decode(request)
        outcome = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, batch, arrived_s, outcome))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all(), name="group commit")
        receipt: Receipt = await outcome
        return receipt

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                await self._write_some()
        finally:
            self._writing = None

    async def _write_some(self) -> None:
        group, num_partials = [self._waiting[0]], 0
        for each in self._waiting[1:]:
            num_partials += group[-1].batch.num_partials
            if num_partials >= PARTIALS_AT_ONCE:
                break
            group.append(each)
        del self._waiting[: len(group)]
        outcomes: Sequence[Outcome]
        try:
            outcomes = await self._write(partial(_commit, self._ingest, group))
        except Exception as error:
            outcomes = [error] * len(group)
        for each, outcome in zip(group, outcomes, strict=True):
            if each.outcome.done():  # the caller has gone meanwhile
                continue
            if isinstance(outcome, Exception):
                each.outcome.set_exception(outcome)
            else:
                each.outcome.set_result(outcome)


def _commit(ingest: Ingest, group: Sequence[_Waiting]) -> list[Outcome]:
    """In the writer's thread."""
    try:
        return list(ingest.take_all([(each.batch, each.arrived_s) for each in group]))
    except Exception as error:
        if len(group) == 1:
            return [error]
    return [_commit_alone(ingest, each) for each in group]


def _commit_alone(ingest: Ingest, each: _Waiting) -> Outcome:
    try:
        # Decoded again: what was taken before is used up.
        return ingest.take(decode(each.request), now_s=each.arrived_s)
    except Exception as error:
        return error
