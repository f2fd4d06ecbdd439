"""Replaces the weights of vLLM's engine under running requests: from a file, or by what is
broadcast to a group that its workers are in.

When the engine dies meanwhile, vLLM leaves calls to its workers without an answer, or answers with
whatever failed. Here they end with EngineDead, within LOOK_S of its death.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.generator.types import EngineDead, LoadTimes

LOOK_S = 0.2
"""How often it is seen, while its workers are called, whether the engine has died."""

Begin = Callable[[], Awaitable[dict[str, Any] | None]]
"""Called when the engine is paused: what comes, as vLLM's NCCLWeightTransferUpdateInfo, or None
when nothing comes."""

T = TypeVar("T")


class EngineWeights:
    """The weights of an engine whose versions are whole weights. Its backend for them is
    weight_backend.py."""

    def __init__(self, llm: AsyncLLM, *, num_workers: int, running: Callable[[], int]) -> None:
        """num_workers: each with a part of the weights. running: requests inside the engine."""
        self._llm, self.num_workers, self._running = llm, num_workers, running
        self._lock = asyncio.Lock()

    async def load(self, path: Path, version: int) -> LoadTimes:
        """See Engine.load."""
        return await self._alone(self._load(path, version))

    async def pause(self) -> None:
        """Let nothing run until the next load has succeeded; requests are kept."""
        await self._alone(self._llm.pause_generation(mode="keep", clear_cache=True))

    @property
    def joins_groups(self) -> bool:
        """Whether its workers can be in a transfer group, which is for GPUs."""
        return bool(current_platform.is_cuda())

    async def join_group(self, info: dict[str, Any], *, timeout_s: float) -> None:
        """Connect the workers to a group, with vLLM's NCCLWeightTransferInitInfo, while nothing
        runs: with several workers, calls of two communicators could wait for each other. Raises
        where it fails or takes longer than `timeout_s`."""
        await self._alone(self._join({"group": info, "timeout_s": timeout_s}))

    async def leave_group(self) -> None:
        """End the workers' membership."""
        await self._alone(self._llm.shutdown_weight_transfer_engine())

    async def receive(self, version: int, *, begin: Begin) -> LoadTimes | None:
        """Replace the weights, as `load` does, by those that are broadcast to the group after
        `begin`. When nothing comes all is as before, and so is the result None."""
        return await self._alone(self._receive(version, begin))

    async def _load(self, path: Path, version: int) -> LoadTimes:
        begin_s, inflight = time.monotonic(), self._running()
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        load_s = await self._update({"path": str(path)}, version)
        return LoadTimes(pause_s=time.monotonic() - begin_s, load_s=load_s, inflight=inflight)

    async def _receive(self, version: int, begin: Begin) -> LoadTimes | None:
        begin_s, inflight = time.monotonic(), self._running()
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        tensors = await begin()
        if tensors is None:
            await self._llm.resume_generation()
            return None
        load_s = await self._update({"tensors": tensors}, version)
        return LoadTimes(pause_s=time.monotonic() - begin_s, load_s=load_s, inflight=inflight)

    async def _update(self, what: dict[str, Any], version: int) -> float:
        """Load, label, resume; the seconds that the load took."""
        begin_s = time.monotonic()
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(what))
        await self._llm.finish_weight_update(weight_version=str(version))
        load_s = time.monotonic() - begin_s
        await self._llm.resume_generation()
        return load_s

    async def _join(self, joining: dict[str, Any]) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        try:
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(joining))
        finally:
            await self._llm.resume_generation()

    async def _alone(self, calls: Coroutine[Any, Any, T]) -> T:
        """The result of calls, one such series at a time. Raises EngineDead when the engine has
        died, or dies meanwhile."""
        async with self._lock:
            with death():
                calling = asyncio.create_task(calls)
                try:
                    while not calling.done():
                        await asyncio.wait({calling}, timeout=LOOK_S)
                        if not calling.done() and self._llm.errored:
                            raise EngineDeadError()
                    return calling.result()
                except EngineDeadError:
                    raise
                except Exception as error:
                    # A worker's death fails the call, and ends the engine in the next moment.
                    await asyncio.sleep(LOOK_S)
                    if self._llm.errored:
                        raise EngineDeadError() from error
                    raise
                finally:
                    calling.cancel()


@contextmanager
def death() -> Iterator[None]:
    """Raise EngineDead where vLLM says so in its own words."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineDead("vLLM's engine has died; its own message is above in this log") from error
