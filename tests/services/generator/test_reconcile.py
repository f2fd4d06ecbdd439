"""Worked transitions with all their figures, and the laws over random chains of turns."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise, takewhile

import numpy as np
import pytest
from headrace.v1 import rollout_pb2 as wire
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from services.common.sequences import broken_invariant
from services.generator.reconcile import common_prefix, to_sequences
from services.generator.types import Conversation, SampledTurn, Span, Transitions
from services.generator.types import Sequence as TrainSequence
from services.generator.wire import write_rollout


def turn(
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    versions: Sequence[int] | None = None,
) -> SampledTurn:
    """A turn; `versions` has one for each sampled token."""
    versions = versions or [3] * len(token_ids)
    spans, end = [], 0
    for version, tokens in groupby(versions):
        start, end = end, end + len(list(tokens))
        spans.append(Span(version, start, end))
    if logprobs is None:
        logprobs = [-0.5] * len(token_ids)
    return SampledTurn(
        tuple(prompt_ids), tuple(token_ids), np.array(logprobs, np.float32), tuple(spans)
    )


def ids(sequence: TrainSequence) -> list[int]:
    return [int(token) for token in sequence.token_ids]


def mask(sequence: TrainSequence) -> list[int]:
    return [int(trained) for trained in sequence.trained_mask]


def plain_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix, element by element."""
    pairs = zip(first, second, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


C06 = (
    turn([1, 2, 3], [10, 11, 12, 13], [-0.1, -0.2, -0.3, -0.4]),
    turn([1, 2, 3, 10, 11, 99, 50, 51], [20, 21], [-0.5, -0.6], versions=[4, 4]),
)


@pytest.mark.parametrize("threshold", [3, 16, 1024])
def test_c06_a_small_drift_within_the_last_answer_is_cut_where_it_begins(threshold: int) -> None:
    [row], transitions = to_sequences(C06, fork_threshold_tokens=threshold)
    assert ids(row) == [1, 2, 3, 10, 11, 99, 50, 51, 20, 21]
    assert mask(row) == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    expected = [0, 0, 0, -0.1, -0.2, 0, 0, 0, -0.5, -0.6]
    assert row.logprobs.tolist() == np.array(expected, np.float32).tolist()
    assert row.spans == (Span(3, 3, 5), Span(4, 8, 10))
    assert transitions == Transitions(
        realigned=1, demoted_tokens=2, drift_tokens=2, max_drift_tokens=2
    )


@pytest.mark.parametrize("threshold", [2, 1, 0])
def test_c06_a_drift_of_the_threshold_forks(threshold: int) -> None:
    [first, second], transitions = to_sequences(C06, fork_threshold_tokens=threshold)
    assert ids(first) == [1, 2, 3, 10, 11, 12, 13]
    assert mask(first) == [0, 0, 0, 1, 1, 1, 1]
    assert first.spans == (Span(3, 3, 7),)
    assert ids(second) == [1, 2, 3, 10, 11, 99, 50, 51, 20, 21]
    assert mask(second) == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]  # 10 and 11 are not trained twice
    assert second.logprobs[:8].tolist() == [0] * 8
    assert second.spans == (Span(4, 8, 10),)
    assert transitions == Transitions(forked=1, drift_tokens=2, max_drift_tokens=2)


@pytest.mark.parametrize(
    ("drift", "shapes", "kind"),
    [
        (1023, [(9, 5)], Transitions(realigned=1, demoted_tokens=1023)),
        (1024, [(1029, 1026), (9, 3)], Transitions(forked=1)),
    ],
)
def test_c06_boundary(drift: int, shapes: list[tuple[int, int]], kind: Transitions) -> None:
    chain = (
        turn([1, 2, 3], [10, 11, *range(100, 100 + drift)]),
        turn([1, 2, 3, 10, 11, 50], [20, 21, 22]),
    )
    rows, transitions = to_sequences(chain, fork_threshold_tokens=1024)
    assert [(len(row.token_ids), int(row.trained_mask.sum())) for row in rows] == shapes
    assert transitions == replace(kind, drift_tokens=drift, max_drift_tokens=drift)


