"""Which models can be trained on packed rows: checked once, at start, with the reason when not.

Named features that packed rows cannot carry are refused by name. What has no name is found by a
proof: a small packed row with forks and two samples must give the log-probabilities of separate
forwards of the model as it came.
"""

from typing import Any

import numpy as np
import torch

from services.common.errors import UserError
from services.trainer.attention import IMPLEMENTATION
from services.trainer.logprobs import row_logprobs
from services.trainer.packing import pack
from services.trainer.types import TrainSample

PROOF_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of a log-probability in the proof, by dtype; a leak between samples is orders
above."""


def prepare_model(model: Any) -> None:
    """Switch a causal language model to packed attention, or raise UserError that says why it
    cannot be trained.

    The weights and the train/eval mode stay as they are.
    """
    name = type(model).__name__
    _refuse_by_name(model)
    proof = _proof_samples(model.config.get_text_config().vocab_size)
    device = model.get_output_embeddings().weight.device
    expected = _separate_logprobs(model, proof, device)
    model.set_attn_implementation(IMPLEMENTATION)
    # In train mode, as steps run: what is random there would show as a difference.
    was_training = model.training
    with torch.no_grad():
        found, _ = row_logprobs(model.train(), pack(proof).to(device), temperature=1.0)
    model.train(was_training)
    difference = float((found - expected).abs().max())
    tolerance = PROOF_TOLERANCE.get(model.dtype, 0.25)
    if not difference <= tolerance:
        raise UserError(
            f"model.path: {name} gives other log-probabilities on packed rows than on separate "
            f"ones (difference {difference:.3g}, at most {tolerance:g} is allowed): its attention, "
            "positions or output head do something that packed rows do not carry; "
            "train another model"
        )


def _refuse_by_name(model: Any) -> None:
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or [])
    other = sorted(layer_types - {"full_attention"})
    if not layer_types and getattr(config, "sliding_window", None):
        other.append("sliding_attention")
    if not layer_types and getattr(config, "attention_chunk_size", None):
        other.append("chunked_attention")
    if other:
        raise UserError(
            f"model.path: {type(model).__name__} has layers of type {', '.join(other)}; packed "
            "rows with shared prefixes need full attention in every layer; train a model that has "
            "no other kind"
        )
    if model.get_output_embeddings() is None:
        raise UserError(
            f"model.path: {type(model).__name__} has no output head; give a causal language model"
        )
    dropouts = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            dropouts[name] = module.p
        for attribute, rate in vars(module).items():
            if "dropout" in attribute and isinstance(rate, float) and rate > 0:
                dropouts[attribute] = rate
    if dropouts:
        named = ", ".join(f"{name} = {rate}" for name, rate in dropouts.items())
        raise UserError(
            f"model.path: {type(model).__name__} has dropout ({named}): its log-probabilities are "
            "random and their ratios to the sampler's are noise; set it to 0 in the model's "
            "config.json"
        )


def _proof_samples(vocabulary: int) -> list[TrainSample]:
    """Two prompts; the first with a fork of three branches, one of them forking again."""
    draw = np.random.default_rng(0).integers(0, vocabulary, 24)
    rows = [draw[:8], draw[[0, 1, 2, 3, 8, 9]], draw[[0, 1, 2, 3, 8, 10, 11]], draw[12:20]]
    return [
        TrainSample(
            rollout_id="proof/0",
            token_ids=row,
            trained_mask=np.arange(row.size) > 0,
            logprobs=np.zeros(row.size, np.float32),
            advantage=0.0,
            lags=np.zeros(row.size, np.int16),
        )
        for row in rows
    ]


@torch.no_grad()
def _separate_logprobs(
    model: Any, samples: list[TrainSample], device: torch.device
) -> torch.Tensor:
    """Log-probabilities of all tokens but the first, each sample forwarded by itself through the
    whole model, in eval mode."""
    was_training = model.training
    model.eval()
    parts = []
    for sample in samples:
        token_ids = torch.from_numpy(sample.token_ids).to(device)[None]
        logits = model(input_ids=token_ids, use_cache=False).logits[0, :-1].float()
        parts.append(logits.log_softmax(-1).gather(1, token_ids[0, 1:, None])[:, 0])
    model.train(was_training)
    return torch.cat(parts)
