"""An engine that is fast and deterministic, in place of vLLM: the trainer's tiny model itself,
behind everything else that a generator is.

What it samples is a function of the seed alone, so a group that is generated again is the same.
What it says of that is true: log-probabilities under the weights that it has loaded, and under both
where they were replaced in the middle of a completion. So the load-path proof and the canary are
those of the real trainer.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.generator.types import Generated, GenerateFailed, LoadTimes, Span
from tests.chaos.words import FAILS, KILLS_GENERATOR, NUM_PLAIN, token_of
from tests.services.trainer.numerics import sequence_logprobs

SPREAD = 0.5
"""Sigma of the lognormal durations."""


class TinyEngine:
    """Completions of random words; one lasts about as many seconds as the file `pace` says."""

    def __init__(self, folder: Path, *, pace: Path) -> None:
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        self._model.eval()
        self._pace = pace
        self._version = 0
        self._running = asyncio.Event()
        self._running.set()
        self._inflight = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        sampled: Callable[[int], None],
        seed: int | None = None,
    ) -> Generated:
        """Sample one completion; a prompt may say that it fails, or that the process dies of it."""
        await self._running.wait()
        if token_of(KILLS_GENERATOR) in prompt_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if token_of(FAILS) in prompt_ids:
            sampled(0)
            raise GenerateFailed("the prompt says so")
        begin_s = time.monotonic()
        draw = random.Random(seed)
        ids = self._sample(draw, prompt_ids, max_tokens)
        half = len(ids) // 2
        self._inflight += 1
        try:
            first, before = self._version, self._logprobs(prompt_ids, ids)
            await asyncio.sleep(self._duration_s(draw))
            await self._running.wait()
            second, after = self._version, self._logprobs(prompt_ids, ids)
        finally:
            self._inflight -= 1
            sampled(len(ids))
        spans = (Span(first, 0, half), Span(second, half, len(ids)))
        return Generated(
            token_ids=ids,
            logprobs=np.concatenate([before[:half], after[half:]]),
            spans=(Span(first, 0, len(ids)),) if first == second else spans,
            finish_reason="length" if len(ids) == max_tokens else "stop",
            duration_s=time.monotonic() - begin_s,
        )

    async def load(self, path: Path, version: int) -> LoadTimes:
        """Replace the weights by those of a file, all of them."""
        begin_s = time.monotonic()
        await self.pause()
        self._model.load_state_dict(load_file(path))
        self._version = version
        self._running.set()
        seconds = time.monotonic() - begin_s
        return LoadTimes(pause_s=seconds, load_s=seconds, inflight=self._inflight)

    async def pause(self) -> None:
        """Let nothing run until the next load."""
        self._running.clear()

    async def row_logprobs(
        self, rows: "np.ndarray[Any, Any]"
    ) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Log-probabilities of the canary's rows."""
        return sequence_logprobs(self._model, rows)

    async def check(self, timeout_s: float) -> None:
        """It answers as long as its process lives."""

    def shutdown(self) -> None:
        """It has no processes of its own."""

    def _logprobs(
        self, prompt_ids: Sequence[int], ids: Sequence[int]
    ) -> "np.ndarray[Any, np.dtype[np.float32]]":
        row = np.array([[*prompt_ids, *ids]])
        return sequence_logprobs(self._model, row)[0, len(prompt_ids) - 1 :]

    def _sample(self, draw: random.Random, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """What a completion says."""
        return [draw.randrange(NUM_PLAIN) for _ in range(draw.randint(2, max_tokens))]

    def _duration_s(self, draw: random.Random) -> float:
        """How long a completion lasts."""
        mean_s = float(self._pace.read_text())
        return mean_s * draw.lognormvariate(-(SPREAD**2) / 2, SPREAD)