@pytest.mark.parametrize("threshold", [16, 1024])
def test_c07_a_template_that_drops_the_reasoning_forks(threshold: int) -> None:
    prompt, reasoning, call = [1, 2, 3], list(range(1000, 2500)), list(range(10, 20))
    seen = [*prompt, *call, 50, 51]
    chain = (turn(prompt, reasoning + call), turn(seen, [20, 21, 22, 23, 24]))
    rows, transitions = to_sequences(chain, fork_threshold_tokens=threshold)
    shapes = [(len(row.token_ids), int(row.trained_mask.sum())) for row in rows]
    assert shapes == [(1513, 1510), (20, 5)]
    # What the sampler saw, without the reasoning; and what the first row trained is context.
    assert ids(rows[1])[:15] == seen
    assert mask(rows[1])[:15] == [0] * 15
    assert transitions == Transitions(forked=1, drift_tokens=1510, max_drift_tokens=1510)
    assert (transitions.forked, transitions.total) == (1, 1)


@pytest.mark.parametrize("threshold", [0, 5, 7, 1024, 10**6])
def test_c07_b_a_change_before_the_last_answer_forks_at_any_threshold(threshold: int) -> None:
    chain = (C06[0], turn([1, 9, 3, 10, 11, 12, 13, 50], [20]))
    [first, second], transitions = to_sequences(chain, fork_threshold_tokens=threshold)
    assert (ids(first), mask(first)) == ([1, 2, 3, 10, 11, 12, 13], [0, 0, 0, 1, 1, 1, 1])
    assert (ids(second), mask(second)) == ([1, 9, 3, 10, 11, 12, 13, 50, 20], [0] * 8 + [1])
    assert transitions == Transitions(forked=1, drift_tokens=6, max_drift_tokens=6)


def test_c08_a_history_that_became_shorter() -> None:
    chain = (
        turn([1, 2, 3], [10, 11, 12], [-0.1, -0.2, -0.3]),
        turn([1, 2, 3, 10], [20, 21], [-0.5, -0.6]),
    )
    [row], transitions = to_sequences(chain, fork_threshold_tokens=16)
    assert ids(row) == [1, 2, 3, 10, 20, 21]
    assert mask(row) == [0, 0, 0, 1, 1, 1]
    expected = np.array([0, 0, 0, -0.1, -0.5, -0.6], np.float32)
    assert row.logprobs.tolist() == expected.tolist()
    assert row.spans == (Span(3, 3, 4), Span(3, 4, 6))
    assert transitions == Transitions(
        realigned=1, demoted_tokens=2, drift_tokens=2, max_drift_tokens=2
    )


def test_one_turn_has_no_transition() -> None:
    [row], transitions = to_sequences([C06[0]], fork_threshold_tokens=16)
    assert (ids(row), mask(row)) == ([1, 2, 3, 10, 11, 12, 13], [0, 0, 0, 1, 1, 1, 1])
    assert (row.token_ids.dtype, row.trained_mask.dtype) == (np.uint32, np.uint8)
    assert row.logprobs.dtype == np.float32
    assert transitions == Transitions()
    assert transitions.total == 0


