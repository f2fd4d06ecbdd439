"""CPU seconds of one optimizer step on one core: padded batches, packed rows, shared prefixes.

    OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=1073741824 \
        python -m benchmarks.trainer [--sets demo,prompt-heavy] [--repeats 2]

All variants run in turn in one process, the best of `repeats` counts, and all give the same
gradient (checked). Prints a table and writes benchmarks/results/trainer.json. The padded variant is
a batch per group, right-padded, with the logits of trained positions only. The two environment
variables keep glibc from giving the memory of every activation back to the system and faulting it
in again: about 15 % of a step.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.common.training_config import Loss, Optimizer
from services.trainer.logprobs import token_logprobs
from services.trainer.loss import policy_loss
from services.trainer.packing import Terms, pack
from services.trainer.planner import plan
from services.trainer.step import OptimizerStep
from services.trainer.types import TrainSample

RESULTS = Path(__file__).parent / "results" / "trainer.json"


@dataclass(frozen=True)
class Workload:
    """A step's samples, drawn from a fixed seed."""

    groups: int
    generations: int
    template_tokens: int
    """Common to all prompts."""
    prompt_tokens: tuple[int, int]
    """Template included."""
    completion_tokens: tuple[int, int]
    completion_vocabulary: int
    """Completions draw from so many tokens: small numbers make equal ones likely."""
    token_budget: int


SETS = {
    "demo": Workload(32, 16, 40, (70, 80), (2, 4), 12, 8192),
    "prompt-heavy": Workload(2, 8, 0, (1500, 2000), (20, 300), 90, 8192),
    "long-completions": Workload(2, 8, 0, (50, 200), (100, 500), 90, 8192),
}


