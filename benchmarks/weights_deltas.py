"""The difference that an optimizer step makes, of the trainer's own learner with the recipe's AdamW
and policy loss, on samples of tokens by Zipf's law with the log-probabilities that the policy has
for them and random advantages. Its float32 weights are rounded to bfloat16, as a publish in
bfloat16 rounds the masters; forwards are in float32, since bfloat16 takes a CPU 20 times as long.

How many weights a step changes depends on two things.

    how long AdamW has run   at the first step every weight moves by the learning rate, whatever its
                             gradient: that is the most that a step can change. Then the moments
                             average over steps whose gradients differ, and a weight moves by a
                             fraction of it
    how large weights are    half as large, their last bit is worth half, and twice as many change

So the first step and steps after WARM_UP are measured, with weights of two scales.
"""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.common import weight_delta
from services.common.config import Data, Model, Recipe
from services.common.training_config import Optimizer, Trainer
from services.common.weight_files import CHUNK_BYTES, Pieces, describe

WARM_UP = 30
"""Optimizer steps before those that count as settled."""

SCALES = (0.02, 0.01)
"""Standard deviations of the random weights: transformers' default, and half of it."""

VOCABULARY, SAMPLES, TOKENS, PROMPT = 8_000, 8, 64, 16


@dataclass(frozen=True)
class Difference:
    """Of two versions, one optimizer step apart."""

    changed: float
    """Share of the weights, in bfloat16."""
    ratio: float
    """Size of the difference over that of the file."""
    make_s: float
    apply_s: float
    mb: float
    """Of the file."""


def make_model(folder: Path, *, scale: float) -> Path:
    """A random Qwen3 of 5 million weights, its output head tied, as small models have it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from services.launcher import tiny_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=scale,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.build_tokenizer().save_pretrained(folder)
    return folder


def differences(
    folder: Path, *, learning_rate: float, scale: float, rounds: int
) -> dict[str, list[Difference]]:
    """By "first" and "settled": of the first step, and of `rounds` steps after WARM_UP."""
    import torch
    from safetensors.torch import load_file, save_file

    from services.trainer.learner import Learner

    torch.set_num_threads(1)  # so small a model gains nothing from more
    model = folder / f"model-{scale:g}"
    recipe = Recipe(
        model=Model(path=str(model if model.exists() else make_model(model, scale=scale))),
        data=Data(file="prompts.jsonl", epochs=1.0),
        optimizer=Optimizer(learning_rate=learning_rate),
        trainer=Trainer(device="cpu"),
    )
    learner: Any = Learner(recipe)
    draw = np.random.default_rng(0)
    found: dict[str, list[Difference]] = {"first": [], "settled": []}
    before: Path | None = None
    for number in range(WARM_UP + rounds + 1):
        path = folder / f"{number}.safetensors"
        learner.write_weights(path)
        rounded = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
        save_file(rounded, path, metadata={"format": "pt"})
        if before is not None and (number == 1 or number > WARM_UP):
            found["first" if number == 1 else "settled"].append(_difference(before, path))
        if before is not None:
            before.unlink()
        before = path
        _step(learner, draw)
    assert before is not None
    before.unlink()
    return found


def _step(learner: Any, draw: np.random.Generator) -> None:
    from services.trainer.types import Row, TrainSample

    by_rank = 1 / np.arange(1, VOCABULARY + 1)
    tokens = draw.choice(VOCABULARY, (SAMPLES, TOKENS), p=by_rank / by_rank.sum())
    logprobs = learner.canary_logprobs(tokens)
    trained = np.arange(TOKENS) >= PROMPT
    advantages = draw.standard_normal(SAMPLES)
    samples = [
        TrainSample(
            rollout_id=f"bench/{number}",
            token_ids=tokens[number],
            trained_mask=trained,
            logprobs=np.where(trained, np.append(0.0, logprobs[number]), 0.0).astype(np.float32),
            advantage=float(advantage),
            lags=np.zeros(TOKENS, np.int16),
        )
        for number, advantage in enumerate(advantages - advantages.mean())
    ]
    learner.accumulate([Row(samples)])
    assert learner.finish().applied


def _difference(base: Path, new: Path) -> Difference:
    chunks = describe(new, chunk_bytes=CHUNK_BYTES)
    target = new.with_suffix(".delta")
    begin_s = time.monotonic()
    frames = weight_delta.write(
        target, of=new, base=base, chunks=chunks, stop=threading.Event(), threads=1
    )
    make_s = time.monotonic() - begin_s
    assert frames is not None
    one, other = (np.fromfile(path, "<u2") for path in (base, new))
    changed = float((one != other).mean())
    begin_s = time.monotonic()
    made = new.with_suffix(".made")
    _apply(base, target, made, chunks, frames)
    apply_s = time.monotonic() - begin_s
    assert describe(made, chunk_bytes=CHUNK_BYTES).sha256 == chunks.sha256
    made.unlink()
    target.unlink()
    size = chunks.size_bytes
    return Difference(changed, frames.size_bytes / size, make_s, apply_s, size / 1e6)


def _apply(base: Path, delta: Path, made: Path, chunks: Pieces, frames: Pieces) -> None:
    with base.open("rb") as old, delta.open("rb") as file, made.open("wb") as out:
        for piece in range(chunks.num):
            begin, end = chunks.bounds(piece)
            first, last = frames.bounds(piece)
            frame = os.pread(file.fileno(), last - first, first)
            out.write(weight_delta.decode(frame, os.pread(old.fileno(), end - begin, begin)))
