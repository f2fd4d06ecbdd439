"""One conversation: generate, and what came of it as a sequence to train on. Single-turn."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from headrace.v1 import rollout_pb2 as wire

from services.generator.template import ChatTemplate
from services.generator.types import Conversation, Generated, Span, Turn
from services.generator.types import Sequence as TrainSequence


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


async def converse(
    engine: Generates,
    template: ChatTemplate,
    prompt_ids: Sequence[int],
    *,
    temperature: float,
    max_tokens: int,
    sampled: Callable[[int], None],
    seed: int | None,
) -> Conversation:
    """Run one conversation to its end. Errors of the engine pass through: a failed conversation
    has no value; its tokens have been told to `sampled` all the same."""
    begin_s = time.monotonic()
    generated = await engine.generate(
        prompt_ids,
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=template.end_tokens,
        sampled=sampled,
        seed=seed,
    )
    text = template.text(generated.token_ids)
    by_length = generated.finish_reason == "length"
    turn = Turn(
        num_prompt_tokens=len(prompt_ids),
        num_generated_tokens=len(generated.token_ids),
        text=text,
        finish_reason=generated.finish_reason,
        duration_s=generated.duration_s,
    )
    return Conversation(
        completion=({"role": "assistant", "content": text},),
        turns=(turn,),
        sequences=(to_sequence(prompt_ids, generated),),
        end_reason=wire.END_REASON_LENGTH if by_length else wire.END_REASON_STOP,
        duration_s=time.monotonic() - begin_s,
    )


def to_sequence(prompt_ids: Sequence[int], generated: Generated) -> TrainSequence:
    """The prompt as context, then every sampled token, trained.

    Example: prompt [1, 2], sampled [7, 8] by version 3 -> ids [1, 2, 7, 8], mask [0, 0, 1, 1], span
    (3, 2, 4).
    """
    context, sampled = len(prompt_ids), len(generated.token_ids)
    logprobs = np.zeros(context + sampled, np.float32)
    logprobs[context:] = generated.logprobs
    mask = np.zeros(context + sampled, np.uint8)
    mask[context:] = 1
    return TrainSequence(
        token_ids=np.asarray([*prompt_ids, *generated.token_ids], np.uint32),
        trained_mask=mask,
        logprobs=logprobs,
        spans=tuple(Span(s.version, context + s.start, context + s.end) for s in generated.spans),
    )
