import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner_set import LOADS as SET_LOADS
from benchmarks.planner_set import SETTINGS
from benchmarks.planner_set import make_samples as set_of_samples
from services.trainer.assignment import Budgets
from services.trainer.load import Load
from services.trainer.packing import pack
from services.trainer.planner import Plan, merge, plan, plan_ready
from services.trainer.ready import READY_FILL, fill_at_most
from services.trainer.trie import build_trie, prefix_order
from services.trainer.types import TrainSample
from tests.services.trainer.numerics import make_groups, make_sample

sequences = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda x: np.array(x, np.int64)),
    min_size=1,
    max_size=10,
)


def paths(sequence: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(sequence[: n + 1].tolist()) for n in range(len(sequence))]


def prefixes(group: Sequence[np.ndarray]) -> set[tuple[int, ...]]:
    return {path for sequence in group for path in paths(sequence)}


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


TOKENS = Load(per_token=1)
LOADS = (TOKENS, Load(per_token=0, per_pair=1), Load(per_token=100, per_pair=1, per_trained=30))


@dataclass(frozen=True)
class Bounds:
    """What rows have to keep to."""

    ranks: int
    tokens: int
    trained: int
    per_row: int | None
    load: Load
    share: bool

    @property
    def options(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "token_budget": self.tokens,
            "trained_token_budget": self.trained,
            "load": self.load,
            "share_prefixes": self.share,
        }

    def plan(self, samples: Sequence[TrainSample]) -> Plan:
        return plan(samples, samples_per_row=self.per_row, **self.options)

    def plan_ready(self, samples: Sequence[TrainSample]) -> tuple[Plan, list[int]]:
        return plan_ready(samples, samples_per_row=self.per_row, **self.options)


bounds = st.builds(
    Bounds,
    ranks=st.integers(1, 5),
    tokens=st.integers(8, 60),
    trained=st.integers(4, 30),
    per_row=st.none() | st.integers(1, 5),
    load=st.sampled_from(LOADS),
    share=st.booleans() | st.just(True),
)


@st.composite
def steps(draw: st.DrawFn) -> list[TrainSample]:
    """Groups whose prompts begin with one of two system prompts, in any order."""
    numbers = np.random.default_rng(draw(st.integers(0, 10_000)))
    system = [numbers.integers(0, 3, size).tolist() for size in numbers.integers(0, 12, 2)]
    samples = []
    for group in range(draw(st.integers(0, 5))):
        prompt = system[numbers.integers(2)] + numbers.integers(0, 3, 1 + group).tolist()
        for generation in range(numbers.integers(1, 7)):
            tail = numbers.integers(0, 3, numbers.integers(1, 9)).tolist()
            name = f"{group}/{generation}"
            samples.append(make_sample(prompt + tail, num_prompt=len(prompt), rollout_id=name))
    numbers.shuffle(samples)
    return samples


def check(found: Plan, samples: Sequence[TrainSample], within: Bounds) -> None:
    """All that a plan promises, for the samples that it is of."""
    rows = [row for row in found.rows if not row.echo]
    placed = sorted(itertools.chain(found.oversize, *(row.samples for row in rows)))
    assert placed == list(range(len(samples)))
    for microbatch in found.microbatches:
        assert len(microbatch) == within.ranks
        assert not all(row.echo for row in microbatch)
        loads = [row.load for row in microbatch]
        assert loads == sorted(loads, reverse=True)
    for row in found.rows:
        members = [samples[index] for index in row.samples]
        contexts = [sample.context for sample in members]
        assert members
        assert row.tokens <= within.tokens
        assert row.tokens == pack(members, share_prefixes=within.share).num_forwarded
        num_trained = sum(sample.num_trained for sample in members)
        assert num_trained <= within.trained
        assert within.per_row is None or len(members) <= within.per_row
        nodes = prefixes(contexts) if within.share else list(itertools.chain(*map(paths, contexts)))
        load = within.load
        expected = load.per_token * len(nodes) + load.per_pair * sum(map(len, nodes))
        assert row.load == pytest.approx(expected + load.per_trained * num_trained)
    for index in found.oversize:
        sample = samples[index]
        assert sample.num_context > within.tokens or sample.num_trained > within.trained
    fitting = [s.context for i, s in enumerate(samples) if i not in found.oversize]
    assert found.unique_tokens == len(prefixes(fitting))


