"""An adapter over two ranks: the frozen weights are sharded as well, and all is as with one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.common import canary
from services.common.config import Recipe
from services.trainer.learner import Learner
from tests.services.trainer.folders import make_folder
from tests.services.trainer.numerics import make_groups
from tests.services.trainer.ranked import (
    halves,
    kept,
    one_by_one,
    ranked,
    recipe_for,
    state_in,
    step,
)

pytestmark = pytest.mark.timeout(300)

ROWS = canary.rows(50)[:8]
SAMPLES = make_groups(seed=0, num_groups=2, generations=4, prompt=5, completion=6)


def recipe(folder: Path, *, ranks: int, publish: str) -> Recipe:
    made = recipe_for(folder, ranks=ranks, lora={"rank": 5, "alpha": 10, "publish": publish})
    loss = made.loss.model_copy(update={"kl_coefficient": 0.1})
    return made.model_copy(update={"loss": loss})


@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_two_ranks_train_and_publish_as_one(tmp_path: Path, publish: str) -> None:
    """With a reference, which is the sharded model with the adapter off; a rank of 5 does not
    divide evenly."""
    folder = make_folder(tmp_path / "model", tie_word_embeddings=publish == "merged")
    microbatches = halves(SAMPLES)
    one = Learner(recipe(folder, ranks=1, publish=publish))
    for _ in range(3):
        expected = step(one, one_by_one(microbatches))
    one.write_weights(tmp_path / "one.safetensors")
    perturbed = one.perturbed_logprobs(tmp_path / "one.safetensors", ROWS)
    with ranked(recipe(folder, ranks=2, publish=publish)) as two:
        for _ in range(3):
            found = step(two, microbatches)
        assert found.statistics.kl_ref_sum == pytest.approx(
            expected.statistics.kl_ref_sum, rel=1e-4
        )
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        two.write_weights(tmp_path / "two.safetensors")
        again = two.perturbed_logprobs(tmp_path / "two.safetensors", ROWS)
        assert np.abs(two.canary_logprobs(ROWS) - one.canary_logprobs(ROWS)).max() < 1e-4
        saved = kept(two, tmp_path / "saved")
    assert np.abs(again - perturbed).max() < 1e-4
    ours, theirs = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)
    state, other = state_in(kept(one, tmp_path / "of-one")), state_in(saved)
    assert state.keys() == other.keys()
    restored = Learner(recipe(folder, ranks=1, publish=publish))
    restored.restore(saved)
    assert np.abs(restored.canary_logprobs(ROWS) - one.canary_logprobs(ROWS)).max() < 1e-4
