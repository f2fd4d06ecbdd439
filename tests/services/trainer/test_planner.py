import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.packing import pack
from services.trainer.planner import Plan, plan
from services.trainer.trie import build_trie, prefix_order
from services.trainer.types import TrainSample
from tests.services.trainer.numerics import make_groups, make_sample

sequences = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda x: np.array(x, np.int64)),
    min_size=1,
    max_size=10,
)


def prefixes(group: list[np.ndarray]) -> set[tuple[int, ...]]:
    return {tuple(s[: n + 1].tolist()) for s in group for n in range(len(s))}


def test_worked_example_of_the_order() -> None:
    order = prefix_order([np.array(x, np.int64) for x in ([1, 2, 3], [1, 2], [1, 2, 4])])
    assert order.order.tolist() == [1, 0, 2]
    assert order.lengths.tolist() == [2, 3, 3]
    assert order.shared.tolist() == [0, 2, 2]


@given(sequences)
def test_trie_has_one_node_per_distinct_prefix(group: list[np.ndarray]) -> None:
    trie = build_trie(group, depths=[np.arange(len(s)) for s in group])
    assert trie.token_ids.size == len(prefixes(group))
    for sequence, nodes in zip(group, trie.nodes, strict=True):
        assert trie.token_ids[nodes].tolist() == sequence.tolist()
        assert trie.depths[nodes].tolist() == list(range(len(sequence)))


@given(sequences)
def test_interval_of_a_node_holds_exactly_what_is_below_it(group: list[np.ndarray]) -> None:
    trie = build_trie(group, depths=[np.arange(len(s)) for s in group])
    paths = {node: set(nodes[: i + 1]) for nodes in trie.nodes for i, node in enumerate(nodes)}
    for query, key in itertools.product(range(trie.token_ids.size), repeat=2):
        assert (key <= query < trie.ends[key]) == (key in paths[query])


def check(found: Plan, samples: list[TrainSample], tokens: int, trained: int) -> None:
    placed = sorted(itertools.chain(found.oversize, *(row.samples for row in found.rows)))
    assert placed == list(range(len(samples)))
    for row in found.rows:
        members = [samples[index] for index in row.samples]
        assert row.tokens == len(prefixes([s.context for s in members])) <= tokens
        assert row.tokens == pack(members).num_forwarded
        assert sum(s.num_trained for s in members) <= trained


@given(st.integers(0, 10_000), st.integers(8, 60), st.integers(4, 30))
def test_every_sample_is_placed_once_within_both_budgets(
    seed: int, tokens: int, trained: int
) -> None:
    samples = make_groups(seed=seed, num_groups=4, generations=3, prompt=12, completion=5)
    found = plan(samples, token_budget=tokens, trained_token_budget=trained)
    check(found, samples, tokens, trained)
    for index in found.oversize:
        sample = samples[index]
        assert sample.num_context > tokens or sample.num_trained > trained
    fitting = [s.context for i, s in enumerate(samples) if i not in found.oversize]
    assert found.unique_tokens == len(prefixes(fitting))


def test_a_group_stays_together_and_pays_its_prompt_once() -> None:
    prompt = list(range(40))
    samples = [
        make_sample([*prompt[:39], 10 * g, i, 1], num_prompt=40, rollout_id=f"{g}/{i}")
        for i in range(8)
        for g in range(3)
    ]
    # 40 prompt tokens (39 of them in all groups) and 8 different completion tokens a group.
    found = plan(samples, token_budget=60, trained_token_budget=100)
    assert [sorted({samples[i].group_id for i in row.samples}) for row in found.rows] == [
        ["0", "1"],
        ["2"],
    ]
    assert [row.tokens for row in found.rows] == [39 + 2 * 9, 48]
    assert found.unique_tokens == 39 + 3 * 9


def test_a_group_beyond_a_row_is_cut_along_its_trie() -> None:
    samples = [
        make_sample([7] * 10 + [i] * 6, num_prompt=10, rollout_id=f"g/{i}") for i in range(8)
    ]
    found = plan(samples, token_budget=10 + 3 * 5, trained_token_budget=100)
    check(found, samples, 25, 100)
    assert [row.tokens for row in found.rows] == [25, 25, 20]


def test_what_fits_nowhere_is_named() -> None:
    samples = [
        make_sample(range(20), num_prompt=10),
        make_sample(range(12), num_prompt=10),
        make_sample(range(12), num_prompt=2),
    ]
    found = plan(samples, token_budget=18, trained_token_budget=8)
    assert [row.samples for row in found.rows] == [[1]]
    assert found.oversize == [0, 2]
    assert plan([], token_budget=18, trained_token_budget=8).rows == []
