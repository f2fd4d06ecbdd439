import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from headrace.v1 import rollout_pb2, sample_pb2

from services.trainer.intake import MAX_LAG, AdmittedGroup, Poison, Policy, Refused, admit
from services.trainer.line import VersionLine
from tests.services.trainer.scored import Span, make_scored, make_sequence


def policy(
    version: int = 5,
    *,
    step: int | None = None,
    step_of: Mapping[int, int] | None = None,
    max_staleness: int = 4,
) -> Policy:
    """By default a version a step: version n has n - 1 steps behind it."""
    known = {v: v - 1 for v in range(version + 1)} if step_of is None else step_of
    now = known[version] if step is None else step
    return Policy(
        version=version, step=now, step_of=known, max_staleness=max_staleness, vocab_size=50
    )


def sequence(
    version: int = 5, *, spans: Sequence[Span] | None = None, num_tokens: int = 5
) -> rollout_pb2.Sequence:
    """Two tokens of context, the rest trained."""
    if spans is None:
        spans = [(version, 2, num_tokens)]
    return make_sequence(list(range(1, num_tokens + 1)), num_prompt=2, spans=spans)


def admitted(group: sample_pb2.ScoredGroup, at: Policy) -> AdmittedGroup:
    return admit(group.SerializeToString(), group_id=group.group_id, policy=at)


def of_version(version: int) -> sample_pb2.ScoredGroup:
    return make_scored("0.0.1.0", sequence(version), sequence(version), oldest=version)


@pytest.mark.parametrize(("version", "staleness"), [(5, 0), (4, 1), (1, 4)])
def test_a_group_at_the_limit_of_staleness_is_kept(version: int, staleness: int) -> None:
    group = admitted(of_version(version), policy())
    assert (group.group_id, group.staleness, len(group.samples)) == ("0.0.1.0", staleness, 2)
    assert not group.zero_signal


def test_a_group_beyond_the_limit_is_dropped_as_one_with_what_it_holds() -> None:
    with pytest.raises(Refused, match=r"^stale$") as refused:
        admitted(of_version(0), policy())
    assert [s.token_ids.size for s in refused.value.samples] == [5, 5]


def test_without_staleness_only_the_current_version_is_kept() -> None:
    assert admitted(of_version(5), policy(max_staleness=0)).staleness == 0
    with pytest.raises(Refused, match=r"^stale$"):
        admitted(of_version(4), policy(max_staleness=0))


def test_the_oldest_token_counts_not_the_newest() -> None:
    """Sent at version 3, ended at 5, admitted at 8: five behind, not three."""
    spans = [(3, 2, 3), (4, 3, 4), (5, 4, 5)]
    group = make_scored("0.0.1.0", sequence(spans=spans), oldest=3, newest=5)
    with pytest.raises(Refused, match=r"^stale$"):
        admitted(group, policy(8))
    kept = admitted(group, policy(8, max_staleness=5))
    assert kept.staleness == 5
    assert kept.samples[0].lags.tolist() == [0, 0, 5, 4, 3]


def test_lags_count_optimizer_steps_between_versions_and_since_the_last() -> None:
    """Two steps a version, one step since: a token of the current version has lag 1."""
    at = policy(3, step=5, step_of={1: 0, 2: 2, 3: 4})
    spans = [(1, 2, 4), (2, 4, 5), (3, 5, 7)]
    group = make_scored("0.0.1.0", sequence(spans=spans, num_tokens=7), oldest=1, newest=3)
    found = admitted(group, at)
    assert found.samples[0].lags.tolist() == [0, 0, 5, 5, 3, 1, 1]
    assert found.staleness == 2


def test_lags_of_context_are_zero_also_inside_spans() -> None:
    wide = make_scored("0.0.1.0", sequence(spans=[(1, 0, 5)]), oldest=1)
    assert admitted(wide, policy()).samples[0].lags.tolist() == [0, 0, 4, 4, 4]
    beyond = make_scored("0.0.1.0", sequence(spans=[(1, 0, 500)]), oldest=1)
    assert admitted(beyond, policy()).samples[0].lags.tolist() == [0, 0, 4, 4, 4]


def test_a_lag_that_fits_no_16_bits_is_the_largest_and_not_negative() -> None:
    at = policy(2, step=100_000, step_of={1: 0, 2: 99_999})
    group = make_scored("0.0.1.0", sequence(1), oldest=1)
    assert admitted(group, at).samples[0].lags.max() == MAX_LAG


