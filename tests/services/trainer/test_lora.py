"""An adapter instead of all weights: against peft's own model, through checkpoints and files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from services.common import adapter_files, canary
from services.common.config import Recipe
from services.common.errors import UserError
from services.common.training_config import Lora
from services.trainer import lora
from services.trainer.export import export
from services.trainer.learner import Learner
from services.trainer.packing import pack
from services.trainer.types import Row
from tests.services.trainer.folders import make_folder
from tests.services.trainer.numerics import make_sample
from tests.services.trainer.ranked import kept, state_in

ROWS = canary.rows(50)[:8]
EXACT = 1e-5
"""Of log-probabilities in float32."""


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied" if request.param else "untied")
    return make_folder(path, tie_word_embeddings=request.param)


def recipe(folder: Path, *, dtype: str = "float32", **changes: Any) -> Recipe:
    adapter = {"rank": 4, "alpha": 8} | changes.pop("lora", {})
    return Recipe.model_validate(
        {
            "model": {"path": str(folder), "dtype": dtype},
            "data": {"file": "prompts.jsonl", "epochs": 1.0},
            "optimizer": {"learning_rate": 1e-2},
            "trainer": {"device": "cpu", "lora": adapter, **changes.pop("trainer", {})},
            **changes,
        }
    )


def train(learner: Learner, steps: int = 3) -> None:
    for number in range(steps):
        tokens = [1 + number, 2, 3, 4, 5]
        learner.accumulate([Row([make_sample(tokens, num_prompt=2, advantage=1.0)])])
        assert learner.finish().applied


def logprobs(model: Any) -> "np.ndarray[Any, Any]":
    with torch.no_grad():
        ids = torch.from_numpy(ROWS)
        logits = model.eval()(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        found: np.ndarray[Any, Any] = logits[:, :-1].gather(2, ids[:, 1:, None])[..., 0].numpy()
        return found


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapter_folder(learner: Learner, folder: Path) -> Path:
    folder.mkdir()
    learner.write_weights(folder / adapter_files.WEIGHTS, kind="adapter")
    (folder / adapter_files.CONFIG).write_bytes(learner.adapter_config())
    return folder


def test_only_the_adapter_is_trained_and_peft_computes_the_same(
    folder: Path, tmp_path: Path
) -> None:
    learner = Learner(recipe(folder))
    base = logprobs(plain(folder))
    assert np.abs(learner.canary_logprobs(ROWS) - base).max() < EXACT
    train(learner)
    trained = learner.canary_logprobs(ROWS)
    assert np.abs(trained - base).max() > 0.05
    saved = adapter_folder(learner, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(plain(folder), saved)
    assert np.abs(trained - logprobs(theirs)).max() < EXACT
    path = tmp_path / "base.safetensors"
    learner.write_weights(path, kind="base")
    original = plain(folder).state_dict()
    assert all(torch.equal(value, original[name]) for name, value in load_file(path).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_merged_says_what_the_adapter_says(
    folder: Path, tmp_path: Path, dtype: str
) -> None:
    learner = Learner(recipe(folder, dtype=dtype))
    train(learner)
    learner.save(tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=getattr(torch, dtype), local_files_only=True
    )
    apart = np.abs(logprobs(merged) - learner.canary_logprobs(ROWS))
    assert apart.max() < (EXACT if dtype == "float32" else 0.25)
    theirs = PeftModel.from_pretrained(plain(folder), tmp_path / "adapter")
    assert np.abs(logprobs(theirs) - learner.canary_logprobs(ROWS)).max() < (
        EXACT if dtype == "float32" else 0.25
    )
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)


@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_the_perturbed_canary_is_of_the_file_and_leaves_the_weights_bit_equal(
    folder: Path, tmp_path: Path, publish: str
) -> None:
    """Even before the first step, when an adapter's second factors are 0 and no factor moves
    them."""
    from services.generator.perturbation import perturbed_copy

    learner = Learner(recipe(folder, lora={"publish": publish}))
    path = tmp_path / "adapter_model.safetensors"
    learner.write_weights(path)
    before = learner.canary_logprobs(ROWS)
    found = learner.perturbed_logprobs(path, ROWS)
    assert np.abs(found - before).max() > 0.01
    assert np.array_equal(learner.canary_logprobs(ROWS), before)
    perturbed = perturbed_copy(path)
    if publish == "adapter":
        perturbed.rename(path)
        (tmp_path / adapter_files.CONFIG).write_bytes(learner.adapter_config())
        theirs = logprobs(PeftModel.from_pretrained(plain(folder), tmp_path))
    else:
        model = plain(folder)
        model.load_state_dict(load_file(perturbed), strict=False)
        theirs = logprobs(model)
    assert np.abs(found - theirs).max() < EXACT


def test_a_restored_adapter_goes_on_as_if_it_had_never_ended(folder: Path, tmp_path: Path) -> None:
    """To the bit; a checkpoint holds the adapter, its moments and nothing of the frozen weights."""
    settings = recipe(folder, trainer={"gradient_checkpointing": True})
    learner = Learner(settings)
    train(learner, 2)
    saved = kept(learner, tmp_path / "saved")
    train(learner, 2)
    again = Learner(settings)
    again.restore(saved)
    train(again, 2)
    first = state_in(kept(learner, tmp_path / "first"))
    second = state_in(kept(again, tmp_path / "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    masters = [name for name in first if name.startswith("master.")]
    assert masters
    assert all(lora.is_adapter(name) for name in masters)


def test_the_reference_is_the_model_with_the_adapter_off(folder: Path) -> None:
    """No second model is loaded, and training goes on with the adapter on."""
    learner = Learner(recipe(folder, loss={"kl_coefficient": 0.1}))
    step = learner._own._step
    row = pack([make_sample([1, 2, 3, 4, 5], num_prompt=2)])
    assert step._reference is not None
    at_first = step._reference(row)
    assert torch.equal(at_first, step.forward(row).logprobs)
    train(learner)
    assert (step.forward(row).logprobs - at_first).abs().max() > 0.01
    assert torch.equal(step._reference(row), at_first)
    parameters = [p for p in learner._own._model.parameters() if p.requires_grad]
    assert len(parameters) == 2 * len(learner._own.adapted)


def test_the_penalty_holds_the_adapter_back(folder: Path) -> None:
    apart = {}
    for coefficient in (0.0, 100.0):
        learner = Learner(recipe(folder, loss={"kl_coefficient": coefficient}))
        before = learner.canary_logprobs(ROWS)
        train(learner, 10)
        apart[coefficient] = float(np.abs(learner.canary_logprobs(ROWS) - before).mean())
    assert apart[100.0] < 0.7 * apart[0.0]


def test_layers_are_chosen_by_the_ends_of_their_names(folder: Path) -> None:
    learner = Learner(recipe(folder, lora={"target_modules": ["q_proj", "layers.1.mlp.up_proj"]}))
    assert sorted(learner._own.adapted) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
    ]


@pytest.mark.parametrize(
    ("target", "why"),
    [("lm_head", "is the output head"), ("q", "is no linear layer of"), ("norm", "no linear")],
)
def test_what_cannot_be_adapted_is_the_users_mistake(folder: Path, target: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"trainer\.lora\.target_modules: .*{why}"):
        Learner(recipe(folder, lora={"target_modules": [target]}))


def gpt2(folder: Path) -> Path:
    """A model whose adapters vLLM does not serve, and whose layers have their weights the other
    way round."""
    make_folder(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50,
        bos_token_id=None,
        eos_token_id=49,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_what_vllm_does_not_serve_is_merged_with_the_reason(tmp_path: Path) -> None:
    made = gpt2(tmp_path / "gpt2")
    with capture_logs() as logs:
        learner = Learner(recipe(made))
    said = next(entry for entry in logs if entry["event"] == "training an adapter")
    assert said["published"] == "merged because vLLM serves no adapters of GPT2LMHeadModel"
    train(learner)
    path = tmp_path / "merged.safetensors"
    learner.write_weights(path)
    model = plain(made)
    model.load_state_dict(load_file(path), strict=False)
    assert np.abs(logprobs(model) - learner.canary_logprobs(ROWS)).max() < EXACT
    with pytest.raises(UserError, match=r"^trainer\.lora\.publish: .*GPT2LMHeadModel"):
        Learner(recipe(made, lora={"publish": "adapter"}))


def test_what_vllm_serves_is_published_as_an_adapter(folder: Path) -> None:
    with capture_logs() as logs:
        assert Learner(recipe(folder)).publishes_adapters
    said = next(entry for entry in logs if entry["event"] == "training an adapter")
    assert said["published"] == "adapter"
    assert said["trained_parameters"] < said["frozen_parameters"]
    assert not Learner(recipe(folder, lora={"publish": "merged"})).publishes_adapters


def test_a_checkpoint_is_exported_merged_and_alone(folder: Path, tmp_path: Path) -> None:
    settings = recipe(folder)
    learner = Learner(settings)
    train(learner)
    expected = learner.canary_logprobs(ROWS)
    from services.trainer.checkpoint import Checkpoints

    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "attempts").mkdir()
    Checkpoints(tmp_path / "run" / "checkpoints", keep=1).write((1, 3), {}, learner.snapshot())
    assert settings.trainer.lora is not None
    made = export(
        tmp_path / "run",
        tmp_path / "merged",
        model=folder,
        dtype="float32",
        lora=settings.trainer.lora,
    )
    assert made.step == 3
    assert np.abs(logprobs(plain(tmp_path / "merged")) - expected).max() < EXACT
    export(
        tmp_path / "run",
        tmp_path / "alone",
        model=folder,
        dtype="float32",
        lora=settings.trainer.lora,
        adapter_only=True,
    )
    theirs = PeftModel.from_pretrained(plain(folder), tmp_path / "alone")
    assert np.abs(logprobs(theirs) - expected).max() < EXACT


def test_an_adapter_of_another_model_is_not_merged(folder: Path) -> None:
    adapter = {
        "model.layers.0.mlp.up_proj.lora_A.default.weight": torch.zeros(4, 3),
        "model.layers.0.mlp.up_proj.lora_B.default.weight": torch.zeros(5, 4),
    }
    with pytest.raises(UserError, match="the adapter is of another model"):
        lora.merge(plain(folder), adapter, Lora(rank=4))
