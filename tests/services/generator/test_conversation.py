"""One conversation, and the sequence that it becomes."""

import numpy as np
import pytest
from headrace.v1 import rollout_pb2 as wire
from hypothesis import given
from hypothesis import strategies as st

from services.common.sequences import broken_invariant
from services.generator.conversation import converse, to_sequence
from services.generator.template import ChatTemplate
from services.generator.types import Conversation, Generated, Span
from services.launcher import tiny_training
from tests.services.generator.fakes import FakeEngine, generated

TOKENIZER = tiny_training.build_tokenizer()
FOUR, END = TOKENIZER.convert_tokens_to_ids(["4", "<end>"])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return ChatTemplate(folder)


def test_the_example_of_to_sequence() -> None:
    sequence = to_sequence([1, 2], generated([7, 8], versions=(3,)))
    assert sequence.token_ids.tolist() == [1, 2, 7, 8]
    assert sequence.trained_mask.tolist() == [0, 0, 1, 1]
    assert sequence.logprobs.tolist() == [0.0, 0.0, -0.125, -0.25]
    assert sequence.spans == (Span(3, 2, 4),)


def test_spans_are_shifted_by_the_context() -> None:
    sequence = to_sequence([1, 2, 3], generated([7, 8, 9], versions=(3, 4)))
    assert sequence.spans == (Span(3, 3, 4), Span(4, 4, 6))


@given(
    prompt=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9),
    sampled=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9),
)
def test_what_the_trainer_sees_is_what_the_sampler_saw(
    prompt: list[int], sampled: list[int]
) -> None:
    """The last line of C07: the very ids, never a second tokenisation of their text."""
    sequence = to_sequence(prompt, generated(sampled))
    assert sequence.token_ids.tolist() == [*prompt, *sampled]
    trained = sequence.token_ids[sequence.trained_mask == 1]
    assert trained.tolist() == sampled
    conversation = Conversation((), (), (sequence,), wire.END_REASON_STOP, 1.0)
    [sent] = conversation.to_wire("g/0").sequences
    assert broken_invariant(sent) is None
    assert np.frombuffer(sent.token_ids, "<u4").tolist() == [*prompt, *sampled]


async def test_a_conversation_that_ends_by_itself(template: ChatTemplate) -> None:
    async def answer(call: int) -> Generated:
        return generated([FOUR, END])

    engine = FakeEngine(answer)
    sampled: list[int] = []
    done = await converse(
        engine, template, [5, 6], temperature=0.5, max_tokens=9, sampled=sampled.append, seed=11
    )
    assert sampled == [2]
    assert engine.calls == [
        {
            "prompt_ids": [5, 6],
            "temperature": 0.5,
            "max_tokens": 9,
            "stop_token_ids": template.end_tokens,
            "seed": 11,
        }
    ]
    assert done.completion == ({"role": "assistant", "content": "4"},)
    assert done.end_reason == wire.END_REASON_STOP
    [turn] = done.turns
    assert (turn.num_prompt_tokens, turn.num_generated_tokens) == (2, 2)
    assert (turn.text, turn.finish_reason, turn.duration_s) == ("4", "stop", 0.25)
    # The end token was sampled, so it is trained.
    assert done.sequences[0].token_ids.tolist() == [5, 6, FOUR, END]
    assert done.generated_tokens == 2
    assert done.versions == (3, 3)


async def test_a_conversation_that_is_cut(template: ChatTemplate) -> None:
    async def answer(call: int) -> Generated:
        return generated([FOUR, FOUR, FOUR], versions=(3, 4), finish_reason="length")

    engine = FakeEngine(answer)
    done = await converse(
        engine, template, [5, 6], temperature=1.0, max_tokens=3, sampled=lambda _: None, seed=None
    )
    assert done.end_reason == wire.END_REASON_LENGTH
    # No end token was sampled, so none is trained.
    assert done.sequences[0].token_ids.tolist() == [5, 6, FOUR, FOUR, FOUR]
    assert done.versions == (3, 4)
