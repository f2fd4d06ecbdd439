"""Groups of conversations: what fails shrinks them, what is dead ends them, and what they say."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from headrace.v1 import rollout_pb2 as wire

from services.common.recorder import Recorder
from services.generator.conversation import Setting
from services.generator.group import Group, GroupRunner, seed_of
from services.generator.measure import END_NAMES
from services.generator.slots import Slots
from services.generator.template import ChatTemplate
from services.generator.types import EngineDead, Generated, GenerateFailed
from services.generator.wire import Malformed, write_group
from services.launcher import tiny_tokenizer
from tests.services.generator.fakes import (
    FakeEngine,
    at_once,
    generated,
    recipe_of,
    recorder,
    request_of,
    values,
)
from tests.waiting import until

Answer = Callable[[int], Awaitable[Generated]]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.build_tokenizer().save_pretrained(folder)
    return ChatTemplate(folder)


@pytest.fixture
def measured() -> Recorder:
    return recorder()


RunnerOf = Callable[..., tuple[GroupRunner, FakeEngine]]


@pytest.fixture
def runner_of(template: ChatTemplate, measured: Recorder) -> RunnerOf:
    def make(
        answer: Answer = at_once, *, slots: int = 8, timeout_s: float = 60.0
    ) -> tuple[GroupRunner, FakeEngine]:
        recipe = recipe_of(generation={"timeout_s": timeout_s})
        engine = FakeEngine(answer)
        setting = Setting(engine, template, recipe)
        return GroupRunner(setting, Slots(slots), measured), engine

    return make


def sent(request: wire.RolloutRequest, group: Group, *, producer: str = "g") -> wire.RolloutGroup:
    assert group.versions is not None
    return write_group(
        request,
        group.conversations,
        failed=group.failed,
        versions=group.versions,
        producer=producer,
    )


async def hang(call: int) -> Generated:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_group_has_all_conversations_of_its_request(runner_of: RunnerOf) -> None:
    runner, engine = runner_of()
    request = request_of("3.1.4.1", num=4)
    group = await runner.run(request)
    assert (sorted(group.conversations), group.failed) == ([0, 1, 2, 3], {})
    assert runner.unfinished == 0
    seeds = [seed_of("r", "3.1.4.1", generation, turn=0) for generation in range(4)]
    assert [call["seed"] for call in engine.calls] == seeds
    assert {call["temperature"] for call in engine.calls} == {0.5}
    message = sent(request, group, producer="generator-0")
    assert message.request == request
    assert [r.rollout_id for r in message.rollouts] == [f"3.1.4.1/{i}" for i in range(4)]
    assert message.producer == "generator-0"


async def test_conversations_that_fail_shrink_the_group(
    runner_of: RunnerOf, measured: Recorder
) -> None:
    async def answer(call: int) -> Generated:
        if call == 0:
            raise RuntimeError("the engine refuses this one")
        if call == 2:
            return await hang(call)
        return generated(versions=(1,))

    runner, _ = runner_of(answer, timeout_s=0.05)
    group = await runner.run(request_of(num=4))
    assert sorted(group.conversations) == [1, 3]
    assert group.failed == {"error": 1, "timeout": 1}
    assert sent(request_of(), group).failed == {"error": 1, "timeout": 1}
    runner.measure(group)
    found = values(measured)
    assert found["rollout/failed_total"] == 2
    assert (found["rollout/failed/error"], found["rollout/failed/timeout"]) == (1, 1)
    assert found["rollout/ended/stop"] == 2


async def test_time_in_the_queue_for_a_slot_is_not_the_conversations(runner_of: RunnerOf) -> None:
    """One slot: the first conversation takes all of its time, and the others still have theirs."""

    async def answer(call: int) -> Generated:
        return await hang(call) if call == 0 else generated(versions=(1,))

    runner, _ = runner_of(answer, slots=1, timeout_s=0.05)
    group = await runner.run(request_of(num=4))
    assert (sorted(group.conversations), group.failed) == ([1, 2, 3], {"timeout": 1})


async def test_a_dead_engine_is_no_failed_conversation(runner_of: RunnerOf) -> None:
    async def answer(call: int) -> Generated:
        if call == 1:
            raise EngineDead("gone")
        return generated(versions=(1,))

    runner, _ = runner_of(answer)
    with pytest.raises(EngineDead):
        await runner.run(request_of(num=4))


async def test_a_cancelled_group_leaves_nothing_running(runner_of: RunnerOf) -> None:
    runner, engine = runner_of(hang)
    task = asyncio.create_task(runner.run(request_of(num=4)))
    await until(lambda: len(engine.calls) == 4)
    assert runner.unfinished == 4
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: runner.unfinished == 0)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others


async def test_a_prompt_beyond_the_context_never_reaches_the_engine(runner_of: RunnerOf) -> None:
    runner, engine = runner_of()
    group = await runner.run(request_of(content="9" * 64, num=4))
    assert group == Group({}, {"prompt_too_long": 4})
    assert engine.calls == []


async def test_a_completion_ends_where_the_context_does(runner_of: RunnerOf) -> None:
    """64 tokens of context, a prompt of 58 characters and 3 tokens around it: 3 are left of 8."""
    runner, engine = runner_of()
    await runner.run(request_of(content="9" * 58, num=2, max_tokens=8))
    assert [len(call["prompt_ids"]) for call in engine.calls] == [61, 61]
    assert [call["max_tokens"] for call in engine.calls] == [3, 3]


async def test_the_oldest_token_decides_how_stale_a_group_is(runner_of: RunnerOf) -> None:
    """C21: begun at version 3, syncs to 4 and 5 while it runs. At version 8 it is 5 stale."""

    async def answer(call: int) -> Generated:
        return generated([7, 8, 9], versions=(3, 4, 5) if call == 1 else (5,))

    runner, _ = runner_of(answer)
    message = sent(request_of(), await runner.run(request_of()))
    assert (message.oldest_version, message.newest_version) == (3, 5)
    prompt_tokens = message.rollouts[1].turns[0].num_prompt_tokens
    spans = [(s.version, s.start, s.end) for s in message.rollouts[1].sequences[0].spans]
    begin = prompt_tokens
    assert spans == [(3, begin, begin + 1), (4, begin + 1, begin + 2), (5, begin + 2, begin + 3)]


async def test_prefixes_recomputed_at_a_switch_are_counted(
    runner_of: RunnerOf, measured: Recorder
) -> None:
    """One conversation of prompt p and three tokens by versions 3, 4, 5: p + 1 and p + 2 tokens."""

    async def answer(call: int) -> Generated:
        return generated([7, 8, 9], versions=(3, 4, 5) if call == 0 else (5,))

    runner, engine = runner_of(answer)
    runner.measure(await runner.run(request_of(num=2)))
    prompt_tokens = len(engine.calls[0]["prompt_ids"])
    found = values(measured)
    assert found["perf/weight_sync_reprefill_tokens"] == 2 * prompt_tokens + 3
    assert found["completions/mean_length"] == (6, 2)
    assert found["rollout/generated_tok_s"] == 6
    assert found["completions/clipped_ratio"] == (0, 2)


async def test_all_that_was_generated_counts_and_only_what_is_whole_is_a_completion(
    runner_of: RunnerOf, measured: Recorder
) -> None:
    """Two conversations of 3 tokens, one that times out and one that fails after 5 tokens each:
    16 tokens were generated; completions have 3."""

    async def answer(call: int) -> Generated:
        if call == 0:
            return await hang(call)
        if call == 1:
            raise RuntimeError("no")
        return generated([7, 8, 9], versions=(1,))

    runner, engine = runner_of(answer, timeout_s=0.05)
    engine.tokens_cut_off = 5
    group = await runner.run(request_of(num=4))
    assert values(measured) == {"rollout/generated_tok_s": 16}
    runner.measure(group)
    found = values(measured)
    assert found["rollout/generated_tok_s"] == 16
    assert found["completions/mean_length"] == (6, 2)
    assert found["rollout/failed_total"] == 2


async def test_a_group_that_is_lost_has_generated_its_tokens_all_the_same(
    runner_of: RunnerOf, measured: Recorder
) -> None:
    runner, engine = runner_of(hang)
    engine.tokens_cut_off = 5
    task = asyncio.create_task(runner.run(request_of(num=4)))
    await until(lambda: len(engine.calls) == 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: runner.unfinished == 0)
    assert values(measured) == {"rollout/generated_tok_s": 20}


async def test_no_failure_is_a_count_of_0(runner_of: RunnerOf, measured: Recorder) -> None:
    runner, _ = runner_of()
    runner.measure(await runner.run(request_of(num=2)))
    found = values(measured)
    assert found["rollout/failed_total"] == 0
    assert not [key for key in found if key.startswith("rollout/failed/")]


SEED = 5197808796259262223
"""Of run demo, group 0.17.1.1, generation 3, turn 0."""


def test_seeds_are_the_same_everywhere_and_differ_by_all_they_are_of() -> None:
    """The number is part of the contract: another release must give the same sample."""
    assert seed_of("demo", "0.17.1.1", 3, turn=0) == SEED
    others = [
        seed_of("demo2", "0.17.1.1", 3, turn=0),
        seed_of("demo", "0.17.1.2", 3, turn=0),
        seed_of("demo", "0.17.1.1", 4, turn=0),
        seed_of("demo", "0.17.1.1", 3, turn=1),
    ]
    assert len({SEED, *others}) == 5
    assert all(0 <= seed < 2**63 for seed in others)


def test_end_reasons_have_names() -> None:
    named = set(wire.EndReason.values()) - {wire.END_REASON_UNSPECIFIED}
    assert set(END_NAMES) == named


async def test_failures_say_why(template: ChatTemplate, measured: Recorder) -> None:
    """One of each reason that a request can have by itself; the messages name what to look at."""

    async def answer(call: int) -> Generated:
        raise GenerateFailed("vLLM failed at a request: KeyError(7)")

    setting = Setting(FakeEngine(answer), template, recipe_of())
    runner = GroupRunner(setting, Slots(8), measured)
    group = await runner.run(request_of(num=2))
    assert (group.failed, group.why) == (
        {"error": 2},
        {"error": "vLLM failed at a request: KeyError(7)"},
    )
    assert values(measured)["rollout/vllm_retry_total"] == 4
    narrated = request_of(num=2)
    narrated.messages[0].role = "narrator"
    group = await runner.run(narrated)
    assert group.failed == {"template": 2}
    assert "unknown role: narrator" in group.why["template"]


@pytest.mark.parametrize("row_json", ["{", "[1]", '"x"'])
async def test_a_request_that_cannot_be_read_is_nobodys_failure(
    runner_of: RunnerOf, row_json: str
) -> None:
    runner, engine = runner_of()
    request = request_of()
    request.row_json = row_json
    with pytest.raises(Malformed, match="row_json"):
        await runner.run(request)
    assert (engine.calls, runner.unfinished) == ([], 0)


async def test_a_group_without_a_trained_token_has_no_versions(runner_of: RunnerOf) -> None:
    async def answer(call: int) -> Generated:
        return generated([])

    runner, _ = runner_of(answer)
    group = await runner.run(request_of(num=2))
    assert (len(group.conversations), group.versions) == (2, None)
