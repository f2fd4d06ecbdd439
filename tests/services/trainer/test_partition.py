"""The law of the loss: how samples are put into rows and micro-batches changes no gradient, for
every kind, normalisation and guard. In double precision up to the log-probabilities, so that what
is compared is the law and not what float32 rounds on either side."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.training_config import Loss, Optimizer
from services.trainer.compatibility import prepare_model
from services.trainer.packing import pack
from services.trainer.reference import Reference
from services.trainer.step import OptimizerStep, StepResult
from services.trainer.types import TrainSample
from tests.services.trainer.numerics import make_groups, make_model, make_sample

STILL = Optimizer(learning_rate=1e-30, betas=(0.0, 0.0), max_grad_norm=1e30)
"""The first moment is the gradient itself, and no weight moves."""

BY_TOKEN = ("clip", "tis", "icepop")

CASES = [
    *({"kind": kind, "normalise": by} for kind in BY_TOKEN for by in ("tokens", "constant")),
    *({"kind": kind, "normalise": "sequence"} for kind in (*BY_TOKEN, "gspo")),
    *({"normalise": by, "kl_coefficient": 0.5} for by in ("tokens", "sequence", "constant")),
]


def named(case: dict[str, Any]) -> str:
    return "-".join(map(str, case.values()))


def make_step(loss: Loss) -> OptimizerStep:
    reference = None
    if loss.kl_coefficient:
        frozen = make_model(seed=1).double()
        prepare_model(frozen)
        reference = Reference(frozen, temperature=0.8)
    return OptimizerStep(
        make_model().double(),
        optimizer=STILL,
        loss=loss,
        temperature=0.8,
        max_completion_tokens=64,
        reference=reference,
    )


@torch.no_grad()
def sampled_near(step: OptimizerStep, samples: list[TrainSample], *, spread: float) -> None:
    """Give the samples log-probabilities around the policy's own."""
    draw = np.random.default_rng(0)
    for sample in samples:
        found = step.forward(pack([sample])).logprobs.numpy()
        sample.logprobs[sample.trained_mask] = found + draw.normal(0, spread, found.size)


def make_samples(seed: int) -> list[TrainSample]:
    """Six conversations; two of them have a second fork in which other tokens are trained."""
    samples = make_groups(seed=seed, num_groups=2, generations=3, prompt=8, completion=6)
    for number in (1, 4):
        of = samples[number]
        fork = make_sample(
            [*of.token_ids[:1].tolist(), 7, 8, 9, 3],
            num_prompt=3,
            advantage=of.advantage,
            rollout_id=of.rollout_id,
        )
        tokens = of.num_trained + fork.num_trained
        samples[number] = replace(of, conversation_tokens=tokens)
        samples.append(replace(fork, conversation_tokens=tokens))
    return samples


def run(step: OptimizerStep, rows: list[list[TrainSample]]) -> tuple[StepResult, torch.Tensor]:
    for row in rows:
        step.accumulate(pack(row))
    result = step.finish()
    moments = [value for name, value in step.tensors().items() if name.startswith("exp_avg.")]
    return result, torch.cat([moment.flatten().clone() for moment in moments])


@pytest.mark.parametrize("case", CASES, ids=named)
def test_any_partition_gives_the_same_gradient(case: dict[str, Any]) -> None:
    step = make_step(Loss.model_validate(case))

    @settings(max_examples=5)
    @given(seed=st.integers(0, 10_000), data=st.data())
    def check(seed: int, data: st.DataObject) -> None:
        samples = make_samples(seed)
        sampled_near(step, samples, spread=5e-4 if case.get("kind") == "gspo" else 1.0)
        guarded = data.draw(st.sampled_from(samples), label="guarded")
        guarded.logprobs[guarded.trained_positions[0]] = math.nan
        places = st.lists(st.integers(0, 3), min_size=len(samples), max_size=len(samples))
        row_of = data.draw(places, label="rows")
        rows = [[s for s, row in zip(samples, row_of, strict=True) if row == n] for n in range(4)]
        whole, wanted = run(step, [samples])
        parts, found = run(step, [row for row in rows if row])
        assert whole.nonfinite == parts.nonfinite
        assert whole.nonfinite["old_logprobs"] == 1
        assert whole.denominator > 0
        assert parts.denominator == pytest.approx(whole.denominator, rel=1e-12)
        assert parts.loss == pytest.approx(whole.loss, rel=1e-6, abs=1e-9)
        assert float(wanted.norm()) > 0
        assert float((found - wanted).norm() / wanted.norm()) < 1e-6

    check()


def test_denominators_count_what_they_say() -> None:
    samples = make_samples(0)
    trained = sum(sample.num_trained for sample in samples)
    for normalise, wanted in (("tokens", trained), ("sequence", 6), ("constant", 6 * 64)):
        step = make_step(Loss.model_validate({"normalise": normalise}))
        result, _ = run(step, [samples[:3], samples[3:]])
        assert result.denominator == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    "rows", [[[0], [1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 2, 1, 0]]]
)
def test_losses_of_3_and_1_1_1_are_a_mean_of_1_5_in_every_partition(rows: list[list[int]]) -> None:
    """On policy a token's loss is -A; a row without an unguarded token adds nothing."""
    step = make_step(Loss())
    samples = [
        make_sample([1, 2, token], num_prompt=2, advantage=-3.0 if token == 3 else -1.0)
        for token in (3, 4, 5, 6)
    ]
    sampled_near(step, samples, spread=0.0)
    result, wanted = run(step, [[samples[index] for index in row] for row in rows])
    assert result.loss == pytest.approx(1.5, rel=1e-6)
    broken = make_sample([1, 2, 9], num_prompt=2, advantage=50.0, old_logprob=math.nan)
    again, found = run(step, [*([samples[index] for index in row] for row in rows), [broken]])
    assert again.loss == result.loss
    assert again.denominator == result.denominator == 4
    assert again.nonfinite["old_logprobs"] == 1
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6
