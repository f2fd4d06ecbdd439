import copy
import json
import math
from collections.abc import Callable

import pytest
from headrace.v1 import rollout_pb2, sample_pb2

from services.scorer import wire
from services.scorer.advantages import group_advantages
from services.scorer.rewards import Verdict
from services.scorer.scoring import Judgement
from tests.services.scorer.groups import drops_reasoning, group_of, sequence


def test_a_group_is_read_back_as_it_was_written() -> None:
    group = group_of("a", "b")
    assert wire.read_group(group.SerializeToString(), group_id="0.0.1.0") == group


def test_unknown_fields_are_no_error() -> None:
    # Field 1000, as a later version might add it.
    data = group_of("a", "b").SerializeToString() + b"\xc2\x3e\x03abc"
    assert len(wire.read_group(data, group_id="0.0.1.0").rollouts) == 2


@pytest.mark.parametrize("data", [b"\xff\xff not protobuf", b"", b"\x12\xff"])
def test_bytes_that_are_no_group_are_malformed(data: bytes) -> None:
    with pytest.raises(wire.Malformed):
        wire.read_group(data, group_id="0.0.1.0")


def test_bytes_of_another_group_are_malformed() -> None:
    with pytest.raises(wire.Malformed, match=r"of group 'x', its bytes of '0\.0\.1\.0'"):
        wire.read_group(group_of("a").SerializeToString(), group_id="x")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (sequence(mask=(0, 0, 1)), r"have \(16, 3, 16\) bytes"),
        (sequence(logprobs=(0, 0, -0.1)), r"have \(16, 4, 12\) bytes"),
        (sequence(token_ids=(1, 2, 3)), r"have \(12, 4, 16\) bytes"),
        (rollout_pb2.Sequence(token_ids=b"12345", trained_mask=b"\0", logprobs=b"0000"), "bytes"),
        (sequence((), (), ()), "no tokens"),
        (sequence(mask=(1, 0, 1, 1)), "first token"),
        (sequence(mask=(0, 0, 2, 1)), "other than 0 and 1"),
        (sequence(logprobs=(0, 0, -0.1, math.nan)), "not finite"),
        (sequence(logprobs=(0, 0, -math.inf, 0)), "not finite"),
    ],
)
def test_a_broken_sequence_is_malformed_and_named(broken: rollout_pb2.Sequence, why: str) -> None:
    group = group_of("a", "b")
    group.rollouts[1].sequences.add().CopyFrom(broken)
    with pytest.raises(wire.Malformed, match=rf"rollout '0.0.1.0/1', sequence 1: .*{why}"):
        wire.check_group(group)


def test_log_probabilities_of_context_may_be_anything() -> None:
    group = group_of("a")
    group.rollouts[0].sequences.add().CopyFrom(sequence(logprobs=(math.nan, 0, -0.1, -0.2)))
    wire.check_group(group)


def test_a_rollout_that_is_there_twice_is_malformed() -> None:
    group = group_of("a", "b")
    group.rollouts[1].rollout_id = group.rollouts[0].rollout_id
    with pytest.raises(wire.Malformed, match="twice"):
        wire.check_group(group)


@pytest.mark.parametrize("row_json", ["{", "[1]", "7", '"text"'])
def test_a_row_that_is_no_object_is_malformed(row_json: str) -> None:
    group = group_of("a")
    group.request.row_json = row_json
    with pytest.raises(wire.Malformed, match="row_json"):
        wire.read_conversations(group)