def test_four_turns_counted_by_hand() -> None:
    """CLEAN, REALIGN, FORK at a threshold of 3: drifts 0, 1 and 11; of 3 + 4 + 2 + 1 = 10 sampled
    tokens 1 is demoted and 9 are trained, 8 of them in the first row."""
    chain = (
        turn([1, 2], [10, 11, 12], [-1, -2, -3], versions=[4, 4, 4]),
        turn([1, 2, 10, 11, 12, 50], [20, 21, 22, 23], [-4, -5, -6, -7], versions=[4, 4, 5, 5]),
        turn([1, 2, 10, 11, 12, 50, 20, 21, 22, 99, 51], [30, 31], [-8, -9], versions=[5, 5]),
        turn([1, 2, 12, 50, 20, 21, 22, 99, 51, 30, 31, 52], [40], [-10], versions=[6]),
    )
    [first, second], transitions = to_sequences(chain, fork_threshold_tokens=3)
    assert ids(first) == [1, 2, 10, 11, 12, 50, 20, 21, 22, 99, 51, 30, 31]
    assert mask(first) == [0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1]
    assert first.logprobs.tolist() == [0, 0, -1, -2, -3, 0, -4, -5, -6, 0, 0, -8, -9]
    # Turn 2's second span lost its last token.
    assert first.spans == (Span(4, 2, 5), Span(4, 6, 8), Span(5, 8, 9), Span(5, 11, 13))
    assert ids(second) == [1, 2, 12, 50, 20, 21, 22, 99, 51, 30, 31, 52, 40]
    assert mask(second) == [0] * 12 + [1]
    assert second.logprobs.tolist() == [0] * 12 + [-10]
    assert second.spans == (Span(6, 12, 13),)
    assert transitions == Transitions(
        clean=1, realigned=1, forked=1, demoted_tokens=1, drift_tokens=12, max_drift_tokens=11
    )
    assert transitions.total == 3


def test_a_span_that_lost_all_its_tokens_is_gone() -> None:
    chain = (turn([1], [10, 11, 12], versions=[3, 4, 5]), turn([1, 10, 99], [20], versions=[6]))
    [row], transitions = to_sequences(chain, fork_threshold_tokens=16)
    assert row.spans == (Span(3, 1, 2), Span(6, 3, 4))
    assert transitions.demoted_tokens == 2


def test_a_version_that_sampled_nothing_has_no_span() -> None:
    spans = (Span(3, 0, 0), Span(4, 0, 1), Span(5, 1, 1))
    [row], _ = to_sequences([replace(turn([1], [10]), spans=spans)], fork_threshold_tokens=16)
    assert row.spans == (Span(4, 1, 2),)


def test_a_whole_short_answer_can_be_demoted() -> None:
    chain = (turn([1, 2], [10, 11]), turn([1, 2, 99], [20]))
    [row], transitions = to_sequences(chain, fork_threshold_tokens=3)
    assert (ids(row), mask(row)) == ([1, 2, 99, 20], [0, 0, 0, 1])
    assert (transitions.realigned, transitions.demoted_tokens) == (1, 2)


def test_sequences_without_a_trained_token_are_left_out_and_counted() -> None:
    # Nothing sampled, so any drift lies before the last answer: the empty sequence is finished.
    chain = (turn([1, 2], []), turn([1, 9], [20]))
    [row], transitions = to_sequences(chain, fork_threshold_tokens=16)
    assert (ids(row), mask(row)) == ([1, 9, 20], [0, 0, 1])
    assert transitions == Transitions(
        forked=1, drift_tokens=1, max_drift_tokens=1, untrained_sequences=1
    )
    # Demoted altogether, and nothing sampled after it.
    rows, transitions = to_sequences(
        [turn([1, 2], [10]), turn([1, 2, 9], [])], fork_threshold_tokens=16
    )
    assert rows == ()
    assert (transitions.demoted_tokens, transitions.untrained_sequences) == (1, 1)
    # An empty answer in the middle loses nothing.
    [row], transitions = to_sequences(
        [turn([1], [10]), turn([1, 10, 50], []), turn([1, 10, 50, 51], [20])],
        fork_threshold_tokens=16,
    )
    assert (ids(row), mask(row)) == ([1, 10, 50, 51, 20], [0, 1, 0, 0, 1])
    assert transitions == Transitions(clean=2)


