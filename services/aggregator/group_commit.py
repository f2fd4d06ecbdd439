"""Group commit: what arrives while one transaction is written goes into the next one together.

A commit waits for the disk, whatever it holds: batches of many producers share it. A batch that
makes a transaction fail takes no others along: each of them is then tried again alone. Batches are
decoded by the writer's thread, too: the event loop would only take turns with it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.v1 import metrics_pb2 as wire

from services.aggregator.batch import BadBatch, Batch, decode
from services.aggregator.ingest import Ingest, Receipt

DELTAS_AT_ONCE = 20_000
"""About how many one transaction takes."""

Outcome = Receipt | Exception


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: wire.PushDeltasRequest
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

    async def take(self, request: wire.PushDeltasRequest, *, arrived_s: float) -> Receipt:
        """What became of a batch, once it is committed. Raises BadBatch, and SQLAlchemyError when
        it could not be committed; then nothing of it was.
        """
        outcome = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(request, arrived_s, outcome))
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
        group, num_deltas = [self._waiting[0]], 0
        for each in self._waiting[1:]:
            num_deltas += len(group[-1].request.deltas)
            if num_deltas >= DELTAS_AT_ONCE:
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
    outcomes: list[Outcome | None] = []
    batches: list[tuple[Batch, float]] = []
    for each in group:
        try:
            batches.append((decode(each.request), each.arrived_s))
            outcomes.append(None)
        except BadBatch as error:
            outcomes.append(error)
    try:
        receipts = iter(ingest.take_all(batches) if batches else ())
    except Exception as error:
        if len(batches) == 1:
            return [error if outcome is None else outcome for outcome in outcomes]
        # Decoded again: what was taken before is used up.
        return [
            _commit(ingest, [each])[0] if outcome is None else outcome
            for each, outcome in zip(group, outcomes, strict=True)
        ]
    return [next(receipts) if outcome is None else outcome for outcome in outcomes]
