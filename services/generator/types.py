"""What the engine gives, what a conversation is inside the generator, and its form on the wire.

Imports no vLLM, so that all but engine.py and service.py can be used and tested without it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from headrace.v1 import rollout_pb2 as wire

Message = dict[str, str]
"""{"role": ..., "content": ...}."""


class EngineDead(RuntimeError):
    """The engine's processes have ended. It cannot be restarted in place: the process exits and is
    started anew."""


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) were sampled by this policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Generated:
    """What the engine sampled for one prompt."""

    token_ids: list[int]
    """Generated tokens, the end token included where one was sampled."""
    logprobs: "np.ndarray[Any, np.dtype[np.float32]]"
    """Log-probability of each at sampling time, temperature included."""
    spans: tuple[Span, ...]
    """Versions over the generated tokens, in order, without gaps."""
    finish_reason: str
    """\"stop\" or \"length\"."""
    duration_s: float


@dataclass(frozen=True)
class LoadTimes:
    """Where the time of a weight load went, in seconds."""

    pause_s: float
    """Engine paused, the load included."""
    load_s: float
    inflight: int
    """Requests that were running, whose prefixes are recomputed."""


@dataclass(frozen=True)
class Turn:
    """One engine call."""

    num_prompt_tokens: int
    num_generated_tokens: int
    text: str
    finish_reason: str
    duration_s: float


@dataclass(frozen=True)
class Sequence:
    """Tokens to train on; all arrays have the same length."""

    token_ids: "np.ndarray[Any, Any]"
    """uint32."""
    trained_mask: "np.ndarray[Any, Any]"
    """uint8; the first is 0."""
    logprobs: "np.ndarray[Any, Any]"
    """float32; 0 where the mask is 0."""
    spans: tuple[Span, ...]
    """Versions over trained tokens, in positions of the sequence."""


@dataclass(frozen=True)
class Conversation:
    """One finished conversation."""

    completion: tuple[Message, ...]
    turns: tuple[Turn, ...]
    sequences: tuple[Sequence, ...]
    end_reason: "wire.EndReason.ValueType"
    duration_s: float

    @property
    def generated_tokens(self) -> int:
        """Tokens that the engine sampled."""
        return sum(turn.num_generated_tokens for turn in self.turns)

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest policy version over the trained tokens."""
        versions = [span.version for sequence in self.sequences for span in sequence.spans]
        return min(versions), max(versions)

    def to_wire(self, rollout_id: str) -> wire.Rollout:
        """The message that scorers read."""
        return wire.Rollout(
            rollout_id=rollout_id,
            completion=[wire.ChatMessage(**message) for message in self.completion],
            turns=[
                wire.Turn(
                    num_prompt_tokens=turn.num_prompt_tokens,
                    num_generated_tokens=turn.num_generated_tokens,
                    text=turn.text,
                    finish_reason=turn.finish_reason,
                    duration_s=turn.duration_s,
                )
                for turn in self.turns
            ],
            sequences=[
                wire.Sequence(
                    token_ids=sequence.token_ids.astype("<u4").tobytes(),
                    trained_mask=sequence.trained_mask.astype("u1").tobytes(),
                    logprobs=sequence.logprobs.astype("<f4").tobytes(),
                    spans=[
                        wire.VersionSpan(version=s.version, start=s.start, end=s.end)
                        for s in sequence.spans
                    ],
                )
                for sequence in self.sequences
            ],
            end_reason=self.end_reason,
            duration_s=self.duration_s,
        )
