"""Small random models of many architectures of transformers, and how each is forwarded."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from services.trainer.logprobs import PLAIN_HEAD, HeadScores
from tests.services.trainer.numerics import VOCABULARY

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Keys of most configurations; logits differ enough to show a leak between samples."""

GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "initializer_range": 0.3,
}

WINDOW = 5
"""Of those with sliding windows: shorter than the samples of the tests."""


@dataclass(frozen=True)
class Architecture:
    """A configuration class of transformers (without "Config") and what to expect of its model."""

    name: str
    settings: dict[str, Any]
    shares: bool = True
    reason: str = ""
    """Part of the reason why prefixes are not shared."""
    scores: HeadScores = PLAIN_HEAD
    routers: bool = False

    def __str__(self) -> str:
        return self.name

    def make(self) -> Any:
        """A model of random weights, float32."""
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**self.settings)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _common(**changes: Any) -> dict[str, Any]:
    return COMMON | changes


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

ARCHITECTURES = [
    Architecture("Llama", _common(tie_word_embeddings=True)),
    Architecture(
        "Qwen2", _common(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    Architecture("Qwen3", _common()),
    Architecture("Mistral", _common(sliding_window=WINDOW)),
    Architecture("Phi3", _common(sliding_window=WINDOW, resid_pdrop=0.0, embd_pdrop=0.0)),
    Architecture("Phi", _common(resid_pdrop=0.0, embd_pdrop=0.0)),
    Architecture("GPT2", GPT),
    Architecture("GPTNeoX", _common()),
    Architecture(
        "OPT",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "word_embed_proj_dim": 16,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "init_std": 0.3,
            "max_position_embeddings": 128,
        },
    ),
    Architecture(
        "Gemma2",
        _common(sliding_window=WINDOW, query_pre_attn_scalar=8, final_logit_softcapping=3.0),
        scores=HeadScores(softcap=3.0),
    ),
    Architecture(
        "Gemma3Text",
        _common(sliding_window=WINDOW, sliding_window_pattern=2, query_pre_attn_scalar=8),
    ),
    Architecture("Granite", _common(logits_scaling=4.0), scores=HeadScores(scale=0.25)),
    Architecture(
        "Cohere2",
        _common(logit_scale=0.5, sliding_window=WINDOW),
        scores=HeadScores(scale=0.5),
    ),
    Architecture("Mixtral", _common(num_local_experts=4), routers=True),
    # Its configuration has a window (of 0 here, as it writes it) and no layer that slides.
    Architecture("Qwen2Moe", _common(**_EXPERTS), routers=True),
    Architecture(
        "Laguna",
        _common(layer_types=["full_attention"] * 2, sliding_window=WINDOW, **_EXPERTS),
        routers=True,
    ),
    Architecture("Qwen3Moe", _common(decoder_sparse_step=1, **_EXPERTS), routers=True),
    Architecture(
        "GptOss",
        _common(
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        routers=True,
    ),
    Architecture(
        "DeepseekV3",
        _common(
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=16,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=1,
            num_key_value_heads=4,
        ),
    ),
    Architecture(
        "Bloom",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        shares=False,
        reason="its attention cannot be replaced",
    ),
    Architecture(
        "Llama4Text",
        _common(attention_chunk_size=4, num_local_experts=2, intermediate_size_mlp=48),
        shares=False,
        reason="chunked_attention",
    ),
    Architecture(
        "Mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
        shares=False,
        reason="linear_attention",
    ),
    Architecture(
        "Qwen3Next",
        _common(
            num_hidden_layers=4,
            shared_expert_intermediate_size=16,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            **_EXPERTS,
        ),
        shares=False,
        reason="linear_attention",
        routers=True,
    ),
    Architecture(
        "Lfm2",
        _common(
            block_multiple_of=8,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention"],
        ),
        shares=False,
        reason="conv",
    ),
]
