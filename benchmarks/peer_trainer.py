"""The training side of benchmarks/peer.py: TRL's AsyncGRPOTrainer as it is, on CPUs.

Two of its parts need a GPU, and are replaced where it lets them be: its attention (FlashAttention
over the paths of a trie of samples) by SDPA with the mask that says the same, and its weight
transfer by NCCL by a file.

Started as `peer_trainer.py SETTINGS RESULT`: JSON files. The result has `step_end_s`, when each
step was over, in seconds since 1970, and TRL's last `log`.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AttentionInterface, AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from trl.experimental.async_grpo.vllm_client import VLLMClient

from services.common import config
from services.scorer import builtin_rewards
from services.trainer import dataset


class Attention:
    """SDPA in which each token sees the path of its segment up to itself."""

    def __init__(self) -> None:
        self._of: torch.Tensor | None = None
        self._mask = torch.empty(0)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        tree_kv_index: torch.Tensor,
        tree_cu_seqlens_q: torch.Tensor,
        tree_cu_seqlens_k: torch.Tensor,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, H, N, D], key and value [1, K, N, D]: the output [1, N, H, D]."""
        if self._of is not tree_kv_index:  # one mask for all layers of a row
            self._of = tree_kv_index
            self._mask = _mask(
                tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, size=query.shape[2]
            )
        output = functional.scaled_dot_product_attention(
            *(query, key, value),
            attn_mask=self._mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2), None


def _mask(
    kv_index: torch.Tensor, offsets_q: torch.Tensor, offsets_k: torch.Tensor, *, size: int
) -> torch.Tensor:
    """Who sees whom [N, N]: a segment's tokens end its path."""
    mask = torch.eye(size, dtype=torch.bool)
    ends_q, ends_k = offsets_q.tolist(), offsets_k.tolist()
    for begin_q, end_q, begin_k, end_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        num_q, num_k = end_q - begin_q, end_k - begin_k
        seen = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        mask[begin_q:end_q, kv_index[begin_k:end_k]] = seen
    return mask


class FileTransfer:
    """TRL's WeightTransferProtocol by a file in memory-backed storage."""

    def __init__(self, url: str, path: Path) -> None:
        self._server, self._path = VLLMClient(url), path

    def init_weight_transfer(self) -> None:
        """Nothing has to be agreed on."""
        self._server.wait_for_server_ready(poll_interval_s=0.1)

    def pause(self) -> None:
        """As TRL's own."""
        self._server.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write all tensors, and let the server read them."""
        save_file({name: tensor.contiguous() for name, tensor in iterator}, self._path)
        self._server.start_weight_update()
        self._server.update_weights({"path": str(self._path)})
        self._server.finish_weight_update()

    def resume(self) -> None:
        """As TRL's own."""
        self._server.resume()

    def destroy(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class Clock(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """When steps are over: as Headrace's, when their weights are published."""

    def __init__(self) -> None:
        self.step_end_s: list[float] = []
        self.logs: dict[str, float] = {}

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer, after its own callbacks."""
        self.step_end_s.append(time.time())

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Keep the last that has TRL's metrics."""
        if "reward" in logs:
            self.logs = dict(logs)


def reasoning_gym(
    *, completions: list[Any], question: list[str], answer: list[str], metadata: list[str], **_: Any
) -> list[float]:
    """The demo's reward, on TRL's conversations."""
    texts = [completion[-1]["content"] for completion in completions]
    return builtin_rewards.reasoning_gym(
        texts=texts, question=question, answer=answer, metadata=metadata
    )


def tokenizer_of(folder: str) -> Any:
    """The demo's, told how its model's answers read: TRL knows only those of published models."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<assistant>",
        "fields": {
            "content": {"close_pattern": re.escape(tokenizer.eos_token), "content": "text"},
        },
    }
    return tokenizer


def rows_of(recipe: config.Recipe) -> Dataset:
    """The demo's prompts in the demo's order."""
    data = dataset.load(recipe)
    rows = [data.training[number] for number in data.order(0)]
    return Dataset.from_list(
        [
            {
                "prompt": row.messages,
                "question": row.columns["question"],
                "answer": row.columns["answer"],
                "metadata": json.dumps(row.columns["metadata"]),
            }
            for row in rows
        ]
    )


def main() -> None:
    """Train."""
    settings, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    recipe = config.load(Path(settings["recipe"]))
    generation, trainer, optimizer = recipe.generation, recipe.trainer, recipe.optimizer
    samples = trainer.groups_per_step * generation.num_generations
    arguments = AsyncGRPOConfig(
        output_dir=settings["folder"],
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        gradient_checkpointing=False,
        seed=trainer.seed,
        max_steps=trainer.max_steps,
        # A step is one row of all its samples, as the demo's: a thousand tokens, since they share.
        token_budget=0,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        num_generations=generation.num_generations,
        max_completion_length=generation.max_completion_tokens,
        temperature=generation.temperature,
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optimizer.warmup_steps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        max_staleness=trainer.max_staleness,
        max_inflight_tasks=settings["inflight"],
        vllm_server_base_url=settings["url"],
    )
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks CUDA
    clock = Clock()
    training = AsyncGRPOTrainer(
        model=settings["model"],
        reward_funcs=[reasoning_gym],
        args=arguments,
        train_dataset=rows_of(recipe),
        processing_class=tokenizer_of(settings["model"]),
        weight_transfer=FileTransfer(settings["url"], Path(settings["weights"])),
    )
    training.add_callback(clock)  # the last, so that a step's end is after its weight sync
    AttentionInterface.register(TREE_ATTENTION, Attention())
    training.train()
    result.write_text(json.dumps({"step_end_s": clock.step_end_s, "log": clock.logs}))


if __name__ == "__main__":
    main()