@settings(max_examples=60, deadline=None)
@given(steps(), bounds)
def test_every_sample_is_placed_once_within_all_bounds(
    samples: list[TrainSample], within: Bounds
) -> None:
    found = within.plan(samples)
    check(found, samples, within)
    assert within.plan(samples) == found
    echoes = [row for row in found.rows if row.echo]
    if echoes:
        # Every sample has a row of its own, and there are still too few.
        assert all(len(row.samples) == 1 for row in found.rows)
        assert all(row.samples == found.microbatches[-1][-1].samples for row in echoes)
        assert len(echoes) < within.ranks


@settings(max_examples=60, deadline=None)
@given(steps(), bounds)
def test_what_is_ready_and_the_rest_are_the_whole_step(
    samples: list[TrainSample], within: Bounds
) -> None:
    ready, rest = within.plan_ready(samples)
    early = [index for index in range(len(samples)) if index not in rest]
    assert not any(row.echo for row in ready.rows)
    assert rest == sorted(rest)
    if ready.microbatches and within.ranks > 1:
        assert len(rest) >= within.ranks
    for row in ready.rows:
        fills = [
            row.tokens / within.tokens,
            sum(samples[i].num_trained for i in row.samples) / within.trained,
            len(row.samples) / (within.per_row or math.inf),
        ]
        assert within.ranks > 1 or max(fills) >= READY_FILL
    later = within.plan([samples[index] for index in rest])
    whole = merge(samples, [ready, later.renumbered(rest)])
    check(whole, samples, within)
    assert ready == merge(samples, [ready])
    assert sorted(itertools.chain(ready.oversize, *(r.samples for r in ready.rows))) == early


def test_a_group_stays_together_and_pays_its_prompt_once() -> None:
    prompt = list(range(40))
    samples = [
        make_sample([*prompt[:39], 10 * g, i, 1], num_prompt=40, rollout_id=f"{g}/{i}")
        for i in range(8)
        for g in range(3)
    ]
    # 40 prompt tokens (39 of them in all groups) and 8 different completion tokens a group.
    found = plan(samples, token_budget=60, trained_token_budget=100)
    groups = [{samples[i].group_id for i in row.samples} for row in found.rows]
    assert sorted(map(len, groups)) == [1, 2]
    assert groups[0].isdisjoint(groups[1])
    assert [row.tokens for row in found.rows] == [39 + 2 * 9, 48]
    assert found.unique_tokens == 39 + 3 * 9


def test_a_group_beyond_a_row_is_cut_along_its_trie() -> None:
    samples = [
        make_sample([7] * 10 + [i] * 6, num_prompt=10, rollout_id=f"g/{i}") for i in range(8)
    ]
    found = plan(samples, token_budget=10 + 3 * 5, trained_token_budget=100)
    assert [row.tokens for row in found.rows] == [25, 25, 20]


def test_a_group_is_cut_for_ranks_that_would_have_nothing_to_do() -> None:
    samples = [
        make_sample([*range(75), 100 + i, 100, 2], num_prompt=75, rollout_id=f"g/{i}")
        for i in range(16)
    ]
    budgets: dict[str, Any] = {"token_budget": 200, "trained_token_budget": 100}
    [row] = plan(samples, **budgets).rows
    assert row.tokens == 75 + 16 * 2
    [pair] = plan(samples, ranks=2, **budgets).microbatches
    assert [row.tokens for row in pair] == [75 + 8 * 2] * 2


