"""What benchmarks/generator.py has both sides generate: models, prompts, limits.

`answers` is the demo: its model gives two to four tokens a conversation, so that a turn of the
engine's loop is most of the work, and what surrounds the engine has the least time to hide.
`texts` is the same model with random weights, which ends a conversation by chance: some 130 tokens.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from headrace.v1 import rollout_pb2
from measured import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from services.common import config
from services.common.config import Recipe
from services.generator.template import ChatTemplate
from services.launcher import tiny_model
from services.trainer import dataset
from services.trainer.evaluation import request_of

RECIPE = ROOT / "recipes" / "arithmetic.toml"

ENGINE_CACHE_BYTES = 256 << 20
"""KV cache on both sides: room for all conversations that run at a time."""

SEATS = 256
"""Conversations that either engine samples at a time; the demo's."""

INFLIGHT = 512
"""Conversations that the service has in hand, so that some always wait in its engine: offline has
all of a round there."""

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Of a model's folder, beside configuration and weights."""


@dataclass(frozen=True)
class Workload:
    """One kind of conversations."""

    name: str
    title: str
    random_weights: bool
    max_completion_tokens: int
    num_groups: int
    """Of a round, at scale 1: some ten seconds on two cores."""


WORKLOADS = (
    Workload("texts", "about 130 tokens each", True, 192, 160),
    Workload("answers", "the demo, 2 or 3 tokens each", False, 8, 1800),
)


def model_of(workload: Workload, folder: Path) -> Path:
    """The workload's model folder; one with random weights is made in `folder`."""
    demo = tiny_model.resolve("tiny:arithmetic")
    if not workload.random_weights:
        return demo
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo))
    model.save_pretrained(folder)
    for name in COPIED:
        if (demo / name).exists():
            shutil.copyfile(demo / name, folder / name)
    return folder


def recipe_of(workload: Workload, *, model: Path, overrides: Sequence[str]) -> Recipe:
    """The demo's recipe with the workload's model and limits."""
    settings = {
        "model.path": str(model),
        "generation.max_completion_tokens": workload.max_completion_tokens,
        "generator.max_inflight": INFLIGHT,
        "generator.max_num_seqs": SEATS,
        "generator.max_model_len": 512,
        "generator.kv_cache_bytes": ENGINE_CACHE_BYTES,
        # Nobody takes groups within a round, and all are to find room.
        "queue.groups_capacity": 1_000_000,
        "evaluation.enabled": False,
        "evaluation.every_expression": False,
        "traces.per_version": 0,
    }
    lines = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return config.load(RECIPE, overrides=[*lines, *overrides])


def requests_of(recipe: Recipe, *, number: int) -> list[rollout_pb2.RolloutRequest]:
    """The requests of a round, as the trainer makes them, all with the same names."""
    rows = dataset.load(recipe).training
    return [
        request_of(rows[index], group_id=f"0.{index}.1.0", recipe=recipe, evaluation=False)
        for index in range(number)
    ]


def prompts_of(
    requests: Sequence[rollout_pb2.RolloutRequest], template: ChatTemplate
) -> list[list[int]]:
    """The same for an engine alone: one prompt for each conversation, in the order of requests."""
    prompts = []
    for request in requests:
        messages = [{"role": each.role, "content": each.content} for each in request.messages]
        prompts += [template.render(messages)] * request.sampling.num_generations
    return prompts
