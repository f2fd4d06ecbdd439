"""One conversation: generate, read what was said, run the calls, go on, until it ends.

Each turn renders the whole message list anew with the model's chat template. What is trained is
decided at the end, from the tokens alone (reconcile.py).

waits_for: the engine, the tools and the environment that the model calls. It owns one environment
instance, which it gives back however it ends.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headrace.v1 import rollout_pb2 as wire

from services.common.config import Recipe
from services.generator.environments import EnvironmentKind, Environments, Instance
from services.generator.parsing import Parser, Plain
from services.generator.reconcile import to_sequences
from services.generator.template import ChatTemplate
from services.generator.tools import Tools, run_calls
from services.generator.types import (
    CallResult,
    Conversation,
    EnvironmentFailed,
    Generated,
    GenerateFailed,
    Message,
    Parsed,
    PromptTooLong,
    SampledTurn,
    Turn,
)
from services.generator.wire import printable

ENGINE_TRIES = 3
"""A request at which the engine fails, and lives on, is given up after so many calls."""

RETRY_AFTER_S = 0.1
"""Before the second call; twice as long before the third."""


class Generates(Protocol):
    """The part of the engine that conversations need."""

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
        """Sample one completion. `sampled` is called once with the number of tokens that were
        generated, also where the call fails or is cut off."""
        ...


@dataclass(frozen=True)
class Setting:
    """What all conversations of a replica have in common."""

    engine: Generates
    template: ChatTemplate
    recipe: Recipe
    tools: Tools | None = None
    environments: Environments | None = None
    parsers: Callable[[Sequence[dict[str, Any]]], Parser] = lambda _: Plain()
    """Gives the parser for some tools' schemas."""


@dataclass(frozen=True)
class Ask:
    """What one conversation is to be."""

    prompt: Sequence[Message]
    row: Mapping[str, Any]
    """The dataset row's columns: what an environment is reset with."""
    kind: EnvironmentKind | None
    """The environment that it lives in."""
    temperature: float
    max_completion_tokens: int
    """All its turns together."""
    seed: Callable[[int], int | None]
    """By turn."""
    sampled: Callable[[int], None]
    """Told of generated tokens, whatever becomes of them."""
    retried: Callable[[], None]
    """Told of each engine call that is tried again."""
    prompt_ids: Sequence[int] | None = None
    """The rendered prompt, where somebody has it already."""


async def converse(setting: Setting, ask: Ask) -> Conversation:
    """Run one conversation to its end.

    Past `generation.timeout_s` it ends with the turns that are finished. A failed one has no value:
    raises TimeoutError (no turn was finished in time), PromptTooLong, TemplateFailed,
    EnvironmentFailed, and what the engine raises. What calls of tools raise is told to the model.
    """
    talk = _Talk(setting, ask)
    try:
        try:
            async with asyncio.timeout(setting.recipe.generation.timeout_s) as limit:
                await talk.begin()
                talk.end_reason = await talk.turns_until_the_end()
        except TimeoutError:
            if not limit.expired() or not talk.turns:
                raise
            talk.end_reason = wire.END_REASON_TIME
        return await talk.finished()
    finally:
        await talk.leave()