def test_fewer_samples_than_ranks_are_echoed() -> None:
    samples = [make_sample([i] * (4 + i), num_prompt=2, rollout_id=f"{i}/0") for i in range(3)]
    [microbatch] = plan(samples, ranks=5, token_budget=20, trained_token_budget=20).microbatches
    assert [(row.samples, row.echo) for row in microbatch] == [
        ([2], False),
        ([1], False),
        ([0], False),
        ([0], True),
        ([0], True),
    ]


def test_as_many_samples_as_ranks_are_a_row_each() -> None:
    samples = make_groups(seed=1, num_groups=1, generations=4, prompt=20, completion=5)
    [microbatch] = plan(samples, ranks=4, token_budget=100, trained_token_budget=100).microbatches
    assert sorted(row.samples for row in microbatch) == [[0], [1], [2], [3]]
    assert not any(row.echo for row in microbatch)


def test_what_fits_nowhere_is_named() -> None:
    samples = [
        make_sample(range(20), num_prompt=10),
        make_sample(range(12), num_prompt=10),
        make_sample(range(12), num_prompt=2),
    ]
    found = plan(samples, token_budget=18, trained_token_budget=8)
    assert [row.samples for row in found.rows] == [[1]]
    assert found.oversize == [0, 2]
    empty = plan([], token_budget=18, trained_token_budget=8)
    assert (empty.rows, empty.oversize, empty.unique_tokens) == ([], [], 0)


def test_a_fixed_number_of_samples_a_row() -> None:
    samples = make_groups(seed=3, num_groups=2, generations=8, prompt=20, completion=5)
    options: dict[str, Any] = {"ranks": 2, "token_budget": 1000, "trained_token_budget": 1000}

    def counts(number: int) -> list[list[int]]:
        found = plan(samples[:number], samples_per_row=4, **options)
        return [sorted(len(row.samples) for row in each) for each in found.microbatches]

    assert counts(16) == [[4, 4], [4, 4]]
    assert sorted(itertools.chain(*counts(15))) == [3, 4, 4, 4]
    # Budgets hold all the same.
    most = max(sample.num_context for sample in samples)
    found = plan(samples, samples_per_row=16, ranks=2, token_budget=most, trained_token_budget=1000)
    assert max(row.tokens for row in found.rows) <= most


def test_rows_that_are_full_need_not_wait() -> None:
    samples = [make_sample([i] * 46, num_prompt=2, rollout_id=f"{i}/0") for i in range(4)]
    options: dict[str, Any] = {"token_budget": 100, "trained_token_budget": 100}
    found, rest = plan_ready(samples, **options)
    assert ([row.tokens for row in found.rows], rest) == ([90, 90], [])
    found, rest = plan_ready(samples[:3], **options)
    assert ([row.tokens for row in found.rows], len(rest)) == ([90], 1)
    # Two ranks would forward all of the four now: one group more may leave a rank without a row.
    assert plan_ready(samples, ranks=2, **options)[1] == [0, 1, 2, 3]


def test_full_rows_wait_for_others_of_their_size() -> None:
    samples = [make_sample([i] * 91, num_prompt=2, rollout_id=f"{i}/0") for i in range(2)]
    samples += [make_sample([9, i, 2], num_prompt=2, rollout_id=f"9/{i}") for i in range(40)]
    options: dict[str, Any] = {"ranks": 2, "token_budget": 100, "trained_token_budget": 100}
    [pair] = plan_ready(samples, load=Load(per_token=0, per_pair=1), **options)[0].microbatches
    assert all(set(row.samples) & {0, 1} for row in pair)
    alone = samples[:1] + samples[2:]
    assert plan_ready(alone, load=Load(per_token=0, per_pair=1), **options)[0].rows == []


