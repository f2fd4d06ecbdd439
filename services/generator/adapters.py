"""The adapters (LoRA) of one engine: each version is one of its own, under a name that is never
used again, since cached blocks are keyed by it.

A request is bound to the adapter that is current when it begins, and keeps it to its end: vLLM
computes all of it with that one, so every token has this version's label and no block is computed
twice. To end it and go on under the newer one would compute its prefix again; a group's age counts
from its oldest token, so that this would make no group younger. A conversation's next turn is a
new request, with the newest.

An adapter is removed once no request has it and the one served is newer by more than
`max_staleness` versions.
"""

import itertools
import json
import shutil
import time
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from services.common import adapter_files
from services.common.errors import UserError
from services.generator.types import LoadTimes

MAX_SLOTS = 8
"""Adapters that one batch may have at a time. A request of a further one waits for a place; each
takes its size in the engine's memory."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be set up for."""

PERTURBED = 0
"""The label of what is no version: an adapter of the load-path proof is not kept."""


@dataclass(frozen=True)
class AdapterSettings:
    """How an engine serves adapters."""

    config: bytes
    """peft's description of all of them, as JSON."""
    max_staleness: int
    """Versions that a sample may be behind."""

    @property
    def slots(self) -> int:
        """Adapters in a batch: all that may be used, and the next one."""
        return min(self.max_staleness + 2, MAX_SLOTS)

    def arguments(self) -> dict[str, Any]:
        """For vLLM's engine."""
        config = json.loads(self.config)
        names = {name.rpartition(".")[2] for name in config["target_modules"]}
        return {
            "enable_lora": True,
            # No others: with an output head that might be adapted vLLM 0.32 cannot give
            # log-probabilities of prompts, which the canary is made of (on CPUs it dies).
            "lora_target_modules": sorted(names),
            "max_lora_rank": next(rank for rank in RANKS if rank >= config["r"]),
            "max_loras": self.slots,
            "max_cpu_loras": max(self.slots, self.max_staleness + 2),
        }


@dataclass
class Adapter:
    """One that the engine has."""

    request: LoRARequest
    version: int
    users: int = 0
    """Requests that run with it."""


class Adapters:
    """The adapters that an engine has, and the one that new requests get.

    Example: with `max_staleness` 1, once version 5 is served, 4 stays, and 3 for as long as a
    request runs with it.
    """

    def __init__(self, llm: AsyncLLM, settings: AdapterSettings) -> None:
        self._llm, self._settings = llm, settings
        self._held: list[Adapter] = []
        self._numbers = itertools.count(1)
        self._current: Adapter | None = None

    @property
    def held(self) -> list[tuple[int, int]]:
        """Version and running requests of each that the engine has, oldest first."""
        return [(adapter.version, adapter.users) for adapter in self._held]

    @contextmanager
    def used(self) -> Iterator[Adapter | None]:
        """The adapter for a request that begins now, which has it until the end of the block; None
        before the first one is loaded."""
        adapter = self._current
        if adapter is None:
            yield None
            return
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1

    async def load(self, path: Path, version: int) -> LoadTimes:
        """Let new requests have the adapter in this file; those that run keep theirs. Raises what
        vLLM does when it cannot be loaded, UserError where it is the first: then all is as it
        was."""
        number = next(self._numbers)
        folder = path.parent / f"adapter-{number}"
        folder.mkdir()
        # The file may be deleted where it is before the last request with it has ended.
        (folder / adapter_files.WEIGHTS).hardlink_to(path)
        (folder / adapter_files.CONFIG).write_bytes(self._settings.config)
        request = LoRARequest(f"{version}-{number}", number, str(folder))
        begin_s = time.monotonic()
        try:
            await self._llm.add_lora(request)
        except BaseException as error:
            shutil.rmtree(folder)
            if self._current is None and not isinstance(error, EngineDeadError | CancelledError):
                raise UserError(
                    f"trainer.lora.publish: vLLM cannot serve the adapter ({error}); set it to "
                    '"merged"'
                ) from error
            raise
        load_s = time.monotonic() - begin_s
        self._current = Adapter(request, version)
        self._held.append(self._current)
        await self._remove_old()
        # The engine takes no step while it takes an adapter.
        return LoadTimes(pause_s=load_s, load_s=load_s, inflight=0)

    async def _remove_old(self) -> None:
        assert self._current is not None
        newest = self._current.version
        for adapter in [each for each in self._held if each is not self._current]:
            # What a failed load has left has the number of the version that is served.
            unwanted = adapter.version in (PERTURBED, newest)
            too_old = adapter.version < newest - self._settings.max_staleness
            if adapter.users == 0 and (unwanted or too_old):
                self._held.remove(adapter)
                await self._llm.remove_lora(adapter.request.lora_int_id)
                shutil.rmtree(adapter.request.lora_path)
