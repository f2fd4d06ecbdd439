"""Whole conversations: what the engine is asked, why they end, and what comes out of them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.v1 import rollout_pb2 as wire

from services.common.sequences import broken_invariant
from services.generator.conversation import ENGINE_TRIES, converse
from services.generator.types import (
    Conversation,
    EngineDead,
    EnvironmentFailed,
    Generated,
    GenerateFailed,
    PromptTooLong,
    TemplateFailed,
)
from services.generator.wire import write_rollout
from services.launcher.tiny_tokenizer import END
from tests.services.generator.fakes import FakeEngine, generated
from tests.services.generator.spoken import (
    HERE,
    TOKENIZER,
    Speaker,
    ask_of,
    call,
    ids,
    setting_of,
)

TOOLS = {"functions": [f"{HERE}:add"]}
COUNTER = {"classes": [{"environment": f"{HERE}:Counter"}]}


async def spoken(
    folder: Path, says: Any, prompt: Any = "hi", *, row: Any = None, **sections: Any
) -> tuple[Conversation, Speaker]:
    engine = Speaker(says)
    async with setting_of(engine, folder, **sections) as setting:
        return await converse(setting, ask_of(setting, prompt, row=row)), engine


def trained(conversation: Conversation) -> list[str]:
    """What each sequence trains, as text."""
    return [
        str(TOKENIZER.decode(sequence.token_ids[sequence.trained_mask == 1].tolist()))
        for sequence in conversation.sequences
    ]


async def test_one_turn(tmp_path: Path) -> None:
    done, engine = await spoken(tmp_path, [f"4{END}"], "2 + 2")
    prompt_ids = ids("<user>2 + 2<end><assistant>")
    [asked] = engine.calls
    assert asked["prompt_ids"] == prompt_ids
    assert (asked["temperature"], asked["max_tokens"], asked["seed"]) == (0.5, 256, 100)
    assert asked["stop_token_ids"] == (TOKENIZER.eos_token_id,)
    assert done.completion == ({"role": "assistant", "content": "4"},)
    assert done.end_reason == wire.END_REASON_STOP
    [turn] = done.turns
    assert (turn.num_prompt_tokens, turn.num_generated_tokens) == (len(prompt_ids), 2)
    assert (turn.text, turn.finish_reason, turn.duration_s) == ("4", "stop", 0.25)
    # The end token was sampled, so it is trained.
    assert done.sequences[0].token_ids.tolist() == [*prompt_ids, *ids(f"4{END}")]
    assert trained(done) == [f"4{END}"]
    assert (done.generated_tokens, done.versions, done.equipped) == (2, (3, 3), False)


async def test_a_turn_cut_by_length_ends_it_and_its_calls_are_not_run(tmp_path: Path) -> None:
    """No end token was sampled, so none is trained, and nothing follows."""
    says = [call("add", a=1, b=2)]
    done, _ = await spoken(tmp_path, says, tools=TOOLS)
    assert done.end_reason == wire.END_REASON_LENGTH
    assert done.turns[0].calls == ()
    assert trained(done) == says
    assert [message["role"] for message in done.completion] == ["assistant"]
    assert done.asking


async def test_a_call_is_run_and_the_model_hears_the_result(tmp_path: Path) -> None:
    asked = call("add", a=1, b=2)
    done, engine = await spoken(tmp_path, [f"{asked}{END}", f"3{END}"], "1 + 2", tools=TOOLS)
    assert engine.prompts[1] == (
        f"<tools>add(a, b)<end><user>1 + 2<end><assistant>{asked}<end><tool>3<end><assistant>"
    )
    # The second prompt begins with the very tokens of the first turn: one sequence.
    assert trained(done) == [f"{asked}{END}3{END}"]
    [sequence] = done.sequences
    assert sequence.token_ids.tolist() == [*engine.calls[1]["prompt_ids"], *ids(f"3{END}")]
    assert (done.transitions.clean, done.transitions.total) == (1, 1)
    assert [engine_call["seed"] for engine_call in engine.calls] == [100, 101]
    first, result, last = done.completion
    assert first["content"] == asked
    assert first["tool_calls"] == [
        {
            "id": "000100000",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
        }
    ]
    assert result == {"role": "tool", "content": "3", "tool_call_id": "000100000", "name": "add"}
    assert last == {"role": "assistant", "content": "3"}
    assert (done.end_reason, done.equipped, done.asking) == (wire.END_REASON_STOP, True, False)
    [told] = done.turns[0].calls
    assert (told.text, told.failed, told.declared, told.by_environment) == ("3", False, True, False)
    assert done.tool_s == told.duration_s > 0


async def test_two_results_in_a_row_are_rendered_together(tmp_path: Path) -> None:
    """C10, with a template that puts neighbouring results into one user turn, as Qwen's do."""
    template = (
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}"
        "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<user>{% endif %}"
        "<tool>{{ m.content }}<tool>"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<end>{% endif %}"
        "{% else %}<{{ m.role }}>{{ m.content }}<end>{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    calls = call("add", a=1, b=2) + call("multiply", a=3, b=4)
    engine = Speaker([f"{calls}{END}", f"15{END}"])
    tools = {"functions": [f"{HERE}:add", f"{HERE}:multiply"]}
    async with setting_of(engine, tmp_path, template=template, tools=tools) as setting:
        done = await converse(setting, ask_of(setting, "both"))
        rendered = setting.template.render(
            [{"role": "user", "content": "both"}, *done.completion[:-1]]
        )
    assert engine.calls[1]["prompt_ids"] == rendered
    both = "<user><tool>3<tool><tool>12<tool><end>"
    assert engine.prompts[1] == f"<user>both<end><assistant>{calls}<end>{both}<assistant>"
    assert trained(done) == [f"{calls}{END}15{END}"]


