import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.scorer.advantages import combine, group_advantages

REWARDS = st.lists(
    st.one_of(st.none(), st.floats(min_value=-100, max_value=100, width=32)),
    min_size=0,
    max_size=16,
)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, None, 0, 1], [0.70711, 0, -1.41421, 0.70711]),  # C01 a: None is not a 0
        ([1.5, 0.5, 0, None], [1.33631, -0.26726, -1.06904, 0]),  # C01 b
        ([None] * 4, [0, 0, 0, 0]),  # C01 c
        ([1, 1, 0], [0.70711, 0.70711, -1.41421]),  # C04 a: a group of three, not a fourth zero
        ([1, 0], [1, -1]),  # C05 a, prompt P
        ([10, 9], [1, -1]),  # C05 a, prompt Q: a group of its own
        ([None, 0.3, None], [0, 0, 0]),  # one scored: no Bessel correction, no NaN
        ([], []),
    ],
)
def test_worked_cases(rewards: list[float | None], expected: list[float]) -> None:
    assert group_advantages(rewards).advantages == pytest.approx(expected, abs=1e-5)


def test_rewards_equal_but_for_rounding_have_no_signal() -> None:
    # Seven float32 0.1s summed in float32 give a mean that is not 0.1; the formula alone makes
    # -0.427 of that.
    same = group_advantages([float(np.float32(0.1))] * 6 + [0.1])
    assert same.advantages == [0.0] * 7
    assert same.zero_signal
    assert not group_advantages([0.1] * 6 + [0.2]).zero_signal
    assert group_advantages([1e9, 1e9 + 100]).zero_signal
    assert not group_advantages([0.0, 1e-5]).zero_signal


def test_scale_none_only_centres() -> None:
    assert group_advantages([3.0, 1.0, None], scale="none").advantages == [1.0, -1.0, 0.0]


def test_statistics_are_of_the_scored_members() -> None:
    result = group_advantages([1, None, 0, 1])
    assert result.num_scored == 3
    assert result.mean == pytest.approx(2 / 3)
    assert result.std == pytest.approx(0.47140, abs=1e-5)
    nobody = group_advantages([None, None])
    assert (nobody.num_scored, nobody.mean, nobody.std) == (0, None, None)


def test_huge_rewards_stay_finite() -> None:
    assert group_advantages([1e100, -1e100]).advantages == pytest.approx([1, -1])


@given(REWARDS, st.sampled_from(["group", "none"]))
def test_advantages_are_finite_and_sum_to_zero(rewards: list[float | None], scale: str) -> None:
    result = group_advantages(rewards, scale=scale)  # type: ignore[arg-type]
    assert all(math.isfinite(advantage) for advantage in result.advantages)
    assert math.fsum(result.advantages) == pytest.approx(0, abs=1e-3)
    pairs = zip(rewards, result.advantages, strict=True)
    assert all(advantage == 0 for reward, advantage in pairs if reward is None)


WHOLE = st.lists(st.one_of(st.none(), st.integers(-50, 50)), min_size=2, max_size=12)


@given(WHOLE, st.integers(-1000, 1000))
def test_a_shift_of_all_rewards_changes_nothing(rewards: list[int | None], shift: int) -> None:
    shifted = [None if reward is None else reward + shift for reward in rewards]
    before, after = group_advantages(rewards), group_advantages(shifted)
    assert after.advantages == pytest.approx(before.advantages, abs=1e-6)


@given(WHOLE, st.randoms())
def test_order_does_not_matter(rewards: list[int | None], random: object) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)  # type: ignore[attr-defined]
    before = group_advantages(rewards).advantages
    after = group_advantages([rewards[i] for i in order]).advantages
    assert after == pytest.approx([before[i] for i in order], abs=1e-9)


@given(WHOLE)
def test_unscored_members_do_not_change_the_others(rewards: list[int | None]) -> None:
    scored = [reward for reward in rewards if reward is not None]
    assume(scored)
    pairs = zip(rewards, group_advantages(rewards).advantages, strict=True)
    kept = [advantage for reward, advantage in pairs if reward is not None]
    assert kept == group_advantages(scored).advantages


def test_combine_sums_what_is_present() -> None:
    first, second = [1, None, 0, None], [0.5, 0.5, None, None]
    totals = [
        combine(pair, weights=[1, 1], on_abstain="sum_present")
        for pair in zip(first, second, strict=True)
    ]
    assert totals == [1.5, 0.5, 0, None]
    strict = [
        combine(pair, weights=[1, 1], on_abstain="unscored")
        for pair in zip(first, second, strict=True)
    ]
    assert strict == [1.5, None, None, None]


def test_combine_weighs_and_refuses_what_overflows() -> None:
    assert combine([1.0, -2.0], weights=[0.5, 3.0], on_abstain="sum_present") == -5.5
    assert combine([1e100, 1.0], weights=[1e300, 1.0], on_abstain="sum_present") is None
    assert combine([1e99], weights=[100.0], on_abstain="sum_present") is None
