"""Which conversations are traced, whatever replicas there are, and what their marks say."""

from collections import Counter
from pathlib import Path

import pytest
from headrace.v1 import rollout_pb2 as wire
from hypothesis import given
from hypothesis import strategies as some
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.common import streams
from services.common.traces_config import Traces
from services.generator import service, weight_links
from services.generator.group import Group
from services.generator.traces import Tracing, share, spelled
from services.generator.types import Conversation, Turn
from services.generator.wire import write_group
from tests.services.generator.fakes import FakeEngine, recorder, request_of, values
from tests.services.generator.river import river
from tests.services.scorer.groups import sequence

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def by_bytes() -> Tokenizer:
    """One token a byte."""
    made = Tokenizer(models.BPE({each: i for i, each in enumerate(ALPHABET)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def by_words(*words: str) -> Tokenizer:
    """One token a word, which brings its space, and loses it where it is the first."""
    made = Tokenizer(models.WordLevel({f"▁{word}": i for i, word in enumerate(words)}, "▁?"))
    made.decoder = decoders.Metaspace()
    return made


def tracing(groups_per_version: int = 4, **settings: int) -> Tracing:
    return Tracing(
        Traces(**settings),
        groups_per_version=groups_per_version,
        spell=lambda ids: "".join(chr(96 + each) for each in ids),
    )


@given(some.integers(0, 300), some.integers(1, 300), some.integers(0, 10**9))
def test_shares_of_a_block_are_the_whole_and_even(number: int, of: int, block: int) -> None:
    shares = [share(block * of + place, number, of=of) for place in range(of)]
    assert sum(shares) == number
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(("per_version", "groups"), [(8, 32), (8, 3), (2, 4), (5, 1)])
def test_a_version_has_its_traces_however_many_replicas(per_version: int, groups: int) -> None:
    for num_replicas in (1, 3):
        replicas = [tracing(groups, per_version=per_version) for _ in range(num_replicas)]
        seen: Counter[int] = Counter()
        for ordinal in range(4 * groups):
            version = ordinal // groups
            replica = replicas[ordinal * 7 % num_replicas]
            chosen = replica.choose(
                f"0.{ordinal}.1.1", version=version, generations=[0, 1, 2, 3, 5, 6, 7, 8]
            )
            assert len(set(chosen)) == len(chosen)
            seen[version] += len(chosen)
        assert seen == dict.fromkeys(range(4), per_version)


def test_only_every_nth_version_is_traced_and_no_evaluation() -> None:
    made = tracing(1, per_version=1, every_versions=3)
    versions = [v for v in range(7) if made.choose(f"0.{v}.1.1", version=v, generations=[0])]
    assert versions == [0, 3, 6]
    assert made.choose("eval.0.1.1", version=9, generations=[0]) == []
    assert tracing(1, per_version=0).choose("0.0.1.1", version=0, generations=[0]) == []


def test_one_replica_takes_no_more_of_a_version_than_there_may_be() -> None:
    """Groups of several blocks may be of one version: the trainer is slow, or waits."""
    made = tracing(2, per_version=2)
    chosen = [
        made.choose(f"0.{ordinal}.1.1", version=5, generations=[0, 1]) for ordinal in range(9)
    ]
    assert sum(map(len, chosen)) == 2


def test_the_same_group_has_the_same_trace_anywhere_and_not_always_its_first() -> None:
    generations = [0, 1, 2, 4, 6]
    picked = set()
    for ordinal in range(50):
        name = f"0.{ordinal}.1.1"
        both = [tracing(1, per_version=1).choose(name, version=1, generations=generations)] * 2
        assert both[0] == both[1]
        picked.update(both[0])
    assert picked == set(generations)


@given(some.text())
async def test_tokens_together_are_the_text_whatever_characters_they_cut(text: str) -> None:
    made = by_bytes()
    ids = made.encode(text).ids
    texts = await spelled(ids, made.decode)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


async def test_the_last_token_of_a_character_has_it() -> None:
    made = by_bytes()
    assert await spelled(made.encode("aé€b").ids, made.decode) == ["a", "", "é", "", "", "€", "b"]


async def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    made = by_bytes()
    assert await spelled(made.encode("a€").ids[:-1], made.decode) == ["a", "", "�"]


async def test_words_keep_their_spaces() -> None:
    made = by_words("one", "two")
    assert made.decode([1]) == "two"
    assert await spelled([0, 1, 1], made.decode) == ["one", " two", " two"]


def group_of(num: int) -> tuple[Group, wire.RolloutGroup]:
    """A group whose conversations had two turns, and its message."""
    turns = tuple(Turn(4, 2, "x", "stop", 0.5, begin_s=begin_s) for begin_s in (0.0, 1.25))
    conversations = {
        generation: Conversation(
            (), turns, sequences=(), end_reason=wire.END_REASON_STOP, duration_s=2.0
        )
        for generation in range(num)
    }
    message = write_group(
        request_of("0.0.1.1"), conversations, failed={}, versions=(3, 3), producer="g"
    )
    for rollout in message.rollouts:
        rollout.sequences.append(sequence((1, 2, 3, 4)))
    return Group(conversations, {}), message


async def test_marks_are_of_the_chosen_alone_and_the_others_as_small_as_before() -> None:
    group, message = group_of(4)
    before = [each.SerializeToString() for each in message.rollouts]
    measured = recorder()
    await tracing(1, per_version=1).mark(message, group, measured)
    [marked] = [each for each in message.rollouts if each.HasField("marks")]
    assert list(marked.marks.turn_begins_s) == [0.0, 1.25]
    assert [list(each.texts) for each in marked.marks.sequences] == [["a", "b", "c", "d"]]
    same = [each.SerializeToString() in before for each in message.rollouts]
    assert sorted(same) == [False, True, True, True]
    marked.ClearField("marks")
    assert [each.SerializeToString() for each in message.rollouts] == before
    assert values(measured) == {}


@pytest.mark.parametrize("num_tokens", [5000, 500])
async def test_what_would_be_too_large_is_counted_and_not_marked(num_tokens: int) -> None:
    """Also where only the texts of its tokens make it so: 500 tokens of 9 bytes and 4 of text."""
    group, message = group_of(1)
    ids = [1 + i % 20 for i in range(num_tokens)]
    message.rollouts[0].sequences[0].CopyFrom(
        sequence(ids, [0] + [1] * (num_tokens - 1), [0.0] + [-0.5] * (num_tokens - 1))
    )
    before, measured = message.SerializeToString(), recorder()
    assert (message.rollouts[0].ByteSize() > 6000) == (num_tokens == 5000)
    made = Tracing(
        Traces(per_version=1, max_bytes=6000),
        groups_per_version=1,
        spell=lambda ids: "word" * len(ids),
    )
    await made.mark(message, group, measured)
    assert message.SerializeToString() == before
    assert values(measured) == {"recorder/trace_dropped/too_large": 1}


async def test_a_replica_hands_marked_conversations_on(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BLOCK_S", 0.1)
    monkeypatch.setattr(service, "DRAIN_S", 0.2)
    monkeypatch.setattr(weight_links, "RETRY_S", (0.001, 0.05))
    monkeypatch.setattr(service, "model_cache", lambda: tmp_path / "cache")
    # Two groups a version, four conversations each.
    async with river(valkey_url, tmp_path, traces={"per_version": 3}) as seen:
        await seen.put(*(request_of(f"0.{ordinal}.1.1") for ordinal in range(2)))
        await seen.put(request_of("eval.0.1.7", num=1), evaluation=True)
        await seen.trainer.publish(1)
        started = seen.start(FakeEngine())
        groups = await seen.groups(2)
        [evaluated] = await seen.groups(1, "eval_groups")
        await started.stop()
    marked = {
        group.request.group_id: [r.marks for r in group.rollouts if r.HasField("marks")]
        for group in groups
    }
    assert {name: len(each) for name, each in marked.items()} == {"0.0.1.1": 1, "0.1.1.1": 2}
    assert not evaluated.rollouts[0].HasField("marks")
    for group in groups:
        for rollout in group.rollouts:
            if rollout.HasField("marks"):
                assert list(rollout.marks.turn_begins_s) == [0.0]
                [texts] = rollout.marks.sequences
                assert len(texts.texts) == len(rollout.sequences[0].trained_mask)