async def test_what_is_held_is_what_the_engine_saw_where_the_template_drops_reasoning(
    tmp_path: Path,
) -> None:
    """C07: a template that drops earlier reasoning. A hand count: turn 1 samples 6 + 15 + 1
    tokens after 4, turn 2's prompt parts from them behind the 4th: a drift of 22, a fork."""
    template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{{ m.content.split('|')[-1] if m.role == 'assistant' else m.content }}<end>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    asked = call("add", a=1, b=2)
    thought = "hmm so|"
    engine = Speaker([f"{thought}{asked}{END}", f"hm|3{END}"])
    async with setting_of(engine, tmp_path, template=template, tools=TOOLS) as setting:
        done = await converse(setting, ask_of(setting, "q"))
    drift = len(ids(f"{thought}{asked}{END}"))
    transitions = done.transitions
    assert (transitions.forked, transitions.total) == (1, 1)
    assert transitions.drift_tokens == transitions.max_drift_tokens == drift
    assert trained(done) == [f"{thought}{asked}{END}", f"hm|3{END}"]
    # What the trainer sees of turn 2 is what the sampler saw, not the history with its reasoning.
    assert done.sequences[1].token_ids.tolist() == [
        *ids(f"<user>q<end><assistant>{asked}<end><tool>3<end><assistant>"),
        *ids(f"hm|3{END}"),
    ]


async def test_letters_that_are_rendered_as_other_tokens_are_realigned(tmp_path: Path) -> None:
    """The model spells `</tool_call>` in 12 letters: rendered again it is one token. Common are
    the prompt and all before it; 13 held tokens are beyond, the end of turn among them."""
    spelt = "</tool_call>"
    block = call("add", a=1, b=2).removesuffix(spelt)
    letters = [TOKENIZER.convert_tokens_to_ids(letter) for letter in spelt]
    first = [*ids(block), *letters, TOKENIZER.eos_token_id]
    second = ids(f"3{END}")

    async def answer(number: int) -> Generated:
        tokens = first if number == 0 else second
        return generated(tokens)

    async with setting_of(FakeEngine(answer), tmp_path, tools=TOOLS) as setting:
        done = await converse(setting, ask_of(setting, "q"))
    transitions = done.transitions
    assert (transitions.realigned, transitions.total) == (1, 1)
    assert (transitions.demoted_tokens, transitions.drift_tokens) == (13, 13)
    assert trained(done) == [f"{block}3{END}"]
    context = ids("<tools>add(a, b)<end><user>q<end><assistant>")
    again = ids(f"{block}{spelt}<end><tool>3<end><assistant>")
    assert done.sequences[0].token_ids.tolist() == [*context, *again, *second]