def test_tool_calls_results_and_reasoning_are_read_where_there_are_any() -> None:
    group = group_of("The tool says 7.")
    call = rollout_pb2.ToolCall(id="call_0", name="add", arguments_json='{"a": 3, "b": [4]}')
    asks = rollout_pb2.ChatMessage(
        role="assistant", content="Adding.", tool_calls=[call], reasoning="A sum."
    )
    result = rollout_pb2.ChatMessage(role="tool", content="7", tool_call_id="call_0", name="add")
    broken = rollout_pb2.ChatMessage(role="tool", content="that was no call")
    group.rollouts[0].completion.insert(0, broken)
    group.rollouts[0].completion.insert(0, result)
    group.rollouts[0].completion.insert(0, asks)
    # A prompt may show how a tool is used.
    group.request.messages.insert(0, asks)
    read_call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 3, "b": [4]}},
    }
    read_asks = {
        "role": "assistant",
        "content": "Adding.",
        "reasoning_content": "A sum.",
        "tool_calls": [read_call],
    }
    [member] = wire.read_conversations(group).members
    assert member.completion == [
        read_asks,
        {"role": "tool", "content": "7", "tool_call_id": "call_0", "name": "add"},
        {"role": "tool", "content": "that was no call", "tool_call_id": "", "name": ""},
        {"role": "assistant", "content": "The tool says 7."},
    ]
    assert member.prompt == [read_asks, {"role": "user", "content": "Solve."}]


def test_a_conversation_s_own_prompt_goes_before_the_request_s() -> None:
    group = group_of("a", "b", "c")
    for number, rollout in enumerate(group.rollouts[:2]):
        rollout.prompt.add(role="user", content=f"Solve. {number}")
        rollout.environment = "Guess"
    group.rollouts[1].environment_reward = 0.0
    conversations = wire.read_conversations(group)
    prompts = [member.prompt[0]["content"] for member in conversations.members]
    assert prompts == ["Solve. 0", "Solve. 1", "Solve."]
    arguments = conversations.arguments()
    assert arguments["environments"] == ["Guess", "Guess", ""]
    # An absent reward is not a 0.
    assert arguments["environment_rewards"] == [None, 0.0, None]


def test_end_reasons_are_words() -> None:
    reasons = rollout_pb2.EndReason.values()
    group = group_of(*map(str, reasons))
    for rollout, reason in zip(group.rollouts, reasons, strict=True):
        rollout.end_reason = reason
    read = wire.read_conversations(group).arguments()["end_reasons"]
    assert read == ["", "stop", "length", "context", "turns", "time"]
    group.rollouts[2].end_reason = 99  # type: ignore[assignment]
    with pytest.raises(wire.Malformed, match=r"'0\.0\.1\.0/2': there is no end reason 99"):
        wire.read_conversations(group)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("", "are not JSON"),
        ('{"a": 1,', "are not JSON"),
        ("[1, 2]", "are a list, not an object"),
        ("null", "are a NoneType, not an object"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "nested deeper than 100"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "are not JSON: maximum recursion depth"),
    ],
)
def test_arguments_that_are_no_object_are_malformed(arguments: str, why: str) -> None:
    group = group_of("a", "b")
    call = rollout_pb2.ToolCall(id="call_3", name="f", arguments_json=arguments)
    group.rollouts[1].completion[0].tool_calls.append(call)
    with pytest.raises(wire.Malformed, match=rf"'0.0.1.0/1': the arguments of .*'call_3'.* {why}"):
        wire.read_conversations(group)


def test_the_deepest_arguments_can_be_copied_and_sent() -> None:
    group = group_of("a")
    arguments = '{"a": ' + "[" * 99 + "]" * 99 + "}"
    call = rollout_pb2.ToolCall(id="c", name="f", arguments_json=arguments)
    group.rollouts[0].completion[0].tool_calls.append(call)
    given = wire.read_conversations(group).arguments()
    assert json.loads(json.dumps(copy.deepcopy(given))) == given


def judgement(rewards: list[float | None], *, name: str = "f") -> Judgement:
    return Judgement(
        verdicts=[Verdict(name=name, rewards=rewards)],
        totals=rewards,
        advantages=group_advantages(rewards),
        enough=True,
    )


def written(change: Callable[[rollout_pb2.RolloutGroup], None]) -> sample_pb2.ScoredGroup:
    group = group_of("a", "b", "c", "d", num_sequences=2)
    change(group)
    scored = wire.write_scored(group, judgement([1, None, 0, 1]), scorer="scorer-0")
    return sample_pb2.ScoredGroup.FromString(scored.SerializeToString())