GOOD = turn([1], [10, 11], versions=[3, 4])


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (replace(GOOD, prompt_ids=()), "turn 1 has an empty prompt"),
        (replace(GOOD, logprobs=np.zeros(3, np.float32)), r"2 sampled tokens and .* \(3,\)"),
        (replace(GOOD, logprobs=np.zeros((2, 1), np.float32)), r"shape \(2, 1\)"),
        (replace(GOOD, logprobs=np.array([0, np.nan], np.float32)), "not finite"),
        (replace(GOOD, logprobs=np.array([-np.inf, 0], np.float32)), "not finite"),
        (replace(GOOD, spans=()), "do not cover"),
        (replace(GOOD, spans=(Span(3, 0, 1),)), "do not cover"),
        (replace(GOOD, spans=(Span(3, 0, 3),)), "do not cover"),
        (replace(GOOD, spans=(Span(3, 1, 2),)), "do not cover"),
        (replace(GOOD, spans=(Span(3, 1, 2), Span(3, 0, 1))), "do not cover"),
        (replace(GOOD, spans=(Span(3, 0, 2), Span(4, 2, 1), Span(4, 1, 2))), "do not cover"),
    ],
)
def test_a_broken_turn_is_refused(broken: SampledTurn, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        to_sequences([GOOD, broken], fork_threshold_tokens=16)


def test_a_conversation_without_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="without a turn"):
        to_sequences([], fork_threshold_tokens=16)


@given(*[st.lists(st.integers(0, 2), max_size=9)] * 2)
def test_common_prefix(first: list[int], second: list[int]) -> None:
    found = common_prefix(np.array(first, np.uint32), np.array(second, np.uint32))
    assert found == plain_prefix(first, second)


def test_common_prefix_of_long_prompts() -> None:
    long = np.arange(32_768, dtype=np.uint32)
    changed = long.copy()
    changed[32_000] = 7
    assert common_prefix(long, long[:-1]) == 32_767
    assert common_prefix(long, changed) == 32_000


TOKENS = st.integers(0, 4)
"""Few, so that changed histories meet the held tokens again by chance."""
CONTEXT = st.lists(TOKENS, max_size=4)


def logprob_of(number: int, position: int) -> float:
    """Names the sampled token at `position` of turn `number`; exact in float32."""
    return -(1.0 + 64 * number + position)


@st.composite
def rewritten(draw: st.DrawFn, held: list[int], num_answer: int) -> list[int]:
    """A history as a template renders it again; the last `num_answer` tokens are the answer."""
    how = draw(st.sampled_from(["same", "same", "cut", "retokenised", "dropped", "changed", "new"]))
    if how == "same":
        return held
    if how == "new":
        return draw(st.lists(TOKENS, max_size=6))
    if how == "cut":
        return held[: draw(st.integers(0, len(held)))]
    if how == "retokenised":
        keep = len(held) - draw(st.integers(0, num_answer))
        return held[:keep] + draw(CONTEXT)
    if how == "dropped":
        start = draw(st.integers(0, len(held)))
        return held[:start] + held[draw(st.integers(start, len(held))) :]
    at = draw(st.integers(0, len(held) - 1))
    return [*held[:at], draw(TOKENS), *held[at + 1 :]]


@st.composite
def chains(draw: st.DrawFn) -> list[SampledTurn]:
    """Turns of one conversation, each prompt the last one and its answer, rewritten and grown. The
    log-probabilities name the tokens; versions rise."""
    found: list[SampledTurn] = []
    version = 1
    for number in range(draw(st.integers(1, 6))):
        prompt: list[int] = []
        if found:
            last = found[-1]
            held = [*last.prompt_ids, *last.token_ids]
            prompt = draw(rewritten(held, len(last.token_ids)))
        prompt = prompt + draw(CONTEXT) or [draw(TOKENS)]
        sampled = draw(st.lists(TOKENS, max_size=8))
        versions = []
        for _ in sampled:
            version += draw(st.integers(0, 1))
            versions.append(version)
        names = [logprob_of(number, position) for position in range(len(sampled))]
        found.append(turn(prompt, sampled, names, versions=versions))
    return found


THRESHOLDS = st.integers(0, 10)


