"""What is recorded about conversations, against hand counts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.common.recorder import Recorder
from services.generator.conversation import converse
from services.generator.measure import measure
from services.generator.types import Conversation
from services.launcher.tiny_tokenizer import END
from tests.services.generator.fakes import recorder, values
from tests.services.generator.spoken import HERE, Speaker, ask_of, call, ids, setting_of

TOOLS = {"functions": [f"{HERE}:add", f"{HERE}:multiply"]}

DROPS_REASONING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('|')[-1] if m.role == 'assistant' else m.content }}<end>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Of an assistant's earlier messages only what follows the last `|` is rendered."""


@pytest.fixture
def measured() -> Recorder:
    return recorder()


async def conversation(folder: Path, says: Sequence[str], **sections: Any) -> Conversation:
    row = sections.pop("row", None)
    async with setting_of(Speaker(says), folder, **sections) as setting:
        return await converse(setting, ask_of(setting, "q", row=row))


async def test_transitions_with_a_template_that_preserves_prefixes(
    tmp_path: Path, measured: Recorder
) -> None:
    """Two conversations, of 3 turns and of 1: two transitions, both without drift."""
    asked = f"{call('add', a=1, b=2)}{END}"
    long = await conversation(tmp_path, [asked, asked, f"3{END}"], tools=TOOLS)
    short = await conversation(tmp_path, [f"3{END}"], tools=TOOLS)
    measure([long, short], {}, measured)
    found = values(measured)
    assert found["rollout/fork_frac"] == (0, 2)
    assert found["rollout/realign_frac"] == (0, 2)
    assert found["rollout/drift_tokens_mean"] == (0, 2)
    assert found["rollout/drift_tokens_max"] == (1, 0)
    # 16 + 16 + 2 tokens, and 2.
    assert found["rollout/demoted_tokens_frac"] == (0, 36)
    assert found["rollout/samples_per_rollout"] == (2, 2)
    assert found["rollout/turns_mean"] == (2, 4)
    assert found["completions/mean_length"] == (36, 2)


async def test_transitions_with_a_template_that_drops_reasoning(
    tmp_path: Path, measured: Recorder
) -> None:
    """Three turns. Held after the first: a prompt of 4 tokens, then `hmm|`, a call and the end of
    turn, 4 + 15 + 1: the next prompt parts at the reasoning, a drift of 20 and a fork. The second
    turn thinks in 2 tokens and calls: 2 + 15 + 1 are lost in the same way, a fork. So 38 over 2
    transitions, 20 at most."""
    asked = call("add", a=1, b=2)
    says = [f"hmm|{asked}{END}", f"h|{asked}{END}", f"3{END}"]
    done = await conversation(tmp_path, says, tools=TOOLS, template=DROPS_REASONING)
    measure([done], {}, measured)
    found = values(measured)
    assert found["rollout/fork_frac"] == (2, 2)
    assert found["rollout/realign_frac"] == (0, 2)
    assert found["rollout/drift_tokens_mean"] == (38, 2)
    assert found["rollout/drift_tokens_max"] == (1, 20)
    assert found["rollout/demoted_tokens_frac"] == (0, 20 + 18 + 2)
    assert found["rollout/samples_per_rollout"] == (3, 1)


async def test_a_small_drift_is_realigned(tmp_path: Path, measured: Recorder) -> None:
    """`h|` and a call of the shortest kind: with a threshold of 19 tokens, a drift of 18 is put
    right instead, and its 18 tokens are demoted, of 20 sampled ones."""
    says = [f"h|{call('add', a=1, b=2)}{END}", f"3{END}"]
    done = await conversation(
        tmp_path,
        says,
        tools=TOOLS,
        template=DROPS_REASONING,
        generation={"fork_threshold_tokens": 19},
    )
    measure([done], {}, measured)
    found = values(measured)
    assert found["rollout/fork_frac"] == (0, 1)
    assert found["rollout/realign_frac"] == (1, 1)
    assert found["rollout/demoted_tokens_frac"] == (18, 20)
    assert found["rollout/samples_per_rollout"] == (1, 1)


