"""A stand-in for the engine, whose answers a test decides, and what else several tests need."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from headrace.v1 import rollout_pb2 as wire
from safetensors.numpy import load_file

from services.common.config import Recipe
from services.common.config import Recorder as Settings
from services.common.partials import Count, Observation
from services.common.recorder import Recorder
from services.generator.types import Generated, LoadTimes, Span

Measured = float | tuple[float, float]
"""A count's sum; (n, sum) of an observation; (numerator, denominator) of a ratio."""


def generated(
    token_ids: Sequence[int] = (7, 8),
    *,
    versions: Sequence[int] = (3,),
    finish_reason: str = "stop",
) -> Generated:
    """A completion; token i has log-probability -(i + 1) / 8, and the last of `versions` made all
    tokens that are left."""
    num = len(token_ids)
    starts = range(len(versions))
    ends = [*starts[1:], num]
    return Generated(
        token_ids=list(token_ids),
        logprobs=np.arange(-1, -num - 1, -1, dtype=np.float32) / np.float32(8),
        spans=tuple(Span(v, s, e) for v, s, e in zip(versions, starts, ends, strict=True)),
        finish_reason=finish_reason,
        duration_s=0.25,
    )


Answer = Callable[[int], Awaitable[Generated]]
"""From the number of the call (0, 1, ...) to what it gives."""


async def at_once(call: int) -> Generated:
    """Two tokens of version 1."""
    return generated(versions=(1,))


class FakeEngine:
    """Answers as it is told; its weights are one matrix `w` [rows, tokens - 1] from a file, which
    are the log-probabilities that it computes for the canary."""

    def __init__(self, answer: Answer = at_once) -> None:
        self.answer = answer
        self.calls: list[dict[str, Any]] = []
        self.loads: list[tuple[str, int]] = []
        self.failing_loads = 0
        """So many of the next loads raise."""
        self.off = 0.0
        """Added to all log-probabilities: weights that are not those of the file."""
        self.stale = False
        """Loads report success and change nothing."""
        self.paused = False
        self.ended = False
        self._w: np.ndarray[Any, Any] = np.zeros((1, 1), np.float32)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
    ) -> Generated:
        number = len(self.calls)
        self.calls.append(
            {
                "prompt_ids": list(prompt_ids),
                "temperature": temperature,
                "max_tokens": max_tokens,
                "stop_token_ids": tuple(stop_token_ids),
                "seed": seed,
            }
        )
        return await self.answer(number)

    async def load(self, path: Path, version: int) -> LoadTimes:
        self.paused = True
        self.loads.append((path.name, version))
        if self.failing_loads:
            self.failing_loads -= 1
            raise ValueError("1 parameters were not written: w")
        weights = await asyncio.to_thread(load_file, path)
        if not self.stale or self._w.shape != weights["w"].shape:
            self._w = weights["w"]
        self.paused = False
        return LoadTimes(pause_s=0.5, load_s=0.25, inflight=0)

    async def pause(self) -> None:
        self.paused = True

    async def row_logprobs(
        self, rows: "np.ndarray[Any, Any]"
    ) -> "np.ndarray[Any, np.dtype[np.float32]]":
        assert not self.paused
        assert rows.shape[0] == self._w.shape[0]
        return (self._w + np.float32(self.off)).astype(np.float32)

    async def check(self, timeout_s: float) -> None:
        assert not self.ended

    def shutdown(self) -> None:
        self.ended = True


def recipe_of(**sections: dict[str, Any]) -> Recipe:
    """A small recipe: groups of four, contexts of 64 tokens."""
    tree: dict[str, Any] = {
        "run": "r",
        "data": {"file": "prompts.jsonl"},
        "trainer": {"max_steps": 1, "groups_per_step": 2},
        "generation": {"num_generations": 4, "max_completion_tokens": 8},
        "generator": {"max_inflight": 8, "max_model_len": 64},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Recipe.model_validate(tree)


def request_of(
    group_id: str = "0.0.1.1", *, content: str = "1 + 1 =", num: int = 4, max_tokens: int = 8
) -> wire.RolloutRequest:
    """A request for a group."""
    return wire.RolloutRequest(
        group_id=group_id,
        messages=[wire.ChatMessage(role="user", content=content)],
        sampling=wire.Sampling(
            num_generations=num, temperature=0.5, max_completion_tokens=max_tokens
        ),
    )


def recorder() -> Recorder:
    """One that keeps what it measures."""
    return Recorder(run="r", producer="g", service="generator", settings=Settings(), channel=None)


def values(measured: Recorder) -> dict[str, Measured]:
    """What it has measured, by key."""
    found: dict[str, Measured] = {}
    for (key, _, _), partial in measured.snapshot().items():
        if isinstance(partial, Count):
            found[key] = partial.sum
        elif isinstance(partial, Observation):
            found[key] = (partial.n, partial.sum)
        else:
            found[key] = (partial.numerator, partial.denominator)
    return found
