import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from services.common.training_config import Loss, Optimizer
from services.trainer.packing import pack
from services.trainer.step import NO_DENOMINATOR, NON_FINITE, OptimizerStep, StepResult
from services.trainer.types import TrainSample
from tests.services.trainer.numerics import make_groups, make_model, make_sample, sequence_logprobs

FREE = Optimizer(learning_rate=1e-3, max_grad_norm=1e9)


def make_step(model: Any, *, optimizer: Optimizer = FREE, temperature: float = 1.0) -> Any:
    return OptimizerStep(model, optimizer=optimizer, loss=Loss(), temperature=temperature)


def run(step: OptimizerStep, rows: list[list[TrainSample]]) -> StepResult:
    for row in rows:
        step.accumulate(pack(row))
    return step.finish()


def gradient_of(step: OptimizerStep, rows: list[list[TrainSample]]) -> torch.Tensor:
    """The gradient that a first step applied: AdamW's first moment is 0.1 of it."""
    run(step, rows)
    state = step.tensors()
    return torch.cat([v.flatten() for k, v in state.items() if k.startswith("exp_avg.")]) / 0.1


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_any_partition_into_rows_gives_the_same_gradient(seed: int, data: st.DataObject) -> None:
    samples = make_groups(seed=seed, num_groups=2, generations=4, prompt=10, completion=5)
    row_of = data.draw(
        st.lists(st.integers(0, 3), min_size=len(samples), max_size=len(samples)), label="rows"
    )
    rows = [[s for s, row in zip(samples, row_of, strict=True) if row == n] for n in range(4)]
    # A double-precision trunk: the law, without what float32 rounds on either side (1e-6 to 1e-5).
    whole = gradient_of(make_step(make_model().double()), [samples])
    parts = gradient_of(make_step(make_model().double()), [row for row in rows if row])
    assert float((whole - parts).norm() / whole.norm()) < 1e-6


def test_gradient_is_that_of_the_plain_formula() -> None:
    samples = make_groups(seed=1, num_groups=2, generations=3, prompt=8, completion=4)
    found = gradient_of(make_step(make_model()), [samples[:2], samples[2:]])
    model = make_model()
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        at = torch.from_numpy(sample.trained_positions)
        new = logits[at - 1].log_softmax(-1).gather(1, ids[at, None])[:, 0]
        ratio = (new - torch.from_numpy(sample.logprobs)[at]).exp()
        value = torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.28) * sample.advantage)
        if sample.advantage < 0:
            value = value.clamp(min=10 * sample.advantage)
        total, tokens = total - value.sum(), tokens + at.numel()
    (total / tokens).backward()  # type: ignore[no-untyped-call]
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_result_of_a_step() -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    samples = [
        make_sample([1, 2, 3, 4], num_prompt=2, advantage=1.0),
        make_sample([1, 2, 5, 4], num_prompt=2, advantage=-1.0),
        make_sample([7, 2, 5], num_prompt=2, advantage=0.0),
    ]
    step = make_step(model, optimizer=Optimizer(learning_rate=1e-3, warmup_steps=4))
    result = run(step, [samples[:2], samples[2:]])
    assert (result.applied, result.skipped) == (True, "")
    assert (result.num_rows, result.num_samples, result.raw_tokens) == (2, 3, 11)
    assert (result.forwarded_tokens, result.trained_tokens) == (4 + 2, 5)
    # Tokens of advantage 0 are in the denominator.
    assert (result.denominator, result.statistics.signal_tokens) == (5, 4)
    assert result.loss is not None
    assert result.grad_norm is not None
    assert result.grad_norm > 0
    assert 0 < result.fwd_s <= result.fwd_bwd_s
    assert result.learning_rate == pytest.approx(1e-3 / 4)
    assert step.learning_rate == pytest.approx(1e-3 / 2)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert set(result.nonfinite.values()) == {0}


def test_warm_up_is_linear_and_ends() -> None:
    step = make_step(make_model(), optimizer=Optimizer(learning_rate=1.0, warmup_steps=2))
    rates = []
    for applied in range(4):
        step.num_applied = applied
        rates.append(step.learning_rate)
    assert rates == [0.5, 1.0, 1.0, 1.0]


