"""A head that an engine did not load, planted: the fault is found by real log-probabilities."""

from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import torch

from services.aggregator.ingest import Ingest
from tests.services.aggregator.asking import strict
from tests.services.aggregator.making import Producer, observed, ratio
from tests.services.aggregator.test_evidence import PATH
from tests.services.trainer.numerics import make_model, sequence_logprobs

STEP = 1e-3
"""How far an optimizer step of Adam moves a weight at that learning rate."""

ROWS = np.random.default_rng(8).integers(0, 48, (16, 12))
"""What was sampled at lag 0 in each step."""

Load = Callable[[Any, Any], None]
"""How an engine takes over the trainer's weights: (engine, trainer)."""


def load(engine: Any, trainer: Any) -> None:
    """All of them."""
    engine.load_state_dict(trainer.state_dict())


def load_without_head(engine: Any, trainer: Any) -> None:
    """The head stays as it was."""
    weights = {key: value for key, value in trainer.state_dict().items() if "lm_head" not in key}
    assert len(weights) < len(trainer.state_dict())
    engine.load_state_dict(weights, strict=False)


def train(ingest: Ingest, loads: Load, *, num_steps: int = 4) -> None:
    """Some steps, each with the gap between the trainer and an engine that has just loaded."""
    trainer, engine = make_model(seed=1), make_model(seed=1)
    sender, draw = Producer("trainer-0"), torch.Generator().manual_seed(1)
    for step in range(1, num_steps + 1):
        ours = sequence_logprobs(trainer, ROWS)
        # One row at a time: an engine does not compute in the trainer's order.
        theirs = np.concatenate([sequence_logprobs(engine, row[None]) for row in ROWS])
        gap = ratio(float(np.abs(ours - theirs).sum()), theirs.size)
        log_ratio = (ours - theirs).astype(np.float64)
        kl = ratio(float((np.expm1(log_ratio) - log_ratio).sum()), theirs.size)
        found = [("policy/logprob_gap_mean/0", gap), ("kl/0", kl), ("perf/step_s", observed([1.0]))]
        sender.send(ingest, found, step=step)
        with torch.no_grad():
            for weight in trainer.parameters():
                weight += STEP * torch.randn(weight.shape, generator=draw).sign()
        loads(engine, trainer)


async def test_an_engine_with_a_stale_head_disagrees(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    train(ingest, load_without_head)
    (fault,) = strict(await client.get(PATH))["faults"]
    assert fault["name"] == "engine-disagrees"
    (evidence,) = fault["evidence"]
    # In the first step nothing is stale yet: float32 is all that they differ by.
    assert evidence["threshold"] == 1e-5
    assert evidence["value"] > 1e-4


async def test_an_engine_with_a_stale_head_is_farther_off_with_every_version(
    client: httpx.AsyncClient, ingest: Ingest
) -> None:
    train(ingest, load_without_head, num_steps=16)
    disagrees, drifts = strict(await client.get(PATH))["faults"]
    assert (disagrees["name"], drifts["name"]) == ("engine-disagrees", "engine-drifts")
    last, tau = drifts["evidence"]
    assert last["key"] == "kl/0"
    assert last["value"] > 1e-6
    assert tau["value"] > 0.8


async def test_an_engine_that_loads_all_agrees(client: httpx.AsyncClient, ingest: Ingest) -> None:
    train(ingest, load, num_steps=16)
    assert strict(await client.get(PATH))["faults"] == []
