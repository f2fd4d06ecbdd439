"""A trace at the edge: what is taken from it, and what is refused, without a word of its text."""

import math
from collections.abc import Callable

import pytest
from headrace.v1 import trace_pb2
from structlog.testing import capture_logs

from services.aggregator import traces
from services.aggregator.batch import decode
from services.aggregator.ingest import Ingest
from services.common.traces_config import MAX_TRACE_BYTES
from tests.services.aggregator.traced import request_of, trace_of

SECRET = "the user's own words"


def test_a_trace_is_summed_up() -> None:
    message = trace_of(
        "1.17.2.1/3",
        reward=None,
        rewards={"exact": None, "short": 0.25},
        tools=["add", "add", "no such"],
        end="turns",
    )
    found = traces.decode(message, now_s=1000.0, service="scorer")
    assert (found.rollout_id, found.group_id, found.row_index) == ("1.17.2.1/3", "1.17.2.1", 17)
    assert (found.version, found.per_version, found.at_s) == (3, 8, 999.0)
    assert traces.END_REASONS[found.end_reason] == "turns"
    assert found.summary == {
        "reward": None,
        "rewards": {"exact": None, "short": 0.25},
        "advantage": 0.5,
        "tools": {"add": 2, "no such": 1},
        "newest_version": 4,
        "num_turns": 1,
        "num_generated_tokens": 2,
        "num_trained_tokens": 2,
        "duration_s": 2.5,
        "generator": "generator-0",
        "scorer": "scorer-0",
    }
    assert trace_pb2.RolloutTrace.FromString(found.body) == message


def test_names_that_a_policy_invents_are_bounded() -> None:
    message = trace_of(tools=[f"{number}-{'x' * 1000}" for number in range(500)] + ["add"] * 2)
    tools = traces.decode(message, now_s=1000.0, service="scorer").summary["tools"]
    assert len(tools) == traces.MAX_NAMES
    assert tools["add"] == 2
    assert max(map(len, tools)) == traces.MAX_NAME


Change = Callable[[trace_pb2.RolloutTrace], object]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: setattr(t, "group_id", "x"), "a group_id is"),
        (lambda t: setattr(t, "group_id", "0.1.1.1"), "a rollout_id is group_id/generation"),
        (lambda t: setattr(t.rollout, "rollout_id", "0.0.1.1/x"), "a rollout_id is"),
        (lambda t: setattr(t.rollout, "rollout_id", "0.0.1.1/07"), "a rollout_id is"),
        (lambda t: setattr(t.scored, "rollout_id", "0.0.1.1/1"), "another conversation"),
        (lambda t: setattr(t, "row_index", 2**64 - 1), "too large"),
        (lambda t: setattr(t, "version", 2**63), "too large"),
        (lambda t: setattr(t.rollout, "end_reason", 0), "0 is no end reason"),
        (lambda t: setattr(t.rollout, "end_reason", 77), "77 is no end reason"),
        (lambda t: setattr(t, "at_s", 1000.5), "is after now_s"),
        (lambda t: setattr(t, "at_s", math.nan), "is after now_s"),
        (lambda t: setattr(t.scored, "advantage", math.nan), "NaN or infinite"),
        (lambda t: setattr(t.scored, "reward", math.inf), "NaN or infinite"),
        (lambda t: setattr(t.scored.functions[0], "reward", math.nan), "NaN or infinite"),
        (lambda t: setattr(t.rollout.turns[0], "duration_s", math.inf), "NaN or infinite"),
        (lambda t: t.rollout.marks.turn_begins_s.__setitem__(0, math.nan), "NaN or infinite"),
        (lambda t: t.rollout.ClearField("marks"), "its marks"),
        (lambda t: t.rollout.marks.turn_begins_s.append(1.0), "its marks"),
        (lambda t: t.rollout.marks.sequences[0].texts.pop(), "its marks"),
        (lambda t: t.rollout.marks.sequences.add(), "its marks"),
        (lambda t: setattr(t.rollout.sequences[0], "logprobs", b"1234"), "sequence 0: "),
        (lambda t: setattr(t.rollout.completion[0], "content", "x" * MAX_TRACE_BYTES), "larger"),
    ],
)
def test_what_breaks_a_rule_is_rejected_and_the_others_are_taken(change: Change, why: str) -> None:
    broken, good = trace_of(text=SECRET), trace_of("0.0.1.1/1")
    change(broken)
    batch = decode(request_of(broken, good))
    assert [each.rollout_id for each in batch.traces] == ["0.0.1.1/1"]
    [rejected] = batch.rejected
    assert (rejected.key, rejected.reason) == ("traces", "bad_trace")
    assert why in rejected.detail
    assert SECRET not in rejected.detail


def test_only_a_scorer_sends_traces() -> None:
    batch = decode(request_of(trace_of(), service="generator"))
    assert batch.traces == ()
    assert batch.rejected[0].detail == "only scorers send traces, not a generator"


def test_nothing_that_was_said_is_logged(ingest: Ingest) -> None:
    bad = trace_of("0.0.1.1/1", text=SECRET)
    bad.scored.advantage = math.nan
    with capture_logs() as logs:
        receipt = ingest.take(decode(request_of(trace_of(text=SECRET), bad)), now_s=2e9)
    assert len(receipt.rejected) == 1
    assert SECRET not in repr((logs, receipt))