def test_samples_are_what_the_scorer_sent() -> None:
    trained = make_sequence(
        [4, 5, 6, 7], num_prompt=1, spans=[(5, 1, 4)], logprobs=[-0.5, -0.25, -2]
    )
    group = make_scored("3.2.1.0", trained, oldest=5, advantages=[0.75])
    sample = admitted(group, policy()).samples[0]
    assert (sample.rollout_id, sample.group_id, sample.advantage) == ("3.2.1.0/0", "3.2.1.0", 0.75)
    assert sample.token_ids.tolist() == [4, 5, 6, 7]
    assert sample.trained_mask.tolist() == [False, True, True, True]
    assert sample.logprobs.tolist() == [0, -0.5, -0.25, -2]
    assert sample.logprobs.dtype == np.float32


def test_zero_signal_is_passed_on() -> None:
    group = make_scored("0.0.1.0", sequence(), sequence(), oldest=5, advantages=[0, 0])
    assert admitted(group, policy()).zero_signal


def test_forks_know_the_tokens_of_their_whole_conversation() -> None:
    """Forks of 3 and 5 trained tokens, one without any, and a conversation of 4."""
    nothing = make_sequence([1, 2, 3], num_prompt=3, spans=[])
    sequences = [sequence(num_tokens=5), sequence(num_tokens=7), nothing, sequence(num_tokens=6)]
    group = make_scored("0.0.1.0", *sequences, oldest=5)
    for fork in group.samples[:3]:
        fork.rollout_id = "0.0.1.0/0"
    samples = admitted(group, policy()).samples
    assert [s.num_trained for s in samples] == [3, 5, 4]
    assert [s.conversation_tokens for s in samples] == [8, 8, None]
    assert [s.token_weight for s in samples] == [1 / 8, 1 / 8, 1 / 4]


def test_sequences_without_a_trained_token_are_left_out() -> None:
    nothing = make_sequence([1, 2, 3], num_prompt=3, spans=[])
    group = make_scored("0.0.1.0", nothing, sequence(), nothing, oldest=5)
    assert [s.rollout_id for s in admitted(group, policy()).samples] == ["0.0.1.0/1"]
    with pytest.raises(Refused, match=r"^no_trained_tokens$"):
        admitted(make_scored("0.0.1.0", nothing, oldest=5), policy())
    with pytest.raises(Refused, match=r"^no_trained_tokens$"):
        admitted(make_scored("0.0.1.0", oldest=5), policy())


@pytest.mark.parametrize("data", [b"\xff\xfe not a message", b"\x0a\x50cut off"])
def test_bytes_that_do_not_parse_are_poison(data: bytes) -> None:
    with pytest.raises(Poison, match="not a ScoredGroup"):
        admit(data, group_id="0.0.1.0", policy=policy())


def test_bytes_of_another_group_are_poison() -> None:
    data = of_version(5).SerializeToString()
    with pytest.raises(Poison, match=r"the entry is of group '0\.1\.1\.0', its bytes of '0\.0\.1"):
        admit(data, group_id="0.1.1.0", policy=policy())


def test_unknown_fields_are_no_error() -> None:
    data = of_version(5).SerializeToString() + bytes([0xFA, 0x7F, 3]) + b"new"  # field 2047
    assert admit(data, group_id="0.0.1.0", policy=policy()).staleness == 0


def test_a_sequence_that_breaks_an_invariant_is_poison() -> None:
    first_trained = make_sequence([1, 2, 3], num_prompt=0, spans=[(5, 0, 3)])
    uneven = sequence()
    uneven.logprobs = uneven.logprobs[:-4]
    not_finite = make_sequence(
        [1, 2, 3], num_prompt=1, spans=[(5, 1, 3)], logprobs=[-1, float("nan")]
    )
    for broken, why in (
        (first_trained, "first token is marked as trained"),
        (uneven, "expected"),
        (not_finite, "not finite"),
    ):
        with pytest.raises(Poison, match=rf"sample '0\.0\.1\.0/1'/0: .*{why}"):
            admitted(make_scored("0.0.1.0", sequence(), broken, oldest=5), policy())


def test_long_samples_are_read_and_named_as_short_ones_are() -> None:
    """They are read apart, short ones together."""
    spans, ids = [(5, 1, 20_000)], [1] * 20_000
    long = [make_sequence(ids, num_prompt=1, spans=spans) for _ in range(3)]
    group = make_scored("0.0.1.0", long[0], sequence(), *long[1:], oldest=5)
    found = admitted(group, policy())
    assert [s.token_ids.size for s in found.samples] == [20_000, 5, 20_000, 20_000]
    assert [s.num_trained for s in found.samples] == [19_999, 3, 19_999, 19_999]
    assert [s.rollout_id for s in found.samples] == [f"0.0.1.0/{n}" for n in range(4)]
    group.samples[2].sequence.trained_mask = b"\1" * 20_000
    with pytest.raises(Poison, match=r"sample '0\.0\.1\.0/2'/0: its first token"):
        admitted(group, policy())