@pytest.mark.parametrize(
    ("limits", "turns", "reason"),
    [
        ({"max_turns": 3}, 3, wire.END_REASON_TURNS),
        ({"max_turns": 1}, 1, wire.END_REASON_TURNS),
        # A turn is 16 tokens: behind the second 8 are left of 40, and 16 are wanted.
        ({"max_completion_tokens": 40}, 2, wire.END_REASON_LENGTH),
        ({"max_completion_tokens": 48, "min_turn_tokens": 16}, 3, wire.END_REASON_LENGTH),
        ({"max_completion_tokens": 48, "min_turn_tokens": 17}, 2, wire.END_REASON_LENGTH),
    ],
)
async def test_a_model_that_never_stops_asking(
    tmp_path: Path, limits: dict[str, int], turns: int, reason: int
) -> None:
    asked = f"{call('add', a=1, b=2)}{END}"
    assert len(ids(asked)) == 16
    done, engine = await spoken(tmp_path, [asked] * 9, tools=TOOLS, generation=limits)
    assert (len(done.turns), done.end_reason) == (turns, reason)
    assert done.asking
    left = limits.get("max_completion_tokens", 256)
    assert [each["max_tokens"] for each in engine.calls] == [left - 16 * n for n in range(turns)]
    # The calls of the last turn that `max_turns` allows are not run: nobody would hear of them.
    run = [len(turn.calls) for turn in done.turns]
    assert run == ([1] * (turns - 1) + [0] if reason == wire.END_REASON_TURNS else [1] * turns)


async def test_a_prompt_that_has_grown_too_long_is_an_end_before_the_engine_is_called(
    tmp_path: Path,
) -> None:
    """The first prompt has 15 tokens, a turn with its result 20: a third would have 45 of 100 left,
    and 46 are wanted."""
    asked = f"{call('add', a=1, b=2)}{END}"
    length = len(ids("<tools>add(a, b)<end><user>q<end><assistant>"))
    per_turn = 16 + len(ids("<tool>3<end><assistant>"))
    wanted = 100 - length - 2 * per_turn + 1
    sections = {
        "generator": {"max_model_len": 100},
        "generation": {"max_completion_tokens": 99, "min_turn_tokens": wanted},
    }
    done, engine = await spoken(tmp_path, [asked] * 9, "q", tools=TOOLS, **sections)
    assert done.end_reason == wire.END_REASON_CONTEXT
    assert [len(each["prompt_ids"]) for each in engine.calls] == [length, length + per_turn]
    assert (length, per_turn, wanted) == (15, 20, 46)
    assert [each["max_tokens"] for each in engine.calls] == [85, 65]
    assert done.asking


async def test_a_first_prompt_that_does_not_fit_has_failed(tmp_path: Path) -> None:
    with pytest.raises(PromptTooLong, match=r"generator\.max_model_len is 512"):
        await spoken(tmp_path, [f"3{END}"], "9" * 512)


async def test_messages_that_the_template_refuses(tmp_path: Path) -> None:
    with pytest.raises(TemplateFailed, match="unknown role: narrator"):
        await spoken(tmp_path, [], [{"role": "narrator", "content": "Once"}])


async def test_what_is_finished_when_the_time_is_up_stays(tmp_path: Path) -> None:
    """Two turns are finished when the third is cut off; the tokens of that one are nowhere."""
    asked = f"{call('add', a=1, b=2)}{END}"
    engine = Speaker([asked, asked])
    scripted = engine.answer

    async def answer(number: int) -> Generated:
        if number == 2:
            await asyncio.Event().wait()
        return await scripted(number)

    engine.answer = answer
    limits = {"timeout_s": 0.5}
    async with setting_of(engine, tmp_path, tools=TOOLS, generation=limits) as setting:
        done = await converse(setting, ask_of(setting))
    assert (done.end_reason, len(done.turns), done.asking) == (wire.END_REASON_TIME, 2, True)
    assert trained(done) == [asked * 2]
    assert [message["role"] for message in done.completion] == ["assistant", "tool"] * 2


async def test_no_turn_in_time_is_a_failure(tmp_path: Path) -> None:
    async def answer(number: int) -> Generated:
        await asyncio.Event().wait()
        raise AssertionError

    limits = {"timeout_s": 0.05}
    async with setting_of(FakeEngine(answer), tmp_path, generation=limits) as setting:
        with pytest.raises(TimeoutError):
            await converse(setting, ask_of(setting))


async def test_a_request_at_which_the_engine_fails_is_tried_again(tmp_path: Path) -> None:
    engine, retries = Speaker([f"4{END}"] * ENGINE_TRIES), []
    scripted = engine.answer

    async def answer(number: int) -> Generated:
        if number < ENGINE_TRIES - 1:
            raise GenerateFailed("once")
        return await scripted(number)

    engine.answer = answer
    async with setting_of(engine, tmp_path) as setting:
        ask = replace(ask_of(setting), retried=lambda: retries.append(1))
        done = await converse(setting, ask)
        assert (len(done.turns), len(retries)) == (1, ENGINE_TRIES - 1)

        async def always(number: int) -> Generated:
            raise GenerateFailed("each time")

        engine.answer = always
        with pytest.raises(GenerateFailed):
            await converse(setting, ask)

        async def dead(number: int) -> Generated:
            raise EngineDead("gone")

        engine.answer, before = dead, len(engine.calls)
        with pytest.raises(EngineDead):
            await converse(setting, ask)
        assert len(engine.calls) == before + 1