async def test_calls(tmp_path: Path, measured: Recorder) -> None:
    """Turn 1: a good call, one that fails to parse and one of a tool that there is not. Turn 2: a
    call whose arguments do not fit. Then the answer."""
    first = call("add", a=1, b=2) + "<tool_call>{</tool_call>" + call("divide", a=1)
    says = [f"{first}{END}", f"{call('multiply', a=1)}{END}", f"3{END}"]
    done = await conversation(tmp_path, says, tools=TOOLS)
    silent = await conversation(tmp_path, [f"3{END}"], tools=TOOLS)
    measure([done, silent], {}, measured)
    found = values(measured)
    assert found["tools/call_frequency"] == (2, 4)
    assert found["tools/failure_frequency"] == (3, 4)
    assert found["tools/unknown_name_total"] == 1
    assert found["tools/parallel_calls_mean"] == (2, 4)
    assert found["tools/loop_exhausted_frac"] == (0, 2)
    assert (found["tools/add/call_total"], found["tools/add/failure_total"]) == (1, 0)
    assert (found["tools/multiply/call_total"], found["tools/multiply/failure_total"]) == (1, 1)
    # A name that the policy invents never becomes a key.
    assert not [key for key in found if "divide" in key]
    n, _ = _pair(found["tools/latency_s"])
    assert n == 4
    n, tool_s = _pair(found["rollout/tool_s"])
    assert n == 2
    assert tool_s == pytest.approx(sum(c.duration_s for t in done.turns for c in t.calls))


async def test_a_loop_that_is_cut_off_is_counted(tmp_path: Path, measured: Recorder) -> None:
    """Of four conversations that could call tools two are cut off while they ask: one by turns, one
    in the middle of a call."""
    asked = call("add", a=1, b=2)
    limits = {"max_turns": 2}
    for says in ([f"{asked}{END}"] * 2, [asked], ["no end"], [f"3{END}"]):
        done = await conversation(tmp_path, says, tools=TOOLS, generation=limits)
        measure([done], {}, measured)
    found = values(measured)
    assert found["tools/loop_exhausted_frac"] == (2, 4)
    assert found["rollout/ended/turns"] == 1
    assert found["rollout/ended/length"] == 2
    assert found["completions/clipped_ratio"] == (2, 4)


async def test_an_environment(tmp_path: Path, measured: Recorder) -> None:
    environments = {"classes": [{"environment": f"{HERE}:Counter"}]}
    says = [f"{call('up', by=2)}{END}", f"{call('up', by=3)}{END}"]
    done = await conversation(tmp_path, says, row={"goal": 5}, environments=environments)
    measure([done], {}, measured)
    found = values(measured)
    assert found["tools/up/call_total"] == 2
    assert _pair(found["env/reset_s"])[0] == _pair(found["env/reward_s"])[0] == 1
    assert _pair(found["rollout/env_s"])[1] == pytest.approx(done.env_s)
    assert _pair(found["rollout/env_s/Counter"]) == _pair(found["rollout/env_s"])
    assert _pair(found["rollout/tool_s"]) == (1, 0)


async def test_without_tools_there_are_no_keys_of_tools(tmp_path: Path, measured: Recorder) -> None:
    done = await conversation(tmp_path, [f"{call('add', a=1, b=2)}{END}"])
    measure([done], {}, measured)
    found = values(measured)
    assert not [key for key in found if key.startswith(("tools/", "env/"))]
    assert not {"rollout/tool_s", "rollout/env_s", "rollout/fork_frac"} & found.keys()
    assert not [key for key in found if key.startswith("rollout/env_s/")]


async def test_prefixes_recomputed_at_a_switch_are_of_their_turn(
    tmp_path: Path, measured: Recorder
) -> None:
    """Two turns, each with a switch behind its first token: the engine computes that turn's prompt
    and one token anew."""
    asked = f"{call('add', a=1, b=2)}{END}"
    engine = Speaker([asked, f"3{END}"], versions=(3, 4))
    async with setting_of(engine, tmp_path, tools=TOOLS) as setting:
        done = await converse(setting, ask_of(setting, "q"))
    measure([done], {}, measured)
    first, second = (len(each["prompt_ids"]) for each in engine.calls)
    assert second == first + len(ids(f"{asked}<tool>3<end><assistant>"))
    assert values(measured)["perf/weight_sync_reprefill_tokens"] == first + 1 + second + 1
    assert [(s.version, s.start) for s in done.sequences[0].spans] == [
        (3, first),
        (4, first + 1),
        (3, second),
        (4, second + 1),
    ]


def test_failures(measured: Recorder) -> None:
    measure([], {"timeout": 2, "environment": 1}, measured)
    found = values(measured)
    assert found["rollout/failed_total"] == 3
    assert (found["rollout/failed/timeout"], found["rollout/failed/environment"]) == (2, 1)


def _pair(value: Any) -> tuple[float, float]:
    assert isinstance(value, tuple)
    return value
