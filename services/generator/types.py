"""What the engine gives, what a conversation is inside the generator, and its form on the wire.

Imports no vLLM, so that all but engine.py and service.py can be used and tested without it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from headrace.v1 import rollout_pb2 as wire

Message = dict[str, Any]
"""As chat templates take it: `role` and `content`; an assistant's may have `tool_calls` (`id`,
`type`, `function` with `name` and `arguments`) and `reasoning_content`, a tool's `tool_call_id` and
`name`."""


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
class ToolCall:
    """One block in which the model asked for a tool, or tried to."""

    text: str
    """As the model wrote it."""
    name: str | None = None
    """The tool; None where the block does not say."""
    arguments: dict[str, Any] | None = None
    """None where they are no JSON object: then `mistake` says so."""
    mistake: str | None = None
    """Why the block is no call, in words for the model; None for a well-formed one."""


@dataclass(frozen=True)
class Parsed:
    """What a turn's text says."""

    content: str
    """What the assistant's message holds when the template renders it."""
    calls: tuple[ToolCall, ...] = ()
    """In the order in which they were written."""
    reasoning: str | None = None
    """What a reasoning parser took out of the text."""
    calls_in_content: bool = True
    """The calls are still part of `content`, as the model wrote them, so the template is not given
    them a second time."""


@dataclass(frozen=True)
class CallResult:
    """What became of one call."""

    call: ToolCall
    text: str
    """What the model is told."""
    failed: bool
    declared: bool
    """A tool or a method of that name exists."""
    by_environment: bool
    """It is a method of the conversation's environment."""
    begin_s: float
    """Monotonic."""
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds that the call took, its wait for a worker included."""
        return self.end_s - self.begin_s


class GenerateFailed(RuntimeError):
    """The engine failed at one request and lives on: the same request may be tried again."""


class TemplateFailed(RuntimeError):
    """The model's chat template cannot render the messages."""


class PromptTooLong(RuntimeError):
    """The prompt leaves no room for a completion."""


class ToolFailed(RuntimeError):
    """A call gave no result; the message is for the model."""


class EnvironmentFailed(RuntimeError):
    """An environment cannot go on: the conversation in it has failed."""


@dataclass(frozen=True)
class SampledTurn:
    """The tokens of one engine call: what reconcile.py makes sequences of."""

    prompt_ids: tuple[int, ...]
    """What the engine saw; at least one token."""
    token_ids: tuple[int, ...]
    """What it sampled."""
    logprobs: "np.ndarray[Any, np.dtype[np.float32]]"
    """Of each sampled token."""
    spans: tuple[Span, ...]
    """Versions over the sampled tokens, in order, without gaps."""


@dataclass(frozen=True)
class Transitions:
    """How a conversation's turns became sequences: counts over its turn-to-turn transitions."""

    clean: int = 0
    realigned: int = 0
    forked: int = 0
    demoted_tokens: int = 0
    """Sampled tokens that realignment made context."""
    drift_tokens: int = 0
    """Held tokens beyond the common prefix with the new prompt, added up."""
    max_drift_tokens: int = 0
    untrained_sequences: int = 0
    """Sequences without a trained token, which are left out."""

    @property
    def total(self) -> int:
        """All transitions: one fewer than turns."""
        return self.clean + self.realigned + self.forked


@dataclass(frozen=True)
class Turn:
    """One engine call and the calls that it asked for."""

    num_prompt_tokens: int
    num_generated_tokens: int
    text: str
    """As sampled, special tokens included, without the end token."""
    finish_reason: str
    duration_s: float
    calls_asked: int = 0
    """Calls in its text, malformed ones included; those of a last turn may not have been run."""
    calls: tuple[CallResult, ...] = ()
    """What became of those that were run, in order."""
    reprefill_tokens: int = 0
    """Tokens that the engine computed again because weights were switched during the call."""
    begin_s: float = 0.0
    """When its engine call began, from the begin of the conversation's first."""


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
    transitions: Transitions = Transitions()
    prompt: tuple[Message, ...] | None = None
    """Set where an environment's observation made it differ from the request's."""
    equipped: bool = False
    """It could use tools or an environment."""
    environment: str = ""
    environment_reward: float | None = None
    reset_s: float | None = None
    reward_s: float | None = None
    tool_s: float = 0.0
    """Of duration_s: in tools, calls at the same time counted once."""
    env_s: float = 0.0
    """Of duration_s: in the environment."""

    @property
    def generated_tokens(self) -> int:
        """Tokens that the engine sampled."""
        return sum([turn.num_generated_tokens for turn in self.turns])

    @property
    def asking(self) -> bool:
        """It was ended while the model still asked for tools, or by its wall time."""
        if self.end_reason == wire.END_REASON_TIME:
            return True
        return self.end_reason != wire.END_REASON_STOP and bool(self.turns[-1].calls_asked)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version over the trained tokens; None where none is trained."""
        versions = [span.version for sequence in self.sequences for span in sequence.spans]
        return (min(versions), max(versions)) if versions else None
