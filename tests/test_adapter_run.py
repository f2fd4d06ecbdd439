"""A whole run that trains an adapter: published, served, proven and kept as such."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.common import adapter_files, canary
from services.launcher import tiny_model
from tests.launching import launched

RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic.toml"
STEPS = 12
GROUPS = 8

SETTINGS = {
    "trainer.max_steps": STEPS,
    "trainer.groups_per_step": GROUPS,
    "trainer.lora.rank": 8,
    "trainer.lora.alpha": 16,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 0,
    "generation.num_generations": 4,
    "generator.replicas": 1,
    "generator.max_inflight": 32,
    "recorder.flush_s": 0.5,
    "aggregator.http_port": 0,
}

LIMIT_S = 240
"""Patience with the whole run, vLLM's start included."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S * 2)]


def log_of(run: Path, name: str) -> list[dict[str, Any]]:
    """The JSON lines of a log."""
    lines = (run / "logs" / f"{name}.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def logprobs(model: Any, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    with torch.no_grad():
        ids = torch.from_numpy(rows)
        logits = model.eval()(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        found: np.ndarray[Any, Any] = logits[:, :-1].gather(2, ids[:, 1:, None])[..., 0].numpy()
        return found


def test_a_run_trains_and_serves_an_adapter(tmp_path: Path) -> None:
    with launched(RECIPE, folder=tmp_path, run="lora", settings=SETTINGS) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
    run = tmp_path / "lora"
    summary = json.loads((run / "summary.json").read_text())
    groups = summary["groups"]
    assert summary["steps"] == STEPS
    assert groups["trained"] == STEPS * GROUPS
    assert groups["in_flight"] == groups["trained_twice"] == 0
    settled = groups["trained"] + sum(groups["dropped"].values()) + groups["given_up"]
    assert groups["dispatched"] == settled
    # Each token's log-probability is that of the version in its label, whatever came meanwhile.
    assert summary["max_logprob_gap"] <= 1e-3
    assert summary["gap_tokens"] > 0
    assert summary["eval_before"] is not None
    assert summary["eval_after"] is not None

    [said] = [line for line in log_of(run, "trainer-0") if line["event"] == "training an adapter"]
    assert said["published"] == "adapter"
    lines = log_of(run, "generator-0")
    assert [line["event"] for line in lines].count("load path proven") == 1
    assert "fetching the frozen weights" in [line.get("phase") for line in lines]

    base = tiny_model.resolve("tiny:arithmetic")
    tensors = load_file(run / "adapter" / adapter_files.WEIGHTS)
    assert any(tensor.abs().max() > 1e-3 for name, tensor in tensors.items() if "lora_B" in name)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = canary.rows(plain.config.vocab_size)[:8]
    before = logprobs(plain, rows)
    adapted = logprobs(PeftModel.from_pretrained(plain, run / "adapter"), rows)
    merged = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    assert np.abs(logprobs(merged, rows) - adapted).max() < 1e-4
    assert np.abs(adapted - before).max() > 0.01
    [checkpoint] = sorted((run / "checkpoints").glob("1-*"))[-1:]
    largest = max(path.stat().st_size for path in checkpoint.iterdir())
    assert largest < (run / "model" / "model.safetensors").stat().st_size
