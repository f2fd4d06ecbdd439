"""Models that take one sample at a time, from the planner to the optimizer step."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from services.common import canary
from services.trainer.flops import Flops
from services.trainer.learner import Learner
from services.trainer.packing import pack
from services.trainer.types import Row
from tests.services.trainer.architectures import ARCHITECTURES
from tests.services.trainer.folders import make_folder
from tests.services.trainer.numerics import VOCABULARY, make_sample, sequence_logprobs
from tests.services.trainer.ranked import recipe_for

pytestmark = pytest.mark.filterwarnings("ignore")

BUDGET = 32


def test_budgets_count_every_token_and_a_step_is_made(tmp_path: Path) -> None:
    [mamba] = [each for each in ARCHITECTURES if each.name == "Mamba"]
    folder = make_folder(tmp_path / "model")
    mamba.make().save_pretrained(folder)
    recipe = recipe_for(folder)
    recipe = recipe.model_copy(
        update={
            "trainer": recipe.trainer.model_copy(update={"token_budget": BUDGET}),
            "generator": recipe.generator.model_copy(update={"max_model_len": BUDGET}),
        }
    )
    learner = Learner(recipe)
    assert learner.rows == "one sample at a time (it has layers of type linear_attention)"
    assert learner.peak_flops is None

    prompt = list(range(10))
    samples = [
        make_sample([*prompt, 20 + number, 21], num_prompt=10, rollout_id=f"g/{number}")
        for number in range(4)
    ]
    made = learner.plan(samples)
    # 11 forwarded tokens each: shared, one row of 10 + 4 would do.
    assert made.oversize == []
    assert [row.tokens for row in made.rows] == [22, 22]
    assert made.unique_tokens == 14, "what is forwarded beyond it is duplication"
    ready, kept = learner.plan_ready(samples)
    assert sum(len(row.samples) for row in ready.rows) + len(kept) == 4

    before = learner.canary_logprobs(canary.rows(VOCABULARY)[:4])
    for row in made.rows:
        learner.accumulate([Row([samples[index] for index in row.samples])])
    result = learner.finish()
    assert result.applied
    assert (result.forwarded_tokens, result.trained_tokens) == (44, 8)
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows_flops = [
        Flops.of_model(model).of_row(pack([sample], share_prefixes=False)) for sample in samples
    ]
    assert result.flops == pytest.approx(sum(rows_flops))
    np.testing.assert_allclose(
        before, sequence_logprobs(model, canary.rows(VOCABULARY)[:4]), atol=1e-5
    )
    assert not np.allclose(before, learner.canary_logprobs(canary.rows(VOCABULARY)[:4]), atol=1e-4)
