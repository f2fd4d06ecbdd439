from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common import canary
from services.common.config import Data, Model, Recipe
from services.common.errors import UserError
from services.common.training_config import Optimizer, Trainer
from services.trainer.learner import Learner
from services.trainer.types import Row
from tests.services.trainer.folders import make_folder
from tests.services.trainer.numerics import make_sample
from tests.services.trainer.ranked import kept, state_in

ROWS = canary.rows(50)[:8]


def recipe(folder: Path, **trainer: Any) -> Recipe:
    return Recipe(
        model=Model(path=str(folder)),
        data=Data(file="prompts.jsonl", epochs=1.0),
        optimizer=Optimizer(learning_rate=1e-2),
        trainer=Trainer(device="cpu", **trainer) if "device" not in trainer else Trainer(**trainer),
    )


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied" if request.param else "untied")
    return make_folder(path, tie_word_embeddings=request.param)


def transformers_logprobs(model: Any, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    with torch.no_grad():
        ids = torch.from_numpy(rows)
        logits = model.eval()(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        found: np.ndarray[Any, Any] = logits[:, :-1].gather(2, ids[:, 1:, None])[..., 0].numpy()
        return found


def train(learner: Learner) -> None:
    learner.accumulate([Row([make_sample([1, 2, 3, 4], num_prompt=2)])])
    assert learner.finish().applied


def state(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner._own._model.state_dict().items()}


def is_tied(folder: Path) -> bool:
    return '"tie_word_embeddings": true' in (folder / "config.json").read_text()


def test_written_weights_are_the_present_ones_and_no_tensor_is_there_twice(
    folder: Path, tmp_path: Path
) -> None:
    learner = Learner(recipe(folder))
    train(learner)
    path = tmp_path / "next.safetensors"
    num_tensors, seconds = learner.write_weights(path)
    assert seconds >= 0
    written = load_file(path)
    assert len(written) == num_tensors
    assert ("lm_head.weight" in written) == (not is_tied(folder))
    original = load_file(folder / "model.safetensors")
    assert set(written) == set(original)
    now = state(learner)
    assert all(torch.equal(tensor, now[name]) for name, tensor in written.items())
    assert any(not torch.equal(tensor, original[name]) for name, tensor in written.items())


def test_the_canary_is_what_transformers_computes(folder: Path) -> None:
    learner = Learner(recipe(folder))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = transformers_logprobs(plain, ROWS)
    found = learner.canary_logprobs(ROWS)
    assert found.shape == (8, canary.ROW_TOKENS - 1)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_the_perturbed_canary_is_of_the_file_and_leaves_the_weights_bit_equal(
    folder: Path, tmp_path: Path
) -> None:
    learner = Learner(recipe(folder))
    path = tmp_path / "1.safetensors"
    learner.write_weights(path)
    train(learner)  # the model goes on, the published version does not
    before = state(learner)
    found = learner.perturbed_logprobs(path, ROWS)
    after = state(learner)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in load_file(path).items():
            factor = torch.from_numpy(canary.factors(name, tuple(tensor.shape)))
            plain.state_dict()[name].copy_(tensor * factor)
    np.testing.assert_allclose(found, transformers_logprobs(plain, ROWS), atol=2e-5)
    # A tensor left behind must show: the movement is far above rounding.
    assert np.abs(found - learner.canary_logprobs(ROWS)).mean() > 1e-2


def test_training_goes_on_after_a_perturbation_as_if_there_had_been_none(
    folder: Path, tmp_path: Path
) -> None:
    disturbed, quiet = Learner(recipe(folder)), Learner(recipe(folder))
    for learner in (disturbed, quiet):
        learner.write_weights(tmp_path / "v.safetensors")
        learner.accumulate([Row([make_sample([1, 2, 3, 4], num_prompt=2)])])
        if learner is disturbed:  # between two rows of a step, as for a generator that joins
            learner.perturbed_logprobs(tmp_path / "v.safetensors", ROWS)
        learner.accumulate([Row([make_sample([5, 6, 7], num_prompt=1)])])
        learner.finish()
    pairs = zip(state(disturbed).values(), state(quiet).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_save_makes_a_folder_that_transformers_loads(folder: Path, tmp_path: Path) -> None:
    learner = Learner(recipe(folder))
    train(learner)
    learner.save(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    found = transformers_logprobs(model, ROWS)
    np.testing.assert_allclose(found, learner.canary_logprobs(ROWS), atol=2e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("w1 w2")["input_ids"] == [1, 2]
    if is_tied(folder):
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_plan_keeps_to_the_recipes_budgets(folder: Path) -> None:
    learner = Learner(recipe(folder, token_budget=2048, trained_token_budget=4))
    samples = [make_sample([1, 2, n, 4], num_prompt=2, rollout_id=f"g/{n}") for n in range(5, 8)]
    assert [len(row.samples) for row in learner.plan(samples).rows] == [2, 1]
    assert learner.vocab_size == 50


@pytest.mark.parametrize("missing", ["nowhere", "empty"])
def test_a_folder_without_a_model_is_the_users_mistake(tmp_path: Path, missing: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^model\.path: .* is no model folder"):
        Learner(recipe(tmp_path / missing))


def test_a_folder_whose_weights_are_missing_or_broken_is_the_users_mistake(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"^model\.path: .* cannot be loaded: "):
        Learner(recipe(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(UserError, match=r"^model\.path: .* cannot be loaded: "):
        Learner(recipe(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there_is_said_and_not_replaced(folder: Path) -> None:
    with pytest.raises(UserError, match=r'^trainer\.device: "cuda" is asked for'):
        Learner(recipe(folder, device="cuda"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_learner_goes_on_as_if_it_had_never_ended(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    """To the bit: weights, moments, the warm-up's count, and what torch draws next."""
    settings = recipe(folder)
    settings = settings.model_copy(
        update={
            "model": settings.model.model_copy(update={"dtype": dtype}),
            "optimizer": settings.optimizer.model_copy(update={"warmup_steps": 5}),
        }
    )
    learner = Learner(settings)
    for _ in range(2):
        train(learner)
    saved = kept(learner, tmp_path / "saved")
    drawn = torch.rand(3)
    train(learner)
    torch.rand(5)

    again = Learner(settings)
    again.restore(saved)
    assert again.num_applied == 2
    assert torch.equal(torch.rand(3), drawn)
    train(again)
    first = state_in(kept(learner, tmp_path / "first"))
    second = state_in(kept(again, tmp_path / "second"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    now = state(learner)
    assert all(torch.equal(tensor, now[name]) for name, tensor in state(again).items())


def test_a_snapshot_is_a_copy(folder: Path, tmp_path: Path) -> None:
    learner = Learner(recipe(folder))
    train(learner)
    before = state_in(kept(learner, tmp_path / "before"))
    saved = learner.snapshot()
    train(learner)
    (tmp_path / "saved").mkdir()
    saved.write(tmp_path / "saved")
    after = state_in(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"num_hidden_layers": 3}, r"layers\.2\..*on one side"), ({"intermediate_size": 56}, "shape")],
)
def test_a_checkpoint_of_another_model_is_the_users_mistake(
    folder: Path, tmp_path: Path, changes: dict[str, int], why: str
) -> None:
    tied = is_tied(folder)
    other = Learner(recipe(make_folder(tmp_path / "m", tie_word_embeddings=tied, **changes)))
    saved = kept(other, tmp_path / "saved")
    with pytest.raises(UserError, match=rf"does not fit model\.path .*{why}"):
        Learner(recipe(folder)).restore(saved)


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradient_checkpointing_computes_layers_again_and_changes_nothing(
    folder: Path, recomputes: bool
) -> None:
    learner = Learner(recipe(folder, gradient_checkpointing=recomputes))
    counted = 0

    def count(*_: Any) -> None:
        nonlocal counted
        counted += 1

    learner._own._model.model.layers[0].mlp.register_forward_pre_hook(count)
    learner.accumulate([Row([make_sample([1, 2, 3, 4], num_prompt=2)])])
    assert counted == (2 if recomputes else 1)
    plain = Learner(recipe(folder))
    plain.accumulate([Row([make_sample([1, 2, 3, 4], num_prompt=2)])])
    assert learner.finish().grad_norm == pytest.approx(plain.finish().grad_norm, rel=1e-6)
