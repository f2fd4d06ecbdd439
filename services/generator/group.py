"""One request to one group of rollouts: all conversations of a prompt, and what is measured
about them."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from headrace.v1 import rollout_pb2 as wire

from services.common.config import Recipe
from services.common.recorder import Recorder
from services.generator.conversation import Generates, converse
from services.generator.slots import Slots
from services.generator.template import ChatTemplate
from services.generator.types import Conversation, EngineDead, Message

MIN_GROUP = 2
"""Fewer finished conversations: no relative advantage, so the group is dropped as `failed`."""

END_NAMES = {
    wire.END_REASON_STOP: "stop",
    wire.END_REASON_LENGTH: "length",
    wire.END_REASON_CONTEXT: "context",
    wire.END_REASON_TURNS: "turns",
    wire.END_REASON_TIME: "time",
}
"""As metrics spell them."""


@dataclass(frozen=True)
class Group:
    """The finished conversations of a prompt, by generation number, and the failures by reason."""

    conversations: dict[int, Conversation]
    failed: dict[str, int]


class GroupRunner:
    """Runs the conversations of a request side by side, each in a slot. Knows nothing of queues."""

    def __init__(
        self,
        engine: Generates,
        template: ChatTemplate,
        slots: Slots,
        recipe: Recipe,
        recorder: Recorder,
    ) -> None:
        self._engine, self._template, self._slots = engine, template, slots
        self._recipe, self._recorder = recipe, recorder
        self.unfinished = 0
        """Conversations that hold a slot or wait for one."""

    async def run(self, request: wire.RolloutRequest, *, training: bool = True) -> Group:
        """All conversations of the request. One that fails shrinks the group and is counted; a
        dead engine raises.

        What is generated for training counts at once, whatever becomes of the conversation: tokens
        of one that fails, or of a group that is lost, have cost as much as any other.
        """
        sampling = request.sampling
        messages: list[Message] = [{"role": m.role, "content": m.content} for m in request.messages]
        prompt_ids = self._template.render(messages)
        room = self._recipe.generator.max_model_len - len(prompt_ids)
        if room < 1:
            return Group({}, {"prompt_too_long": sampling.num_generations})
        tasks = [
            asyncio.create_task(
                self._one(
                    prompt_ids,
                    temperature=sampling.temperature,
                    max_tokens=min(sampling.max_completion_tokens, room),
                    sampled=self._count_sampled if training else _ignore,
                    seed=seed_of(self._recipe.run, request.group_id, generation, turn=0),
                )
            )
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
        return self._collect(results)

    def _finished(self, _: "asyncio.Task[Conversation]") -> None:
        self.unfinished -= 1

    def _count_sampled(self, tokens: int) -> None:
        self._recorder.count("rollout/generated_tok_s", tokens)

    async def _one(
        self,
        prompt_ids: list[int],
        *,
        temperature: float,
        max_tokens: int,
        sampled: Callable[[int], None],
        seed: int,
    ) -> Conversation:
        async with self._slots, asyncio.timeout(self._recipe.generation.timeout_s):
            return await converse(
                self._engine,
                self._template,
                prompt_ids,
                temperature=temperature,
                max_tokens=max_tokens,
                sampled=sampled,
                seed=seed,
            )

    def _collect(self, results: list[Conversation | BaseException]) -> Group:
        conversations: dict[int, Conversation] = {}
        failed: Counter[str] = Counter()
        for generation, result in enumerate(results):
            match result:
                case Conversation():
                    conversations[generation] = result
                case EngineDead() | asyncio.CancelledError():
                    raise result
                case TimeoutError():
                    failed["timeout"] += 1
                case BaseException():
                    failed["error"] += 1
                    structlog.get_logger().error("conversation failed", exc_info=result)
        return Group(conversations, dict(failed))

    def measure(self, group: Group, *, evaluation: bool) -> None:
        """Record a group's conversations; evaluation has its own keys and enters none of
        training's."""
        record = self._recorder
        if evaluation:
            for conversation in group.conversations.values():
                clipped = conversation.end_reason == wire.END_REASON_LENGTH
                record.ratio("eval/mean_length", conversation.generated_tokens, 1)
                record.ratio("eval/clipped_ratio", float(clipped), 1)
            record.count("eval/failed_total", sum(group.failed.values()))
            return
        record.count("rollout/failed_total", sum(group.failed.values()))
        for reason, number in group.failed.items():
            record.count(f"rollout/failed/{reason}", number)
        for conversation in group.conversations.values():
            tokens = conversation.generated_tokens
            record.observe("rollout/duration_s", conversation.duration_s)
            record.observe("rollout/engine_s", sum(turn.duration_s for turn in conversation.turns))
            record.observe("rollout/turns_mean", len(conversation.turns))
            record.observe("rollout/turns_max", len(conversation.turns))
            record.ratio("rollout/samples_per_rollout", len(conversation.sequences), 1)
            record.count(f"rollout/ended/{END_NAMES[conversation.end_reason]}")
            record.ratio("completions/mean_length", tokens, 1)
            record.observe("completions/max_length", tokens)
            record.observe("completions/min_length", tokens)
            record.ratio(
                "completions/clipped_ratio",
                float(conversation.end_reason == wire.END_REASON_LENGTH),
                1,
            )
            # Each switch of weights had the engine recompute the prefix that existed then.
            reprefill = sum(span.start for s in conversation.sequences for span in s.spans[1:])
            if reprefill:
                record.count("perf/weight_sync_reprefill_tokens", reprefill)


def _ignore(_: int) -> None:
    """Evaluation, and what a caller asks for, are in none of training's numbers."""


def to_wire(request: wire.RolloutRequest, group: Group, *, producer: str) -> wire.RolloutGroup:
    """The message for the `groups` stream; the oldest version over all trained tokens decides
    the group's staleness."""
    oldest = min(conversation.versions[0] for conversation in group.conversations.values())
    return wire.RolloutGroup(
        request=request,
        rollouts=[
            conversation.to_wire(f"{request.group_id}/{generation}")
            for generation, conversation in group.conversations.items()
        ],
        failed=group.failed,
        oldest_version=oldest,
        newest_version=newest_version(group),
        producer=producer,
    )


def newest_version(group: Group) -> int:
    """The newest version over all trained tokens: what has to be proven before they are used."""
    return max(conversation.versions[1] for conversation in group.conversations.values())


def seed_of(run: str, group_id: str, generation: int, *, turn: int) -> int:
    """A sampling seed of 63 bits, the same wherever and whenever this turn is generated."""
    text = f"{run}/{group_id}/{generation}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