def test_plans_of_a_step_add_up() -> None:
    samples = [
        make_sample([*range(20), 50 + i] + [i] * 40, num_prompt=20, rollout_id=f"g/{i}")
        for i in range(2)
    ]
    budgets: dict[str, Any] = {"token_budget": 60, "trained_token_budget": 60}
    parts = [plan([samples[at]], **budgets).renumbered([at]) for at in (1, 0)]
    assert [part.unique_tokens for part in parts] == [60, 60]
    whole = merge(samples, parts)
    assert [row.samples for row in whole.rows] == [[1], [0]]
    assert whole.unique_tokens == 100
    assert sum(row.tokens for row in whole.rows) / whole.unique_tokens == 1.2


@pytest.mark.parametrize("load", SET_LOADS.values(), ids=SET_LOADS.keys())
@pytest.mark.parametrize(("ranks", "token_budget"), SETTINGS)
def test_rows_of_a_step_are_few_full_and_balanced(
    ranks: int, token_budget: int, load: Load
) -> None:
    found = plan(
        set_of_samples(seed=7),
        ranks=ranks,
        token_budget=token_budget,
        trained_token_budget=token_budget,
        load=load,
    )
    floor = math.ceil(found.unique_tokens / (ranks * token_budget))
    heaviest = sum(max(row.load for row in each) for each in found.microbatches)
    assert len(found.microbatches) <= math.ceil(1.15 * floor)
    assert sum(row.tokens for row in found.rows) <= 1.05 * found.unique_tokens
    assert sum(row.load for row in found.rows) >= 0.9 * ranks * heaviest


def test_a_step_whose_groups_come_one_by_one_is_hardly_worse() -> None:
    samples = set_of_samples(seed=7)
    numbers: dict[str, list[int]] = {sample.group_id: [] for sample in samples}
    for index, sample in enumerate(samples):
        numbers[sample.group_id].append(index)
    options: dict[str, Any] = {"token_budget": 4096, "trained_token_budget": 4096, "ranks": 4}
    options["load"] = SET_LOADS["pairs"]
    plans: list[Plan] = []
    waiting: list[int] = []
    for group in numbers.values():
        waiting += group
        ready, rest = plan_ready([samples[index] for index in waiting], **options)
        plans.append(ready.renumbered(waiting))
        waiting = [waiting[index] for index in rest]
    early = merge(samples, plans)
    last = plan([samples[index] for index in waiting], **options).renumbered(waiting)
    found = merge(samples, [early, last])
    assert sorted(i for row in found.rows for i in row.samples) == list(range(len(samples)))
    floor = math.ceil(found.unique_tokens / (4 * 4096))
    assert len(early.microbatches) >= floor // 3
    assert len(found.microbatches) <= math.ceil(1.15 * floor) + 1
    assert sum(row.tokens for row in found.rows) <= 1.05 * found.unique_tokens
    heaviest = sum(each[0].load for each in found.microbatches)
    assert sum(row.load for row in found.rows) >= 0.9 * 4 * heaviest


@given(st.integers(0, 10_000), st.integers(8, 60), st.integers(4, 30), st.sampled_from([1, 2]))
def test_what_a_cheap_look_finds_too_little_fills_nothing(
    seed: int, tokens: int, trained: int, ranks: int
) -> None:
    samples = make_groups(seed=seed, num_groups=4, generations=3, prompt=12, completion=5)
    found, _ = plan_ready(samples, token_budget=tokens, trained_token_budget=trained, ranks=ranks)
    budgets = Budgets(tokens, trained)
    groups = [[s for s in samples if s.group_id == str(g)] for g in range(4)]
    if sum(fill_at_most(group, budgets) for group in groups) < READY_FILL * ranks:
        assert not found.microbatches


def test_how_far_a_group_fills_a_row() -> None:
    """The example of fill_at_most."""
    shared = list(range(45))
    samples = [
        make_sample([*shared, *[50 + n] * 6], num_prompt=46, rollout_id=f"g/{n}") for n in (1, 2)
    ]
    assert fill_at_most(samples, Budgets(100, 20)) == pytest.approx(1.05)
    assert fill_at_most(samples, Budgets(100, 20), share_prefixes=False) == pytest.approx(1.5)
