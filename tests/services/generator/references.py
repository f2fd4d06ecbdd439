"""Small random models as files, and what transformers computes with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 128


@dataclass(frozen=True)
class Reference:
    """A model that transformers holds, and the same weights in a file."""

    model: Any
    path: Path

    def logprobs(
        self, token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Log-probability of tokens 1.. given those before, float32 [len - 1]."""
        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            logits = self.model(ids, use_cache=False).logits[0, :-1] / temperature
        chosen = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        return np.asarray(chosen.numpy(), np.float32)

    def rows(self, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """The same for rows of equal length, [R, L] -> [R, L - 1]."""
        return np.stack([self.logprobs(row.tolist()) for row in rows])

    def greedy(self, prompt_ids: Sequence[int], num: int) -> list[int]:
        """The next `num` tokens, each the likeliest."""
        ids = list(prompt_ids)
        for _ in range(num):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
        return ids[len(prompt_ids) :]

    def with_weights(self, path: Path) -> "Reference":
        """The model with the weights of another file."""
        model = Qwen3ForCausalLM(self.model.config)
        model.load_state_dict(load_file(path), strict=False)
        return Reference(model.eval(), path)


def make(folder: Path, *, tied: bool, seed: int) -> Reference:
    """A Qwen3 of two layers, float32, with weights so large that some tokens are far likelier than
    others, in `folder`/SEED.safetensors; config.json is beside it."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
    )
    model = Qwen3ForCausalLM(config).eval()
    config.save_pretrained(folder)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    path = folder / f"{seed}.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return Reference(model, path)