def make_model() -> Any:
    """The demo's model: 4 layers x 128, character vocabulary."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=100,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
    )


def make_samples(workload: Workload, *, seed: int = 0) -> list[TrainSample]:
    """Groups of random tokens."""
    draw = np.random.default_rng(seed)
    template = draw.integers(3, 100, workload.template_tokens)
    samples = []
    for group in range(workload.groups):
        length = int(draw.integers(workload.prompt_tokens[0], workload.prompt_tokens[1] + 1))
        prompt = np.concatenate([template, draw.integers(3, 100, length - template.size)])
        for generation in range(workload.generations):
            low, high = workload.completion_tokens
            size = int(draw.integers(low, high + 1))
            tail = draw.integers(3, 3 + workload.completion_vocabulary, size)
            tail[-1] = 2
            trained = np.arange(length + size) >= length
            samples.append(
                TrainSample(
                    rollout_id=f"{group}/{generation}",
                    token_ids=np.concatenate([prompt, tail]),
                    trained_mask=trained,
                    logprobs=np.where(trained, -math.log(100), 0).astype(np.float32),
                    advantage=float(draw.normal()),
                    lags=np.zeros(length + size, np.int16),
                )
            )
    return samples


def padded_step(model: Any, samples: Sequence[TrainSample]) -> int:
    """Forward and backward of a right-padded batch per group; returns positions forwarded."""
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    forwarded = 0
    for members in groups.values():
        length = max(sample.token_ids.size for sample in members)
        token_ids = torch.zeros(len(members), length, dtype=torch.long)
        present = torch.zeros(len(members), length, dtype=torch.long)
        for number, sample in enumerate(members):
            token_ids[number, : sample.token_ids.size] = torch.from_numpy(sample.token_ids)
            present[number, : sample.token_ids.size] = 1
        hidden = model.base_model(
            input_ids=token_ids, attention_mask=present, use_cache=False
        ).last_hidden_state.flatten(0, 1)
        places = [i * length + s.trained_positions for i, s in enumerate(members)]
        at = torch.from_numpy(np.concatenate(places))
        chosen = [s.logprobs[s.trained_mask] for s in members]
        counts = [part.size for part in chosen]
        terms = Terms(
            slots=torch.arange(at.numel()),
            targets=token_ids.flatten()[at],
            old_logprobs=torch.from_numpy(np.concatenate(chosen)),
            advantages=torch.tensor([s.advantage for s in members]).repeat_interleave(
                torch.tensor(counts)
            ),
            samples=torch.arange(len(members)).repeat_interleave(torch.tensor(counts)),
            lags=torch.zeros(at.numel(), dtype=torch.long),
        )
        logprobs, entropy = token_logprobs(
            hidden[at - 1],
            model.get_output_embeddings(),
            slots=terms.slots,
            targets=terms.targets,
            temperature=1.0,
        )
        total, _ = policy_loss(logprobs, entropy, terms, num_samples=len(members), settings=Loss())
        total.backward()  # type: ignore[no-untyped-call]
        forwarded += token_ids.numel()
    return forwarded


def measure(workload: Workload, *, repeats: int) -> dict[str, dict[str, float]]:
    """Time the three variants in turn; the best of `repeats` each."""
    samples = make_samples(workload)
    padded_model, model = make_model(), make_model()
    step = OptimizerStep(model, optimizer=Optimizer(), loss=Loss(), temperature=1.0)
    tokens: dict[str, int] = {}

    def padded() -> None:
        padded_model.zero_grad()
        tokens["padded"] = padded_step(padded_model, samples)

    def packed() -> None:
        model.zero_grad()
        rows: list[list[TrainSample]] = [[]]
        for sample in samples:
            used = sum(other.num_context for other in rows[-1])
            if used + sample.num_context > workload.token_budget:
                rows.append([])
            rows[-1].append(sample)
        packs = [pack(row, share_prefixes=False) for row in rows]
        tokens["packed"] = sum(row.num_forwarded for row in packs)
        for row in packs:
            step.accumulate(row)

    def shared() -> None:
        model.zero_grad()
        found = plan(
            samples,
            token_budget=workload.token_budget,
            trained_token_budget=workload.token_budget,
        )
        packs = [pack([samples[index] for index in row.samples]) for row in found.rows]
        tokens["shared"] = sum(row.num_forwarded for row in packs)
        for row in packs:
            step.accumulate(row)

    variants: dict[str, tuple[Callable[[], None], Any]] = {
        "padded": (padded, padded_model),
        "packed": (packed, model),
        "shared": (shared, model),
    }
    best = dict.fromkeys(variants, math.inf)
    gradients = {}
    for _ in range(repeats):
        for name, (run, owner) in variants.items():
            begin_s = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - begin_s)
            gradients[name] = torch.cat([p.grad.flatten() for p in owner.parameters()])
    wanted = gradients["padded"]
    for name, found in gradients.items():
        error = float((found - wanted).norm() / wanted.norm())
        assert error < 1e-4, f"{name} gives another gradient than padded batches: {error:.1e}"
    begin_s = time.process_time()
    step.finish()
    optimizer_s = time.process_time() - begin_s
    return {
        name: {
            "step_s": seconds + optimizer_s,
            "ratio": (best["padded"] + optimizer_s) / (seconds + optimizer_s),
            "forwarded_tokens": tokens[name],
            "samples_per_s": len(samples) / (seconds + optimizer_s),
        }
        for name, seconds in best.items()
    }


def main() -> None:
    """Measure the chosen sets and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default=",".join(SETS), help=f"of {', '.join(SETS)}")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print(f"{'set':18}{'variant':10}{'step':>10}{'ratio':>8}{'forwarded':>11}{'samples/s':>11}")
    for name in arguments.sets.split(","):
        results[name] = measure(SETS[name], repeats=arguments.repeats)
        for variant, row in results[name].items():
            print(
                f"{name:18}{variant:10}{row['step_s'] * 1e3:7.0f} ms{row['ratio']:8.2f}"
                f"{row['forwarded_tokens']:11.0f}{row['samples_per_s']:11.0f}",
                flush=True,
            )
    heaviest = results.get("prompt-heavy", {})
    RESULTS.parent.mkdir(exist_ok=True)
    content = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ratio_packed": heaviest.get("packed", {}).get("ratio"),
        "ratio_shared": heaviest.get("shared", {}).get("ratio"),
        "sets": results,
    }
    RESULTS.write_text(json.dumps(content, indent=2) + "\n")
    print(
        f"written: {RESULTS.relative_to(Path.cwd())}"
        if RESULTS.is_relative_to(Path.cwd())
        else RESULTS
    )


if __name__ == "__main__":
    main()