class _Talk:
    """A conversation under way."""

    def __init__(self, setting: Setting, ask: Ask) -> None:
        self._setting, self._ask, self._kind = setting, ask, ask.kind
        self._schemas: list[dict[str, Any]] = []
        if setting.tools is not None:
            self._schemas += setting.tools.schemas
        if ask.kind is not None:
            self._schemas += ask.kind.schemas
        self._parser = setting.parsers(self._schemas)
        self._instance: Instance | None = None
        self._prompt: list[Message] = list(ask.prompt)
        self._observed = False
        self._history: list[Message] = []
        """What the template renders after the prompt."""
        self._completion: list[Message] = []
        """What reward functions see of it."""
        self._sampled: list[SampledTurn] = []
        self._reset_s: float | None = None
        self._begin_s: float | None = None
        self._end_s = 0.0
        self._env_s = self._tool_s = 0.0
        self.turns: list[Turn] = []
        self.end_reason: wire.EndReason.ValueType = wire.END_REASON_UNSPECIFIED

    async def begin(self) -> None:
        """Take an environment and let its observation follow the prompt, in a copy of it: the
        dataset row is everybody's."""
        if self._kind is None:
            return
        assert self._setting.environments is not None
        self._instance = await self._setting.environments.acquire(self._kind)
        begin_s = time.monotonic()
        observation = await self._instance.reset(self._ask.row)
        self._reset_s = time.monotonic() - begin_s
        if observation is None:
            return
        self._observed = True
        observation = printable(observation)
        if self._prompt and self._prompt[-1]["role"] == "user":
            last = self._prompt[-1]
            self._prompt[-1] = {**last, "content": last["content"] + observation}
        else:
            self._prompt.append({"role": "user", "content": observation})

    async def turns_until_the_end(self) -> "wire.EndReason.ValueType":
        """Turn by turn; why it ended."""
        generation = self._setting.recipe.generation
        while True:
            prompt_ids = self._render()
            room = self._setting.recipe.generator.max_model_len - len(prompt_ids)
            left = self._ask.max_completion_tokens - sum(t.num_generated_tokens for t in self.turns)
            if not self.turns and room < 1:
                raise PromptTooLong(
                    f"the prompt has {len(prompt_ids)} tokens, generator.max_model_len is "
                    f"{self._setting.recipe.generator.max_model_len}"
                )
            if self.turns and left < generation.min_turn_tokens:
                return wire.END_REASON_LENGTH
            if self.turns and room < generation.min_turn_tokens:
                return wire.END_REASON_CONTEXT
            generated, parsed = await self._say(prompt_ids, max_tokens=min(room, left))
            # Its calls are not run, since the last one may be half of what was meant.
            if generated.finish_reason == "length":
                return wire.END_REASON_LENGTH
            if not parsed.calls:
                return wire.END_REASON_STOP
            last = len(self.turns) >= generation.max_turns
            # Nobody would read the results of the last turn's calls, but an environment's own
            # reward is of the state that they lead to.
            if last and self._instance is None:
                return wire.END_REASON_TURNS
            await self._act(parsed)
            if self._instance is not None and self._instance.done:
                return wire.END_REASON_STOP
            if last:
                return wire.END_REASON_TURNS

    def _render(self) -> Sequence[int]:
        if not self.turns and not self._observed and self._ask.prompt_ids is not None:
            return self._ask.prompt_ids
        return self._setting.template.render([*self._prompt, *self._history], tools=self._schemas)

    async def _say(self, prompt_ids: Sequence[int], *, max_tokens: int) -> tuple[Generated, Parsed]:
        """One engine call, and what it says."""
        begin_s = time.monotonic()
        if self._begin_s is None:
            self._begin_s = begin_s
        generated = await self._generate(prompt_ids, max_tokens=max_tokens)
        text = self._setting.template.text(generated.token_ids)
        parsed = self._parser.parse(text)
        self._sampled.append(
            SampledTurn(
                prompt_ids=tuple(prompt_ids),
                token_ids=tuple(generated.token_ids),
                logprobs=generated.logprobs,
                spans=generated.spans,
            )
        )
        self.turns.append(
            Turn(
                num_prompt_tokens=len(prompt_ids),
                num_generated_tokens=len(generated.token_ids),
                text=text,
                finish_reason=generated.finish_reason,
                duration_s=generated.duration_s,
                calls_asked=len(parsed.calls),
                # Each switch of weights had the engine recompute the prefix that existed then.
                reprefill_tokens=sum(len(prompt_ids) + s.start for s in generated.spans[1:]),
                begin_s=begin_s - self._begin_s,
            )
        )
        self._add_assistant(parsed)
        self._end_s = time.monotonic()
        return generated, parsed

    async def _generate(self, prompt_ids: Sequence[int], *, max_tokens: int) -> Generated:
        seed = self._ask.seed(len(self.turns))
        for number in range(1, ENGINE_TRIES + 1):
            try:
                return await self._setting.engine.generate(
                    prompt_ids,
                    temperature=self._ask.temperature,
                    max_tokens=max_tokens,
                    stop_token_ids=self._setting.template.end_tokens,
                    sampled=self._ask.sampled,
                    seed=seed,
                )
            except GenerateFailed:
                if number == ENGINE_TRIES:
                    raise
                self._ask.retried()
                await asyncio.sleep(RETRY_AFTER_S * number)
        raise AssertionError("unreachable")

    def _add_assistant(self, parsed: Parsed) -> None:
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        structured = [
            {
                "id": self._call_id(index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(parsed.calls)
            if call.mistake is None
        ]
        whole = {**message, "tool_calls": structured} if structured else message
        self._completion.append(whole)
        # Content that holds the calls already must not be given them a second time.
        self._history.append(message if parsed.calls_in_content else whole)

    def _call_id(self, index: int) -> str:
        """Nine digits: the only form that all models' templates take."""
        return f"{len(self.turns):04d}{index:05d}"

    async def _act(self, parsed: Parsed) -> None:
        """Run the calls of the last turn, in order, and let the model hear the results."""
        done: list[CallResult] = []
        try:
            await run_calls(
                parsed.calls,
                tools=self._setting.tools,
                environment=self._instance,
                finished=done.append,
            )
        finally:
            # Also those that were finished before the time was up.
            self.turns[-1] = replace(self.turns[-1], calls=tuple(done))
            for index, result in enumerate(done):
                self._hear(result, index)

    def _hear(self, result: CallResult, index: int) -> None:
        message: Message = {"role": "tool", "content": printable(result.text)}
        if result.call.mistake is None:
            message["tool_call_id"] = self._call_id(index)
        if result.call.name is not None:
            message["name"] = printable(result.call.name)
        self._history.append(message)
        self._completion.append(message)
        if result.by_environment:
            self._env_s += result.duration_s
        else:
            self._tool_s += result.duration_s
        self._end_s = time.monotonic()

    async def finished(self) -> Conversation:
        """What came of it. Asks the environment for its reward. Raises EnvironmentFailed."""
        assert self._begin_s is not None
        reward, reward_s = None, None
        if self._instance is not None:
            if self._instance.broken:
                raise EnvironmentFailed("the environment was cut off in the middle of a call")
            assert self._kind is not None
            if self._kind.has_reward:
                begin_s = time.monotonic()
                reward = await self._instance.get_reward()
                reward_s = time.monotonic() - begin_s
        sequences, transitions = to_sequences(
            self._sampled,
            fork_threshold_tokens=self._setting.recipe.generation.fork_threshold_tokens,
        )
        return Conversation(
            completion=tuple(self._completion),
            turns=tuple(self.turns),
            sequences=sequences,
            end_reason=self.end_reason,
            duration_s=self._end_s - self._begin_s,
            transitions=transitions,
            prompt=tuple(self._prompt) if self._observed else None,
            equipped=bool(self._schemas),
            environment="" if self._kind is None else self._kind.name,
            environment_reward=reward,
            reset_s=self._reset_s,
            reward_s=reward_s,
            tool_s=self._tool_s,
            env_s=self._env_s,
        )

    async def leave(self) -> None:
        """Give the environment back, or have it discarded where it is of no more use."""
        if self._instance is not None:
            await self._instance.finish()