def test_an_abstention_is_absent_on_the_wire_and_a_zero_is_not() -> None:
    scored = written(lambda group: None)
    assert [rollout.HasField("reward") for rollout in scored.rollouts] == [True, False, True, True]
    given = [rollout.functions[0].HasField("reward") for rollout in scored.rollouts]
    assert given == [True, False, True, True]
    assert scored.rollouts[2].reward == 0.0
    advantages = [rollout.advantage for rollout in scored.rollouts]
    assert advantages == pytest.approx([0.70711, 0, -1.41421, 0.70711], abs=1e-5)


def test_every_sequence_of_a_scored_rollout_is_a_sample_with_its_advantage() -> None:
    scored = written(lambda group: None)
    assert [(sample.rollout_id, sample.index) for sample in scored.samples] == [
        (f"0.0.1.0/{rollout}", index) for rollout in (0, 2, 3) for index in (0, 1)
    ]
    by_rollout = {rollout.rollout_id: rollout.advantage for rollout in scored.rollouts}
    assert all(sample.advantage == by_rollout[sample.rollout_id] for sample in scored.samples)
    assert all(sample.sequence == sequence() for sample in scored.samples)


def test_a_forked_conversation_is_one_reward_and_a_sample_a_sequence() -> None:
    group = group_of("a", "b")
    del group.rollouts[0].sequences[:]
    group.rollouts[0].sequences.extend(drops_reasoning())  # C07 a
    wire.check_group(group)
    scored = wire.write_scored(group, judgement([1, 0]), scorer="scorer-0")
    assert [rollout.reward for rollout in scored.rollouts] == [1, 0]
    samples = [
        (sample.rollout_id, len(sample.sequence.trained_mask), sum(sample.sequence.trained_mask))
        for sample in scored.samples
    ]
    assert samples == [("0.0.1.0/0", 1513, 1510), ("0.0.1.0/0", 20, 5), ("0.0.1.0/1", 4, 2)]
    # Not [0.5, 0.5, -1]: a second sequence is no second vote in the baseline.
    advantages = [sample.advantage for sample in scored.samples]
    assert advantages == pytest.approx([1, 1, -1], abs=1e-5)
    assert advantages[0] == advantages[1]


def test_a_conversation_without_sequences_is_in_the_baseline() -> None:
    group = group_of("a", "b", "c")
    del group.rollouts[2].sequences[:]
    scored = wire.write_scored(group, judgement([1, 1, 0]), scorer="scorer-0")
    advantages = [rollout.advantage for rollout in scored.rollouts]
    assert advantages == pytest.approx([0.70711, 0.70711, -1.41421], abs=1e-5)
    assert [sample.rollout_id for sample in scored.samples] == ["0.0.1.0/0", "0.0.1.0/1"]


def test_what_a_conversation_generated_is_passed_on() -> None:
    group = group_of("a", "b", "c")
    for rollout, finishes in zip(group.rollouts, (["stop"], ["stop", "length"], []), strict=True):
        del rollout.turns[:]
        for finish in finishes:
            rollout.turns.add(num_generated_tokens=5, finish_reason=finish)
    scored = wire.write_scored(group, judgement([1, 1, 0]), scorer="scorer-0")
    found = [(each.num_generated_tokens, each.clipped) for each in scored.rollouts]
    assert found == [(5, False), (10, True), (0, False)]


def test_identity_and_versions_are_passed_on() -> None:
    scored = written(lambda group: None)
    assert (scored.group_id, scored.row_index) == ("0.0.1.0", 17)
    assert (scored.oldest_version, scored.newest_version) == (3, 4)
    assert (scored.generator, scored.scorer) == ("generator-0", "scorer-0")
    assert (scored.zero_signal, scored.evaluation) == (False, False)
    assert scored.rollouts[0].end_reason == rollout_pb2.END_REASON_STOP


def test_evaluation_has_no_samples() -> None:
    def evaluation(group: rollout_pb2.RolloutGroup) -> None:
        group.request.evaluation = True

    assert written(evaluation).evaluation
    assert not written(evaluation).samples
