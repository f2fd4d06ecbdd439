"""Small models and samples for the tests of the trainer's numerics."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.common.training_config import Loss
from services.trainer.forward import PolicyForward, RowOutput, Way
from services.trainer.packing import PackedRow
from services.trainer.types import TrainSample

# Models this small gain nothing from threads, and threads that wait for a busy core cost seconds.
torch.set_num_threads(1)

VOCABULARY = 50

PLAIN = Loss(clip_low=0.2, clip_high=0.2, dual_clip=float("inf"))
"""Plain PPO clipping, as the worked cases have it."""


def make_model(*, seed: int = 0, **changes: Any) -> Any:
    """A Qwen3 of two layers, float32, whose logits differ enough to show a leak between samples."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes)))


def make_sample(
    token_ids: Sequence[int],
    *,
    num_prompt: int,
    advantage: float = 1.0,
    rollout_id: str = "g/0",
    old_logprob: float = -3.0,
    lag: int = 0,
) -> TrainSample:
    """A sample whose tokens from `num_prompt` on are trained."""
    trained = np.arange(len(token_ids)) >= num_prompt
    return TrainSample(
        rollout_id=rollout_id,
        token_ids=np.array(token_ids, np.int64),
        trained_mask=trained,
        logprobs=np.where(trained, old_logprob, 0.0).astype(np.float32),
        advantage=advantage,
        lags=np.where(trained, lag, 0).astype(np.int16),
    )


def make_groups(
    *, seed: int, num_groups: int, generations: int, prompt: int, completion: int
) -> list[TrainSample]:
    """Groups with prompts and completions of random tokens and random lengths up to these."""
    draw = np.random.default_rng(seed)
    samples = []
    for group in range(num_groups):
        start = draw.integers(0, VOCABULARY, draw.integers(1, prompt + 1)).tolist()
        for generation in range(generations):
            tail = draw.integers(0, 4, draw.integers(1, completion + 1)).tolist()
            samples.append(
                make_sample(
                    start + tail,
                    num_prompt=len(start),
                    advantage=float(draw.normal()),
                    rollout_id=f"{group}/{generation}",
                    lag=int(draw.integers(0, 6)),
                )
            )
    return samples


def row_logprobs(
    model: Any, row: PackedRow, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a prepared model says of a packed row: log-probability and entropy of every term."""
    output: RowOutput = PolicyForward(model, temperature=temperature)(row)
    return output.logprobs, output.entropy


def sequence_logprobs(
    model: Any, rows: "np.ndarray[Any, Any]", *, temperature: float = 1.0
) -> "np.ndarray[Any, Any]":
    """Log-probabilities [R, L - 1] of tokens 1.. of every row [R, L], of any causal model."""
    forward = PolicyForward(model, temperature=temperature, way=Way())
    return forward.sequence_logprobs(rows, temperature=temperature)