def test_a_span_does_not_reach_into_the_next_sample() -> None:
    beyond = sequence(spans=[(5, 2, 500)])
    assert (
        len(admitted(make_scored("0.0.1.0", beyond, sequence(), oldest=5), policy()).samples) == 2
    )
    with pytest.raises(Poison, match=r"'0\.0\.1\.0/1': its version spans do not cover"):
        admitted(make_scored("0.0.1.0", beyond, sequence(spans=[]), oldest=5), policy())


@pytest.mark.parametrize("advantage", [float("nan"), float("inf"), float("-inf")])
def test_an_advantage_that_is_not_finite_is_poison(advantage: float) -> None:
    group = make_scored("0.0.1.0", sequence(), oldest=5, advantages=[advantage])
    with pytest.raises(Poison, match="its advantage is"):
        admitted(group, policy())


def test_tokens_outside_the_vocabulary_are_poison() -> None:
    """They would end the run by an index error in the model, again after each restart."""
    foreign = make_sequence([1, 2, 50], num_prompt=1, spans=[(5, 1, 3)])
    with pytest.raises(Poison, match="token 50 is outside the model's vocabulary of 50"):
        admitted(make_scored("0.0.1.0", foreign, oldest=5), policy())


@pytest.mark.parametrize("spans", [[], [(5, 2, 4)], [(5, 3, 5)], [(5, 2, 3), (5, 4, 5)]])
def test_spans_that_leave_trained_tokens_out_are_poison(spans: list[Span]) -> None:
    group = make_scored("0.0.1.0", sequence(spans=spans), oldest=5)
    with pytest.raises(Poison, match="do not cover the trained tokens"):
        admitted(group, policy())


def test_versions_that_were_never_published_are_poison() -> None:
    with pytest.raises(Poison, match=r"never published: \[9\]"):
        admitted(make_scored("0.0.1.0", sequence(), oldest=5, newest=9), policy())
    spans = [(5, 2, 4), (9, 4, 5)]
    with pytest.raises(Poison, match=r"never published: \[9\]"):
        admitted(make_scored("0.0.1.0", sequence(spans=spans), oldest=5), policy())
    with pytest.raises(Poison, match=r"never published: \[0\]"):
        admitted(of_version(0), policy(2, step_of={1: 0, 2: 1}))


def test_a_version_ahead_of_the_current_one_is_poison() -> None:
    at = policy(5, step_of={v: v for v in range(8)})
    with pytest.raises(Poison, match=r"never published: \[6\]"):
        admitted(make_scored("0.0.1.0", sequence(6), oldest=6), at)


def test_weights_of_a_dead_line_are_told_by_the_newest_token_too() -> None:
    """Versions 3 and 4 came after the checkpoint that version 5 was restored from."""
    at = policy(5, step_of={1: 0, 2: 1, 5: 1})
    for spans in ([(3, 2, 5)], [(2, 2, 3), (4, 3, 5)]):
        versions = [version for version, _, _ in spans]
        group = make_scored(
            "0.0.1.0", sequence(spans=spans), oldest=min(versions), newest=max(versions)
        )
        with pytest.raises(Refused, match=r"^dead_lineage$"):
            admitted(group, at)


def test_staleness_counts_publishes_along_the_line() -> None:
    """9 -> 10, restored as 13 -> 14: a group of version 9 is two behind 14, one of 10 or 13 one."""
    line = VersionLine()
    for version, step in ((9, 8), (10, 9)):
        line.add(version, step=step, sha256="")
    line.add(13, step=9, sha256="", same_weights=True)
    line.add(14, step=10, sha256="")
    at = Policy(
        version=14,
        step=10,
        step_of=line.step_of,
        publishes_of=line.publishes_of,
        max_staleness=1,
        vocab_size=50,
    )
    assert [at.staleness(version) for version in (9, 10, 13, 14)] == [2, 1, 1, 0]
    kept = admitted(make_scored("0.0.1.0", sequence(10), oldest=10), at)
    assert (kept.staleness, kept.samples[0].lags.max()) == (1, 1)
    with pytest.raises(Refused, match=r"^stale$"):
        admitted(make_scored("0.0.1.0", sequence(9), oldest=9), at)
    again = VersionLine(json.loads(json.dumps(line.state())))
    assert (again.state(), again.current, again.publishes_of) == (
        line.state(),
        14,
        line.publishes_of,
    )
