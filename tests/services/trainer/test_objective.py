"""The parts of what is optimised, from the recipe to the gradient of a learner."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from services.common.config import Recipe
from services.common.training_config import Loss, Optimizer
from services.trainer.learner import Learner
from services.trainer.packing import pack
from services.trainer.step import OptimizerStep, StepResult
from services.trainer.types import Row, TrainSample
from tests.services.trainer.folders import make_folder
from tests.services.trainer.numerics import VOCABULARY, make_groups, make_sample
from tests.services.trainer.ranked import (
    halves,
    kept,
    one_by_one,
    ranked,
    recipe_for,
    state_in,
    step,
)

STILL = Optimizer(learning_rate=1e-30, betas=(0.0, 0.0), max_grad_norm=1e30)
"""The first moment is the gradient itself, and no weight moves."""


def with_loss(folder: Path, loss: dict[str, Any], **trainer: Any) -> Recipe:
    made = recipe_for(folder, **trainer).model_dump()
    return Recipe.model_validate(made | {"loss": loss, "optimizer": STILL.model_dump()})


def conversations() -> list[TrainSample]:
    """Four conversations of one group and a fork of the first, where `halves` gives it to the other
    rank."""
    samples = make_groups(seed=0, num_groups=1, generations=4, prompt=8, completion=6)
    fork = make_sample([*samples[0].token_ids[:1].tolist(), 5, 6, 7], num_prompt=2)
    tokens = samples[0].num_trained + fork.num_trained
    fork = replace(fork, rollout_id=samples[0].rollout_id, conversation_tokens=tokens)
    return [replace(samples[0], conversation_tokens=tokens), samples[1], fork, *samples[2:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("other"), seed=1)


def test_a_kl_trains_on_groups_without_signal(folder: Path, other: Path) -> None:
    rows = [[Row([make_sample([1, 2, 3, 4], num_prompt=2, advantage=0.0)])]]
    plain = step(Learner(with_loss(folder, {})), rows)
    assert (plain.loss, plain.grad_norm) == (0.0, 0.0)
    loss = {"kl_coefficient": 0.5, "reference": str(other)}
    found = step(Learner(with_loss(folder, loss)), rows)
    assert found.statistics.kl_ref_tokens == 2
    assert found.loss == pytest.approx(0.5 * found.statistics.kl_ref_sum / 2)
    assert found.grad_norm is not None
    assert found.grad_norm > 0


def test_the_recipe_says_how_long_conversations_may_be(folder: Path) -> None:
    rows = [[Row(conversations())]]
    recipe = with_loss(folder, {"normalise": "constant"})
    assert step(Learner(recipe), rows).denominator == pytest.approx(
        4 * recipe.generation.max_completion_tokens
    )


@pytest.mark.timeout(240)
def test_two_ranks_have_the_gradient_of_one(folder: Path, other: Path, tmp_path: Path) -> None:
    """With forks of one conversation on different ranks, an echo, and a reference on each."""
    loss = {"normalise": "sequence", "kl_coefficient": 0.5, "reference": str(other)}
    rows = halves(conversations())
    assert [[s.conversation_tokens is not None for s in row.samples] for row in rows[0]] == [
        [True, False],
        [True],
    ]
    assert rows[1][1].echo
    one = Learner(with_loss(folder, loss))
    alone = step(one, one_by_one(rows))
    with ranked(with_loss(folder, loss, ranks=2)) as two:
        both = step(two, rows)
        found = state_in(kept(two, tmp_path / "2"))
    wanted = state_in(kept(one, tmp_path / "1"))
    assert both.denominator == pytest.approx(4)
    assert both.denominator == pytest.approx(alone.denominator, rel=1e-12)
    assert both.loss == pytest.approx(alone.loss, rel=1e-5)
    assert both.statistics.kl_ref_sum == pytest.approx(alone.statistics.kl_ref_sum, rel=1e-5)
    for name, value in wanted.items():
        if name.startswith("exp_avg."):
            assert float((found[name] - value).norm()) <= 1e-5 * float(value.norm()), name


def routed(coefficient: float | None) -> tuple[StepResult, torch.Tensor]:
    """A step of a mixture of experts on two rows, and its gradient."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            moe_intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            initializer_range=0.3,
            router_aux_loss_coef=0.125,
        )
    )
    made = OptimizerStep(
        model,
        optimizer=STILL,
        loss=Loss(router_aux_coefficient=coefficient),
        temperature=1.0,
    )
    for sample in (
        make_sample([1, 2, 3], num_prompt=2),
        make_sample([4, 5, 6, 7, 8], num_prompt=2, advantage=-1.0),
    ):
        made.accumulate(pack([sample]))
    result = made.finish()
    moments = [value for name, value in made.tensors().items() if name.startswith("exp_avg.")]
    return result, torch.cat([moment.flatten() for moment in moments])


def test_router_losses_have_the_models_own_weight_or_the_recipes() -> None:
    without, plain = routed(0.0)
    once, first = routed(0.125)
    twice, second = routed(0.25)
    default, own = routed(None)
    assert without.statistics.aux_loss is None
    assert once.statistics.aux_loss is not None
    # Two experts of four a token: 2 when all are loaded alike, 4 at most.
    assert 1.9 < once.statistics.aux_loss < 4
    assert None not in (without.loss, once.loss)
    assert once.loss == pytest.approx((without.loss or 0) + 0.125 * once.statistics.aux_loss)
    assert default.loss == once.loss
    assert torch.equal(own, first)
    assert float((first - plain).norm()) > 1e-4
    torch.testing.assert_close(second - plain, 2 * (first - plain), rtol=1e-3, atol=1e-6)
    assert twice.statistics.aux_loss == once.statistics.aux_loss
