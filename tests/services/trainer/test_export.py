import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from services.common import canary
from services.common.errors import UserError
from services.trainer.checkpoint import Checkpoints
from services.trainer.export import export
from services.trainer.learner import Learner
from services.trainer.types import Row
from tests.services.trainer.folders import make_folder
from tests.services.trainer.numerics import VOCABULARY, make_sample, sequence_logprobs
from tests.services.trainer.ranked import recipe_for

ROWS = canary.rows(VOCABULARY)[:8]


def train(learner: Learner) -> None:
    learner.accumulate([Row([make_sample([1, 2, 3, 4], num_prompt=2)])])
    assert learner.finish().applied


def run_of(folder: Path, model: Path, dtype: str) -> list["np.ndarray[Any, Any]"]:
    """A run's folder with checkpoints of steps 1 and 2; what the policy said at steps 0, 1, 2."""
    learner = Learner(recipe_for(model, dtype=dtype))
    checkpoints = Checkpoints(folder / "checkpoints", keep=3)
    checkpoints.folder.mkdir(parents=True)
    said = [learner.canary_logprobs(ROWS)]
    for step in (1, 2):
        train(learner)
        checkpoints.write((1, step), {}, learner.snapshot())
        said.append(learner.canary_logprobs(ROWS))
    assert not np.allclose(said[1], said[2], atol=1e-3)
    return said


def loaded(folder: Path, dtype: str) -> "np.ndarray[Any, Any]":
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    # As the folder says it, without being told.
    assert model.dtype == getattr(torch, dtype)
    return sequence_logprobs(model.eval(), ROWS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_exported_says_what_the_policy_said(tmp_path: Path, tied: bool, dtype: str) -> None:
    model = make_folder(tmp_path / "model", tie_word_embeddings=tied)
    run = tmp_path / "run"
    said = run_of(run, model, dtype)
    before = sorted(path for path in run.rglob("*"))
    atol = 1e-5 if dtype == "float32" else 0.05

    newest = export(run, tmp_path / "newest", model=model, dtype=dtype)
    assert newest.step == 2
    np.testing.assert_allclose(loaded(newest.folder, dtype), said[2], atol=atol)
    first = export(run, tmp_path / "of" / "first", model=model, dtype=dtype, step=1)
    assert (first.step, first.folder) == (1, tmp_path / "of" / "first")
    np.testing.assert_allclose(loaded(first.folder, dtype), said[1], atol=atol)
    assert sorted(path for path in run.rglob("*")) == before

    with safe_open(newest.folder / "model.safetensors", framework="pt") as tensors:
        assert ("lm_head.weight" in tensors.keys()) is not tied  # noqa: SIM118 - no mapping
    assert AutoTokenizer.from_pretrained(newest.folder)("w3 w4").input_ids == [3, 4]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_mixture_of_experts_keeps_the_names_of_its_family(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = make_folder(tmp_path / "model")
    MixtralForCausalLM(config).save_pretrained(model)
    said = run_of(tmp_path / "run", model, "float32")
    made = export(tmp_path / "run", tmp_path / "out", model=model, dtype="float32")
    np.testing.assert_allclose(loaded(made.folder, "float32"), said[2], atol=1e-5)

    def names(folder: Path) -> set[str]:
        with safe_open(folder / "model.safetensors", framework="pt") as tensors:
            return set(tensors.keys())

    assert names(made.folder) == names(model)


def test_the_end_of_a_complete_run_is_taken(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model")
    run = tmp_path / "run"
    run_of(run, model, "float32")
    learner = Learner(recipe_for(model))
    for _ in range(3):
        train(learner)
    learner.save(run / "model")

    def exported(name: str, **options: Any) -> int:
        return export(run, tmp_path / name, model=model, dtype="float32", **options).step

    # Without a report the model may be of an end that is past.
    assert exported("running") == 2
    (run / "trainer.json").write_text(json.dumps({"steps": 3}))
    assert exported("complete") == 3
    assert exported("complete-3", step=3) == 3
    assert exported("complete-1", step=1) == 1
    np.testing.assert_allclose(
        loaded(tmp_path / "complete", "float32"), learner.canary_logprobs(ROWS), atol=1e-5
    )


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model")
    run = tmp_path / "run"
    with pytest.raises(UserError, match=r"there is no checkpoint that can be read \(steps: none\)"):
        export(run, tmp_path / "out", model=model, dtype="float32")
    run_of(run, model, "float32")
    with pytest.raises(UserError, match=r"no checkpoint of step 7 .*\(steps: 1, 2\)"):
        export(run, tmp_path / "out", model=model, dtype="float32", step=7)
    with pytest.raises(UserError, match="not empty"):
        export(run, model, model=model, dtype="float32")
    other = make_folder(tmp_path / "other", intermediate_size=32)
    with pytest.raises(UserError, match=r"not the model that the run trains: .* has shape \[32,"):
        export(run, tmp_path / "out", model=other, dtype="float32")
    other = make_folder(tmp_path / "longer", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"not the model .*layers.2.* on one side only"):
        export(run, tmp_path / "out", model=other, dtype="float32")
    assert not (tmp_path / "out").exists()


def test_a_broken_checkpoint_is_passed_over_and_left_where_it_is(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model")
    run = tmp_path / "run"
    run_of(run, model, "float32")
    [file] = (run / "checkpoints" / "1-2").glob("rank-*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert export(run, tmp_path / "out", model=model, dtype="float32").step == 1
    assert file.exists()
