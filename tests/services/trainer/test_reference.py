from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from services.common.config import Data, ReasoningGym, Recipe
from services.common.errors import UserError
from services.trainer.packing import pack
from services.trainer.reference import Reference, load_reference
from services.trainer.step import OptimizerStep
from tests.services.trainer.folders import make_folder
from tests.services.trainer.numerics import make_model, make_sample, sequence_logprobs

CPU = torch.device("cpu")


def recipe(policy: Path, *, reference: Path | None = None, coefficient: float = 0.1) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": str(policy)},
            "data": Data(reasoning_gym=ReasoningGym(task="chain_sum")),
            "trainer": {"max_steps": 1},
            "loss": {"kl_coefficient": coefficient}
            | ({} if reference is None else {"reference": str(reference)}),
        }
    )


def load(made: Recipe) -> Any:
    return load_reference(made, CPU, torch.float32)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("other"), seed=1, num_hidden_layers=1)


def test_without_a_coefficient_no_model_is_loaded(policy: Path) -> None:
    assert load(recipe(policy, coefficient=0.0)) is None


def test_it_says_what_the_model_says_at_the_temperature(policy: Path, other: Path) -> None:
    samples = [make_sample([3, 4, 5, 6], num_prompt=2), make_sample([3, 4, 7, 8], num_prompt=2)]
    row = pack(samples)
    for chosen, plain in ((None, make_model()), (other, make_model(seed=1, num_hidden_layers=1))):
        model = load(recipe(policy, reference=chosen))
        found = Reference(model, temperature=0.7)(row)
        for sample, part in zip(samples, found.chunk(2), strict=True):
            wanted = sequence_logprobs(plain, sample.token_ids[None], temperature=0.7)[0, 1:]
            assert part.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
        assert not found.requires_grad
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_penalty_is_zero_where_nothing_was_trained_and_grows(policy: Path) -> None:
    made = recipe(policy, coefficient=0.2)
    step = OptimizerStep(
        make_model(),
        optimizer=made.optimizer.model_copy(update={"learning_rate": 1e-3}),
        loss=made.loss,
        temperature=1.0,
        reference=Reference(load(made), temperature=1.0),
    )
    sample = make_sample([1, 2, 3, 4], num_prompt=2)
    divergences = []
    for _ in range(3):
        step.accumulate(pack([sample]))
        found = step.finish().statistics
        assert found.kl_ref_tokens == 2
        divergences.append(found.kl_ref_sum)
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert divergences[2] > divergences[1] > 1e-6


def test_a_strong_penalty_holds_the_policy_back(policy: Path) -> None:
    sample = make_sample([1, 2, 3, 4], num_prompt=2)

    def moved(coefficient: float) -> float:
        made, model = recipe(policy, coefficient=coefficient), make_model()
        reference = load(made)
        step = OptimizerStep(
            model,
            optimizer=made.optimizer.model_copy(update={"learning_rate": 1e-3}),
            loss=made.loss.model_copy(update={"kind": "tis", "tis_cap": 2.0}),
            temperature=1.0,
            reference=None if reference is None else Reference(reference, temperature=1.0),
        )
        before = sequence_logprobs(model, sample.token_ids[None])
        for _ in range(8):
            step.accumulate(pack([sample]))
            step.finish()
        return float((sequence_logprobs(model, sample.token_ids[None]) - before)[0, 1:].sum())

    assert 0 < moved(5.0) < moved(0.0) / 2


def test_a_folder_that_cannot_be_used_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"loss\.reference: .*nothing is no model folder"):
        load(recipe(policy, reference=tmp_path / "nothing"))
    wide = make_folder(tmp_path / "wide", vocab_size=51)
    with pytest.raises(UserError, match=r"loss\.reference: .* vocabulary of 51, .* of 50"):
        load(recipe(policy, reference=wide))
    swapped = make_folder(tmp_path / "swapped")
    file = swapped / "tokenizer.json"
    file.write_text(file.read_text().replace('"w7"', '"w_"').replace('"w8"', '"w7"'))
    assert Tokenizer.from_file(str(file)).get_vocab()["w7"] == 8
    with pytest.raises(UserError, match=r"loss\.reference: the tokenizer of .* is another one"):
        load(recipe(policy, reference=swapped))
    torn = make_folder(tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"loss\.reference: .*torn cannot be loaded"):
        load(recipe(policy, reference=torn))
    random = make_folder(tmp_path / "random", attention_dropout=0.1)
    with pytest.raises(UserError, match=r"loss\.reference: .*random cannot be used: .*dropout"):
        load(recipe(policy, reference=random))


def test_the_reference_is_no_copy_that_follows_the_policy(policy: Path) -> None:
    weights = load_file(policy / "model.safetensors")
    model = load(recipe(policy))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step = OptimizerStep(
        make_model(),
        optimizer=recipe(policy).optimizer.model_copy(update={"learning_rate": 1e-2}),
        loss=recipe(policy).loss,
        temperature=1.0,
        reference=Reference(model, temperature=1.0),
    )
    step.accumulate(pack([make_sample([1, 2, 3, 4], num_prompt=2)]))
    assert step.finish().applied
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in weights)