def expected_of(chain: list[SampledTurn], threshold: int) -> tuple[set[float], Transitions]:
    """The names of the tokens to train on, and the tally, by the rules in plain lists: what is held
    before each turn is the last prompt and its answer."""
    names = {float(name) for sampled in chain for name in sampled.logprobs}
    kinds: list[str] = []
    drifts: list[int] = []
    demoted: set[float] = set()
    for before, after in pairwise(chain):
        held = before.prompt_ids + before.token_ids
        drift = len(held) - plain_prefix(held, after.prompt_ids)
        drifts.append(drift)
        if drift == 0:
            kinds.append("clean")
        elif drift < threshold and drift <= len(before.token_ids):
            kinds.append("realigned")
            demoted.update(float(name) for name in before.logprobs[-drift:])
        else:
            kinds.append("forked")
    return names - demoted, Transitions(
        clean=kinds.count("clean"),
        realigned=kinds.count("realigned"),
        forked=kinds.count("forked"),
        demoted_tokens=len(demoted),
        drift_tokens=sum(drifts),
        max_drift_tokens=max(drifts, default=0),
    )


def test_the_chains_reach_every_transition_at_once() -> None:
    """Else the laws below would say little."""

    def all_kinds(chain: list[SampledTurn]) -> bool:
        _, seen = to_sequences(chain, fork_threshold_tokens=3)
        return min(seen.clean, seen.realigned, seen.forked) > 0 and seen.untrained_sequences > 0

    unshrunk = settings(phases=[Phase.generate], derandomize=True, database=None)
    assert len(find(chains(), all_kinds, settings=unshrunk)) >= 4


@given(chain=chains(), threshold=THRESHOLDS)
def test_a_sampled_token_is_trained_once_unless_it_is_demoted(
    chain: list[SampledTurn], threshold: int
) -> None:
    rows, seen = to_sequences(chain, fork_threshold_tokens=threshold)
    trained = [float(name) for row in rows for name in row.logprobs[row.trained_mask == 1]]
    names, tally = expected_of(chain, threshold)
    assert sorted(trained) == sorted(names)
    assert replace(seen, untrained_sequences=0) == tally
    assert seen.clean + seen.realigned + seen.forked == seen.total == len(chain) - 1
    num_sampled = sum(len(sampled.token_ids) for sampled in chain)
    assert seen.demoted_tokens + len(trained) == num_sampled
    assert len(rows) + seen.untrained_sequences == 1 + seen.forked


@given(chain=chains(), threshold=THRESHOLDS)
def test_a_trained_token_stands_behind_what_it_was_sampled_from(
    chain: list[SampledTurn], threshold: int
) -> None:
    rows, _ = to_sequences(chain, fork_threshold_tokens=threshold)
    for row in rows:
        for at in np.flatnonzero(row.trained_mask):
            number, position = divmod(int(-row.logprobs[at]) - 1, 64)
            origin = chain[number]
            assert row.token_ids[at] == origin.token_ids[position]
            seen_by_engine = origin.prompt_ids + origin.token_ids[:position]
            assert tuple(ids(row)[:at]) == seen_by_engine


@given(chain=chains(), threshold=THRESHOLDS)
def test_spans_cover_the_trained_tokens_with_the_version_that_sampled_each(
    chain: list[SampledTurn], threshold: int
) -> None:
    version_of = {
        float(sampled.logprobs[position]): span.version
        for sampled in chain
        for span in sampled.spans
        for position in range(span.start, span.end)
    }
    rows, _ = to_sequences(chain, fork_threshold_tokens=threshold)
    for row in rows:
        covered = [(at, s.version) for s in row.spans for at in range(s.start, s.end)]
        trained = np.flatnonzero(row.trained_mask)
        assert covered == [(int(at), version_of[float(row.logprobs[at])]) for at in trained]
        assert all(span.end > span.start for span in row.spans)


@given(chain=chains(), threshold=THRESHOLDS)
def test_rows_keep_what_readers_check(chain: list[SampledTurn], threshold: int) -> None:
    rows, _ = to_sequences(chain, fork_threshold_tokens=threshold)
    for row in rows:
        assert len(row.token_ids) == len(row.trained_mask) == len(row.logprobs)
        assert row.trained_mask[0] == 0
        assert row.trained_mask.any()
        assert (row.logprobs[row.trained_mask == 0] == 0).all()
    conversation = Conversation((), (), rows, wire.END_REASON_STOP, 1.0)
    sent = write_rollout(conversation, rollout_id="g/0")
    assert [broken_invariant(sequence) for sequence in sent.sequences] == [None] * len(rows)
