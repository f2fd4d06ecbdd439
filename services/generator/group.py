"""One request to one group of rollouts: all conversations of a prompt, side by side."""

import asyncio
import functools
import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from headrace.v1 import rollout_pb2

from services.common.recorder import Recorder
from services.generator import measure, wire
from services.generator.conversation import Ask, Setting, converse
from services.generator.environments import EnvironmentKind
from services.generator.slots import Slots
from services.generator.types import (
    Conversation,
    EngineDead,
    EnvironmentFailed,
    Message,
    PromptTooLong,
    TemplateFailed,
)

MIN_GROUP = 2
"""Fewer finished conversations: no relative advantage, so the group is dropped as `failed`."""

COMPLAIN_EVERY_S = 60.0
"""Failures of one reason are logged once in so long, with the number of those between."""

REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (TimeoutError, "timeout"),
    (PromptTooLong, "prompt_too_long"),
    (EnvironmentFailed, "environment"),
    (TemplateFailed, "template"),
)
"""Why a conversation has failed, as metrics spell it; anything else is `error`."""


@dataclass(frozen=True)
class Group:
    """The finished conversations of a prompt, by generation number, and the failures by reason."""

    conversations: dict[int, Conversation]
    failed: dict[str, int]
    why: dict[str, str] = field(default_factory=dict, compare=False)
    """Of each reason the first failure, in words."""

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version over all trained tokens; None where none is trained."""
        versions = [c.versions for c in self.conversations.values() if c.versions is not None]
        if not versions:
            return None
        return min(oldest for oldest, _ in versions), max(newest for _, newest in versions)


class GroupRunner:
    """Runs the conversations of a request side by side, each in a slot. Knows nothing of queues."""

    def __init__(self, setting: Setting, slots: Slots, recorder: Recorder) -> None:
        self._setting, self._slots, self._recorder = setting, slots, recorder
        self._complaints = Complaints()
        self.unfinished = 0
        """Conversations that hold a slot or wait for one."""
        self._sampled_tokens = 0
        """Not yet counted."""

    async def run(
        self,
        request: rollout_pb2.RolloutRequest,
        *,
        training: bool = True,
        too_old: asyncio.Event | None = None,
    ) -> Group:
        """All conversations of the request. One that fails shrinks the group and is counted; a
        dead engine raises, and a request that cannot be read raises wire.Malformed. When it is
        cancelled with `too_old` set, the conversations that still ran are counted.

        What is generated for training counts at once, whatever becomes of the conversation: tokens
        of one that fails, or of a group that is lost, have cost as much as any other.
        """
        sampling = request.sampling
        try:
            shared = self._shared(request)
        except (EnvironmentFailed, TemplateFailed, PromptTooLong) as error:
            self._complaints.of(error, group_id=request.group_id)
            reason = _reason(error)
            return Group({}, {reason: sampling.num_generations}, {reason: _words(error)})
        tasks = [
            asyncio.create_task(self._one(request, shared, generation, training=training))
            for generation in range(sampling.num_generations)
        ]
        self.unfinished += len(tasks)
        for task in tasks:
            task.add_done_callback(self._finished)
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
            cut_off = sum(task.cancelled() for task in tasks)
            if cut_off and too_old is not None and too_old.is_set():
                self._recorder.count("rollout/cancelled_total", cut_off)
        return self._collect(results, group_id=request.group_id)

    def _shared(self, request: rollout_pb2.RolloutRequest) -> "_Shared":
        """What the conversations of a request have in common."""
        recipe, environments = self._setting.recipe, self._setting.environments
        prompt, row = wire.read_prompt(request), wire.read_row(request)
        kind = None if environments is None else environments.choose(row)
        if kind is not None:
            # Its observation belongs to each conversation's own prompt.
            return _Shared(prompt, row, kind, None)
        tools = () if self._setting.tools is None else self._setting.tools.schemas
        prompt_ids = self._setting.template.render(prompt, tools=tools)
        if len(prompt_ids) >= recipe.generator.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens, generator.max_model_len is "
                f"{recipe.generator.max_model_len}"
            )
        return _Shared(prompt, row, None, prompt_ids)

    def _finished(self, _: "asyncio.Task[Conversation]") -> None:
        self.unfinished -= 1

    def _count_sampled(self, tokens: int) -> None:
        """Count them with those of all conversations that end in the same turn of the event loop:
        the engine gives answers by the hundred."""
        if tokens and not self._sampled_tokens:
            asyncio.get_running_loop().call_soon(self._count_those_sampled)
        self._sampled_tokens += tokens

    def _count_those_sampled(self) -> None:
        self._recorder.count("rollout/generated_tok_s", self._sampled_tokens)
        self._sampled_tokens = 0

    def _count_retry(self) -> None:
        self._recorder.count("rollout/vllm_retry_total")

    async def _one(
        self,
        request: rollout_pb2.RolloutRequest,
        shared: "_Shared",
        generation: int,
        *,
        training: bool,
    ) -> Conversation:
        run = self._setting.recipe.run
        ask = Ask(
            prompt=shared.prompt,
            row=shared.row,
            kind=shared.kind,
            temperature=request.sampling.temperature,
            max_completion_tokens=request.sampling.max_completion_tokens,
            seed=functools.partial(seed_of, run, request.group_id, generation),
            sampled=self._count_sampled if training else _ignore,
            retried=self._count_retry,
            prompt_ids=shared.prompt_ids,
        )
        async with self._slots:
            return await converse(self._setting, ask)

    def _collect(self, results: list[Conversation | BaseException], *, group_id: str) -> Group:
        conversations: dict[int, Conversation] = {}
        failed: Counter[str] = Counter()
        why: dict[str, str] = {}
        for generation, result in enumerate(results):
            match result:
                case Conversation():
                    conversations[generation] = result
                case EngineDead() | asyncio.CancelledError():
                    raise result
                case BaseException():
                    failed[_reason(result)] += 1
                    why.setdefault(_reason(result), _words(result))
                    self._complaints.of(result, group_id=group_id)
        return Group(conversations, dict(failed), why)

    def measure(self, group: Group) -> None:
        """Record the conversations of a group made for training."""
        measure.measure(list(group.conversations.values()), group.failed, self._recorder)


@dataclass(frozen=True)
class _Shared:
    """What the conversations of a request have in common."""

    prompt: list[Message]
    row: Mapping[str, Any]
    kind: EnvironmentKind | None
    prompt_ids: list[int] | None


class Complaints:
    """Says in the log why conversations fail, without a line each."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}
        self._held_back: Counter[str] = Counter()

    def of(self, error: BaseException, *, group_id: str) -> None:
        """Log one failure, or count it for the next line of its reason."""
        reason, now_s = _reason(error), time.monotonic()
        if now_s < self._next_s.get(reason, 0.0):
            self._held_back[reason] += 1
            return
        self._next_s[reason] = now_s + COMPLAIN_EVERY_S
        structlog.get_logger().error(
            "a conversation failed",
            reason=reason,
            why=_words(error),
            group=group_id,
            more_since_last=self._held_back.pop(reason, 0),
            exc_info=error if reason == "error" else None,
        )


def _reason(error: BaseException) -> str:
    return next((name for kind, name in REASONS if isinstance(error, kind)), "error")


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no turn was finished within generation.timeout_s"
    return str(error) or type(error).__name__


def _ignore(_: int) -> None:
    """Evaluation, and what a caller asks for, are in none of training's numbers."""


def seed_of(run: str, group_id: str, generation: int, turn: int) -> int:
    """A sampling seed of 63 bits, the same wherever and whenever this turn is generated."""
    text = f"{run}/{group_id}/{generation}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