async def test_a_block_that_is_no_call_is_answered_and_stays_as_it_was_said(tmp_path: Path) -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": 1,}</tool_call>'
    good = call("add", a=1, b=2)
    done, engine = await spoken(tmp_path, [f"{broken}{good}{END}", f"3{END}"], "q", tools=TOOLS)
    [error, result] = [m["content"] for m in done.completion if m["role"] == "tool"]
    assert error.startswith("error: ")
    assert result == "3"
    assert [c.failed for c in done.turns[0].calls] == [True, False]
    assert [len(done.completion[0]["tool_calls"])] == [1]
    assert trained(done) == [f"{broken}{good}{END}3{END}"]
    assert f"<assistant>{broken}{good}<end><tool>{error}<end><tool>3<end>" in engine.prompts[1]


async def test_without_tools_a_call_is_just_text(tmp_path: Path) -> None:
    said = call("add", a=1, b=2)
    done, _ = await spoken(tmp_path, [f"{said}{END}"])
    assert (done.end_reason, done.turns[0].calls_asked) == (wire.END_REASON_STOP, 0)
    assert done.completion == ({"role": "assistant", "content": said},)


async def test_a_conversation_in_an_environment(tmp_path: Path) -> None:
    says = [f"{call('up', by=2)}{END}", f"{call('up', by=3)}{END}"]
    prompt = [{"role": "user", "content": "Go."}]
    done, engine = await spoken(tmp_path, says, prompt, row={"goal": 5}, environments=COUNTER)
    assert engine.prompts[0] == "<tools>up(by)<end><user>Go. Count to 5.<end><assistant>"
    # In a copy: the dataset row is everybody's.
    assert prompt == [{"role": "user", "content": "Go."}]
    assert done.prompt == ({"role": "user", "content": "Go. Count to 5."},)
    # It was done after the second turn, so there is no third.
    assert (done.end_reason, len(done.turns)) == (wire.END_REASON_STOP, 2)
    assert [message["content"] for message in done.completion[1::2]] == ["2", "5"]
    assert (done.environment, done.environment_reward) == ("Counter", 1.0)
    assert done.turns[0].calls[0].by_environment
    assert done.env_s == sum(turn.calls[0].duration_s for turn in done.turns)
    assert done.tool_s == 0
    assert done.reset_s is not None
    assert done.reward_s is not None


async def test_the_last_turns_move_counts_in_an_environment(tmp_path: Path) -> None:
    says = [f"{call('up', by=2)}{END}"] * 9
    done, _ = await spoken(
        tmp_path,
        says,
        row={"goal": 4},
        environments=COUNTER,
        generation={"max_turns": 1},
    )
    assert (done.end_reason, done.environment_reward) == (wire.END_REASON_TURNS, 0.0)
    assert [message["role"] for message in done.completion] == ["assistant", "tool"]
    done, _ = await spoken(
        tmp_path,
        says,
        row={"goal": 4},
        environments=COUNTER,
        generation={"max_turns": 2},
    )
    assert (done.end_reason, done.environment_reward) == (wire.END_REASON_STOP, 1.0)


async def test_a_row_that_an_environment_cannot_begin_with(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="goal"):
        await spoken(tmp_path, [], row={}, environments=COUNTER)


async def test_what_is_sent_keeps_every_invariant(tmp_path: Path) -> None:
    says = [f"{call('up', by=2)}{END}", f"{call('up', by=3)}{END}"]
    done, _ = await spoken(tmp_path, says, row={"goal": 5}, environments=COUNTER)
    sent = write_rollout(done, rollout_id="g/0")
    assert [broken_invariant(sequence) for sequence in sent.sequences] == [None]
    assert sent.prompt[0].content == "hi Count to 5."
    assert (sent.environment, sent.environment_reward) == ("Counter", 1.0)
    assert (sent.transitions.clean, sent.turns[0].calls[0].text) == (1, "2")
    assert sent.completion[0].tool_calls[0].arguments_json == '{"by": 2}'
    [sequence] = sent.sequences
    mask = np.frombuffer(sequence.trained_mask, np.uint8)
    assert [(s.version, s.end - s.start) for s in sequence.spans] == [(3, 12), (3, 12)]
    assert all(mask[s.start : s.end].all() for s in sequence.spans)
    assert mask.sum() == 24