def test_without_a_denominator_nothing_moves() -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    step = make_step(model)
    empty = step.finish()
    assert (empty.applied, empty.skipped, empty.loss) == (False, NO_DENOMINATOR, None)
    assert (empty.grad_norm, empty.denominator) == (None, 0)
    guarded = run(step, [[make_sample([1, 2, 3], num_prompt=2, old_logprob=math.nan)]])
    assert (guarded.applied, guarded.skipped, guarded.trained_tokens) == (False, NO_DENOMINATOR, 1)
    assert guarded.nonfinite["old_logprobs"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert step.num_applied == 0


def test_non_finite_gradients_skip_the_step_and_leave_no_trace() -> None:
    model = make_model()
    step = make_step(model)
    before = [p.detach().clone() for p in model.parameters()]
    handle = model.model.layers[0].register_full_backward_hook(
        lambda module, grad_input, grad_output: (grad_input[0] * float("nan"),)
    )
    sample = make_sample([1, 2, 3, 4], num_prompt=2)
    broken = run(step, [[sample]])
    handle.remove()
    assert (broken.applied, broken.skipped) == (False, NON_FINITE)
    assert broken.nonfinite["gradients"] == 1
    assert broken.grad_norm is not None
    assert math.isnan(broken.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    again = run(step, [[sample]])
    fresh = run(make_step(make_model()), [[sample]])
    assert again.applied
    assert again.grad_norm == fresh.grad_norm


def test_gradients_are_clipped_after_the_division() -> None:
    optimizer = Optimizer(learning_rate=1e-3, max_grad_norm=1e-3)
    sample = make_sample([1, 2, 3, 4], num_prompt=2)
    clipped = gradient_of(make_step(make_model(), optimizer=optimizer), [[sample]])
    free = gradient_of(make_step(make_model()), [[sample]])
    assert float(free.norm()) > 1e-2
    assert float(clipped.norm()) == pytest.approx(1e-3, rel=1e-2)
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm())
    result = run(make_step(make_model(), optimizer=optimizer), [[sample]])
    assert result.grad_norm == pytest.approx(float(free.norm()), rel=1e-5)


def test_weight_decay_spares_vectors() -> None:
    step = make_step(make_model(), optimizer=Optimizer(learning_rate=1e-3, weight_decay=0.1))
    for group in step._adamw.param_groups:
        dimensions = {weight.ndim for weight in group["params"]}
        assert dimensions == ({1} if group["weight_decay"] == 0 else {2})


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_ratio_is_one_when_nothing_moved(temperature: float) -> None:
    model = make_model()
    token_ids = np.random.default_rng(0).integers(0, 50, (3, 8))
    old = sequence_logprobs(model, token_ids, temperature=temperature)
    samples = []
    for row, logprobs in zip(token_ids, old, strict=True):
        sample = make_sample(row.tolist(), num_prompt=3)
        sample.logprobs[3:] = logprobs[2:]
        samples.append(sample)
    result = run(make_step(model, temperature=temperature), [samples])
    assert result.statistics.ratio_sum / result.denominator == pytest.approx(1, abs=1e-5)
    assert result.statistics.lags[0].gap_max < 1e-5


def test_training_raises_what_was_rewarded() -> None:
    good = make_sample([1, 2, 3, 4], num_prompt=2, advantage=1.0)
    bad = make_sample([1, 2, 5, 6], num_prompt=2, advantage=-1.0)
    model = make_model()
    rows = np.array([good.token_ids, bad.token_ids])

    def preference() -> float:
        value = sequence_logprobs(model, rows)[:, 1:].sum(1)
        return float(value[0] - value[1])

    step, before = make_step(model), preference()
    old = sequence_logprobs(model, rows)
    for sample, logprobs in zip((good, bad), old, strict=True):
        sample.logprobs[1:] = np.where(sample.trained_mask[1:], logprobs, 0)
    for _ in range(5):
        run(step, [[good, bad]])
    assert preference() > before + 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_through_safetensors_and_continues_exactly(dtype: torch.dtype) -> None:
    samples = make_groups(seed=2, num_groups=2, generations=2, prompt=6, completion=4)
    model = make_model().to(dtype)
    step = make_step(model)
    run(step, [samples])
    saved = save(step.tensors())
    run(step, [samples])
    other = make_model(seed=9).to(dtype)
    resumed = make_step(other)
    resumed.load_tensors(load(saved))
    assert resumed.num_applied == 1
    run(resumed, [samples])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="of another model"):
        resumed.load_tensors({"num_applied": torch.tensor(1)})


def test_bfloat16_keeps_small_updates_in_float32_masters() -> None:
    """At 1e-6 a step rounds to nothing in bfloat16; twenty of them must add up all the same."""
    model = make_model().to(torch.bfloat16)
    step = make_step(model, optimizer=Optimizer(learning_rate=1e-6))
    samples = make_groups(seed=4, num_groups=1, generations=4, prompt=6, completion=4)
    start = step.tensors()["master.lm_head.weight"].clone()
    for _ in range(20):
        assert run(step, [samples[:2], samples[2:]]).applied
    moved = (step.tensors()["master.lm_head.weight"] - start).abs().max()
    assert float(moved) > 1e-5
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
