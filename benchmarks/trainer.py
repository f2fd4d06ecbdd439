"""CPU seconds of one optimizer step on one core: padded batches, packed rows, shared prefixes; and
the planner's rows of a whole step.

    OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=1073741824 \
        python benchmarks/trainer.py [--sets mixed,prompt-heavy] [--repeats 2]

All variants run in turn in one process, the best of `repeats` counts, and all give the same
gradient (checked). Prints tables and writes benchmarks/results/trainer.json. The padded variant is
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
from planner_set import LOADS, SEEDS, SETTINGS, make_samples
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.common.training_config import Loss, Optimizer
from services.trainer.load import Load
from services.trainer.logprobs import token_logprobs
from services.trainer.loss import policy_loss
from services.trainer.packing import Terms, pack
from services.trainer.planner import plan
from services.trainer.step import OptimizerStep
from services.trainer.types import TrainSample

VOCABULARY = 100

RESULTS = Path(__file__).parent / "results" / "trainer.json"


TRL_MICRO_BATCHES = {"1x4096": 47, "4x4096": 14, "8x4096": 8, "4x16384": 3}
"""What the planner of TRL 1.16.0 makes of the same samples, at best of the three seeds."""


@dataclass(frozen=True)
class Workload:
    """A step's samples, from a fixed seed."""

    make: Callable[[], list[TrainSample]]
    token_budget: int


def make_model() -> Any:
    """The demo's model: 4 layers x 128, character vocabulary."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
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


def uniform_samples(
    *,
    groups: int,
    generations: int,
    prompt_tokens: tuple[int, int],
    completion_tokens: tuple[int, int],
    template_tokens: int = 0,
    completion_vocabulary: int = 90,
) -> list[TrainSample]:
    """Groups of random tokens of uniform lengths. The first `template_tokens` of all prompts are
    the same; completions draw from so many tokens: small numbers make equal ones likely."""
    draw = np.random.default_rng(0)
    template = draw.integers(3, VOCABULARY, template_tokens)
    samples = []
    for group in range(groups):
        length = int(draw.integers(prompt_tokens[0], prompt_tokens[1] + 1))
        prompt = np.concatenate([template, draw.integers(3, VOCABULARY, length - template.size)])
        for generation in range(generations):
            low, high = completion_tokens
            size = int(draw.integers(low, high + 1))
            tail = draw.integers(3, 3 + completion_vocabulary, size)
            tail[-1] = 2
            trained = np.arange(length + size) >= length
            samples.append(
                TrainSample(
                    rollout_id=f"{group}/{generation}",
                    token_ids=np.concatenate([prompt, tail]),
                    trained_mask=trained,
                    logprobs=np.where(trained, -math.log(VOCABULARY), 0).astype(np.float32),
                    advantage=float(draw.normal()),
                    lags=np.zeros(length + size, np.int16),
                )
            )
    return samples


SETS = {
    "mixed": Workload(
        lambda: make_samples(seed=7, num_groups=8, vocabulary=VOCABULARY), token_budget=8192
    ),
    "prompt-heavy": Workload(
        lambda: uniform_samples(
            groups=2, generations=8, prompt_tokens=(1500, 2000), completion_tokens=(20, 300)
        ),
        token_budget=8192,
    ),
    "demo": Workload(
        lambda: uniform_samples(
            groups=32,
            generations=16,
            prompt_tokens=(70, 80),
            completion_tokens=(2, 4),
            template_tokens=40,
            completion_vocabulary=12,
        ),
        token_budget=8192,
    ),
}


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
            weights=torch.tensor([s.token_weight for s in members]).repeat_interleave(
                torch.tensor(counts)
            ),
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
    samples = workload.make()
    raw_tokens = sum(sample.token_ids.size for sample in samples)
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
            "tokens_per_s": raw_tokens / (seconds + optimizer_s),
        }
        for name, seconds in best.items()
    }


def measure_planner(ranks: int, token_budget: int, load: Load, seed: int) -> dict[str, float]:
    """Rows of one step: how many, how full, how balanced, and how long it takes to find them."""
    samples = make_samples(seed=seed)
    seconds = []
    for _ in range(3):
        begin_s = time.process_time()
        found = plan(
            samples,
            ranks=ranks,
            token_budget=token_budget,
            trained_token_budget=token_budget,
            load=load,
        )
        seconds.append(time.process_time() - begin_s)
    heaviest = sum(max(row.load for row in microbatch) for microbatch in found.microbatches)
    return {
        "micro_batches": len(found.microbatches),
        "floor": math.ceil(found.unique_tokens / (ranks * token_budget)),
        "duplication": sum(row.tokens for row in found.rows) / found.unique_tokens,
        "efficiency": sum(row.load for row in found.rows) / (ranks * heaviest),
        "seconds": min(seconds),
    }


def worst(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of several plans: the most micro-batches for their floor, and the worst of the rest."""
    most = max(results, key=lambda result: result["micro_batches"] / result["floor"])
    return {
        "micro_batches": most["micro_batches"],
        "floor": most["floor"],
        "duplication": max(result["duplication"] for result in results),
        "efficiency": min(result["efficiency"] for result in results),
        "seconds": max(result["seconds"] for result in results),
    }


def compare_planner() -> dict[str, Any]:
    """All settings and seeds, with both readings of a row's load; prints the worst of each."""
    print(
        f"{'ranks x tokens':16}{'load':10}{'micro-batches':>15}{'floor':>7}{'TRL':>5}"
        f"{'duplication':>13}{'efficiency':>12}{'seconds':>9}"
    )
    results: dict[str, Any] = {}
    for ranks, token_budget in SETTINGS:
        setting = f"{ranks}x{token_budget}"
        by_load: dict[str, dict[str, dict[str, float]]] = {}
        for name, load in LOADS.items():
            by_seed = {
                str(seed): measure_planner(ranks, token_budget, load, seed) for seed in SEEDS
            }
            by_load[name] = by_seed
            row = worst(list(by_seed.values()))
            print(
                f"{setting:16}{name:10}{row['micro_batches']:15.0f}{row['floor']:7.0f}"
                f"{TRL_MICRO_BATCHES[setting]:5}{row['duplication']:13.3f}"
                f"{row['efficiency']:12.3f}{row['seconds']:9.2f}",
                flush=True,
            )
        every = [result for by_seed in by_load.values() for result in by_seed.values()]
        results[setting] = worst(every) | {"by_load": by_load}
    return results


def main() -> None:
    """Measure the chosen sets and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default=",".join(SETS), help=f"of {', '.join(SETS)}")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sets = {}
    print(
        f"{'set':14}{'variant':9}{'step':>10}{'ratio':>7}{'forwarded':>11}{'tokens/s':>10}"
        f"{'samples/s':>11}"
    )
    for name in arguments.sets.split(","):
        sets[name] = measure(SETS[name], repeats=arguments.repeats)
        for variant, row in sets[name].items():
            print(
                f"{name:14}{variant:9}{row['step_s'] * 1e3:7.0f} ms{row['ratio']:7.2f}"
                f"{row['forwarded_tokens']:11.0f}{row['tokens_per_s']:10.0f}"
                f"{row['samples_per_s']:11.1f}",
                flush=True,
            )
    heaviest = sets.get("prompt-heavy", {})
    content = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ratio_packed": heaviest.get("packed", {}).get("ratio"),
        "ratio_shared": heaviest.get("shared", {}).get("ratio"),
        "sets": sets,
        "planner": compare_planner(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()
