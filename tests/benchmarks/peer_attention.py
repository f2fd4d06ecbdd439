"""Prints how far logits of samples that TRL packs into one row, by the attention of
benchmarks/peer_trainer.py, lie from those of each sample alone. For test_peer.py: in a process of
its own, since TRL is not in this one's path, and warns when it is imported.
"""

import numpy as np
import peer_trainer  # type: ignore[import-not-found]
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config
from trl.experimental.async_grpo.packing import (  # type: ignore[import-not-found]
    TREE_ATTENTION,
    TreeRow,
    register_tree_attention,
)

PROMPT = 20


def main() -> None:
    """Pack groups of several prompts, and forward them both ways."""
    register_tree_attention()
    AttentionInterface.register(TREE_ATTENTION, peer_trainer.Attention())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    packed = AutoModelForCausalLM.from_config(
        Qwen3Config(vocab_size=50, **sizes, **heads), attn_implementation=TREE_ATTENTION
    )
    alone = AutoModelForCausalLM.from_config(
        Qwen3Config(vocab_size=50, **sizes, **heads), attn_implementation="eager"
    )
    alone.load_state_dict(packed.state_dict())
    draw, row = np.random.default_rng(0), TreeRow()
    samples = []
    for group in range(3):
        prompt = draw.integers(0, 50, PROMPT)
        for _ in range(5):
            answer = draw.integers(0, 50, draw.integers(1, 5))
            mask = np.concatenate([np.zeros(PROMPT, int), np.ones(len(answer), int)])
            ids = np.concatenate([prompt, answer])
            sample = {"input_ids": ids, "completion_mask": mask, "old_log_probs": mask * 0.0}
            samples.append(ids)
            row.add({**sample, "advantage": 1.0, "group_id": group})
    batch = row.pack()
    assert len(batch["input_ids"]) < sum(map(len, samples)), "prompts are shared"
    tree = {name: batch[name] for name in batch if name.startswith("tree_") and "max" not in name}
    longest = batch["tree_max_seqlens"].tolist()
    with torch.no_grad():
        together = packed(
            input_ids=batch["input_ids"][None],
            position_ids=batch["position_ids"][None],
            use_cache=False,
            tree_max_seqlen_q=longest[0],
            tree_max_seqlen_k=longest[1],
            **tree,
        ).logits[0]
        gap = 0.0
        for number, ids in enumerate(samples):
            expected = alone(input_ids=torch.tensor(ids)[None]).logits[0, PROMPT - 1 : -1]
            found = together[batch["token_index"][batch["segment_id"] == number]]
            gap = max(gap, float((found - expected).abs().max()))
    print(gap)


if __name__ == "__main__":
    main()
