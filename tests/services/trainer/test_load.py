import re

import numpy as np
import pytest

from services.trainer.load import Load, sum_of_squares
from services.trainer.planner import plan
from tests.services.trainer.numerics import make_sample


def test_worked_example_counts_a_shared_prefix_once() -> None:
    # 5 and 4 forwarded tokens, the first 3 of them shared; the last token is a target only.
    samples = [
        make_sample([1, 2, 3, 4, 5, 0], num_prompt=3, rollout_id="g/0"),
        make_sample([1, 2, 3, 9, 0], num_prompt=3, rollout_id="g/1"),
    ]

    def load(of: Load, **options: bool) -> float:
        found = plan(samples, token_budget=20, trained_token_budget=20, load=of, **options)
        [row] = found.rows
        return row.load

    assert load(Load(per_token=10, per_pair=1)) == 79
    assert load(Load(per_token=10, per_pair=1, per_trained=100)) == 79 + 5 * 100
    assert load(Load(per_token=0, per_square=1)) == sum_of_squares([6, 5]) == 61
    unshared = load(Load(per_token=10, per_pair=1), share_prefixes=False)
    assert unshared == 10 * 9 + (1 + 2 + 3 + 4 + 5) + (1 + 2 + 3 + 4)


@pytest.mark.parametrize("parts", [(0.0,), (1.0, -1.0)])
def test_a_load_that_balances_nothing_is_refused(parts: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape("give costs of 0 or more, and one above 0")):
        Load(*parts)


def test_sum_of_squares_is_exact_beyond_32_bits() -> None:
    assert sum_of_squares([3, 5]) == 34
    assert sum_of_squares(np.array([100_000] * 2, np.int32).tolist()) == 2 * 10**10
