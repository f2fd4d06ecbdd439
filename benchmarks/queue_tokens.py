"""What travels: the same random samples, as services hold them and as plain Python holds them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from headrace.v1 import rollout_pb2 as wire

from services.generator.types import Conversation, Sequence, Span, Turn

VOCABULARY = 151_936
"""Ids are below it."""

PROMPT_SHARE = 0.25
"""Of a sample's tokens: context, not trained on."""

TEXT = "four"
"""Stands for the text of one sampled token: about what a token of English is long."""

VERSION = 1
"""The policy version of all tokens."""

GROUP_SIZE = 8
"""Samples of a group, each the one sequence of its conversation."""


@dataclass(frozen=True)
class Size:
    """Samples of one length, and how much of them each contender moves in a round."""

    name: str
    num_tokens: int
    hop_groups: int
    way_groups: int
    pickle_samples: int
    mp_samples: int


def sequences(size: Size, *, number: int, seed: int = 0) -> list[Sequence]:
    """Random samples, different from each other."""
    rng = np.random.default_rng(seed)
    num_tokens = size.num_tokens
    num_prompt = int(num_tokens * PROMPT_SHARE)
    mask = (np.arange(num_tokens) >= num_prompt).astype(np.uint8)
    made = []
    for _ in range(number):
        logprobs = np.where(mask, -rng.exponential(1.0, num_tokens), 0.0).astype(np.float32)
        made.append(
            Sequence(
                token_ids=rng.integers(0, VOCABULARY, num_tokens, dtype=np.uint32),
                trained_mask=mask,
                logprobs=logprobs,
                spans=(Span(VERSION, num_prompt, num_tokens),),
            )
        )
    return made


def conversation(sequence: Sequence) -> Conversation:
    """The conversation whose one turn sampled a sequence's trained tokens."""
    num_trained = int(sequence.trained_mask.sum())
    text = TEXT * num_trained
    turn = Turn(
        num_prompt_tokens=sequence.token_ids.size - num_trained,
        num_generated_tokens=num_trained,
        text=text,
        finish_reason="stop",
        duration_s=1.0,
    )
    return Conversation(
        completion=({"role": "assistant", "content": text},),
        turns=(turn,),
        sequences=(sequence,),
        end_reason=wire.END_REASON_STOP,
        duration_s=1.0,
    )


def plain(sequence: Sequence, *, number: int) -> dict[str, Any]:
    """The sample as a trainer in plain Python keeps it: lists of int and float objects."""
    return {
        "group_id": f"0.{number}.1.0",
        "token_ids": sequence.token_ids.tolist(),
        "trained_mask": sequence.trained_mask.tolist(),
        "logprobs": sequence.logprobs.tolist(),
        "advantage": 1.0 if number % 2 else -1.0,
        "version": VERSION,
    }
