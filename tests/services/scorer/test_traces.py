"""Marked conversations become traces with their rewards, and go to the recorder within bounds."""

import pytest
from headrace.v1 import rollout_pb2

from services.common import streams
from services.common.traces_config import Traces
from services.scorer import traces
from services.scorer.rewards import Verdict
from services.scorer.wire import write_scored
from tests.services.scorer.groups import group_of
from tests.services.scorer.measured import recorder, values
from tests.services.scorer.test_scoring import judged
from tests.services.scorer.test_service import recipe_of, river
from tests.waiting import until

SCORED = judged(
    Verdict(name="exact", rewards=[1, None, 0]),
    Verdict(name="short", rewards=[0.5, 0.25, None]),
    totals=[1.5, 0.25, 0.0],
)


def marked(*positions: int, texts: tuple[str, ...] = ("a", "b", "c")) -> rollout_pb2.RolloutGroup:
    """A group in which some conversations are to be traced."""
    group = group_of(*texts)
    for position in positions:
        marks = group.rollouts[position].marks
        marks.turn_begins_s.append(0.0)
        marks.sequences.add(texts=["p", "q", "r", "s"])
    return group


def test_a_trace_has_what_was_said_and_what_it_was_worth() -> None:
    group = marked(1)
    scored = write_scored(group, SCORED, scorer="scorer-0")
    [trace] = traces.traces_of(group, scored, per_version=8)
    assert (trace.group_id, trace.row_index, trace.version) == ("0.0.1.0", 17, 3)
    assert (trace.generator, trace.scorer, trace.per_version) == ("generator-0", "scorer-0", 8)
    assert [each.content for each in trace.prompt] == ["Solve."]
    assert trace.rollout == group.rollouts[1]
    assert trace.scored == scored.rollouts[1]
    assert trace.scored.reward == 0.25
    assert not trace.scored.functions[0].HasField("reward")
    assert trace.scored.advantage == SCORED.advantages.advantages[1]


def test_its_prompt_is_its_own_where_an_environment_changed_it() -> None:
    group = marked(0)
    group.rollouts[0].prompt.add(role="user", content="Solve. You see a door.")
    [trace] = traces.traces_of(group, write_scored(group, SCORED, scorer="s"), per_version=8)
    assert [each.content for each in trace.prompt] == ["Solve. You see a door."]
    assert not trace.rollout.prompt
    assert group.rollouts[0].prompt, "the group itself stays as it was"


def test_marks_are_not_handed_on_to_the_trainer() -> None:
    scored = write_scored(marked(0, 1, 2), SCORED, scorer="s")
    assert scored == write_scored(marked(), SCORED, scorer="s")


def test_one_too_large_is_counted_and_the_others_are_sent() -> None:
    group = marked(0, 1, 2)
    group.rollouts[1].completion[0].content = "x" * 5000
    measured = recorder()
    scored = write_scored(group, SCORED, scorer="s")
    traces.send(group, scored, settings=Traces(max_bytes=4096), recorder=measured)
    sent = [trace.rollout.rollout_id for trace in measured._take_traces()]
    assert sent == ["0.0.1.0/0", "0.0.1.0/2"]
    assert values(measured) == {"recorder/trace_dropped/too_large": 1}


async def test_traces_are_sent_when_a_group_was_handed_on(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BLOCK_S", 0.1)
    async with river(valkey_url, recipe_of("HERE:scripted")) as seen:
        untrained = marked(0, texts=("None", "None"))
        untrained.request.group_id = "0.1.1.0"
        await seen.put(marked(0, 2, texts=("1", "0", "1")), untrained)
        # The second ends as a tombstone: nobody scored it.
        await seen.entries("samples", 2)
        await until(lambda: len(seen.recorder._traces) == 2)
        await seen.stop()
        found = seen.recorder._take_traces()
    assert [(each.rollout.rollout_id, each.scored.reward) for each in found] == [
        ("0.0.1.0/0", 1.0),
        ("0.0.1.0/2", 1.0),
    ]
