from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer import attention_plan
from services.trainer.compatibility import prepare_model
from services.trainer.packing import pack
from services.trainer.types import TrainSample
from tests.services.trainer.numerics import make_groups, make_model, make_sample, row_logprobs


@pytest.fixture(scope="module")
def model() -> Any:
    model = make_model()
    prepare_model(model)
    return model


def separate_logprobs(sample: TrainSample) -> torch.Tensor:
    """Log-probabilities of a sample's trained tokens, forwarded alone by transformers' own code."""
    plain = make_model().eval()
    token_ids = torch.from_numpy(sample.token_ids)
    logits = plain(input_ids=token_ids[None], use_cache=False).logits[0]
    positions = torch.from_numpy(sample.trained_positions)
    chosen: torch.Tensor = logits[positions - 1].log_softmax(-1)
    return chosen.gather(1, token_ids[positions, None])[:, 0]


def gradient(model: Any, value: torch.Tensor) -> torch.Tensor:
    parts = torch.autograd.grad(value, list(model.parameters()))
    return torch.cat([part.flatten() for part in parts])


def forks() -> list[TrainSample]:
    """Two prompts; the first with completions that fork at several depths, and one repeated."""
    a, b = [5, 6, 7, 8, 9], [5, 6, 40]
    return [
        make_sample([*a, 1, 2, 3], num_prompt=5),
        make_sample([*a, 1, 2, 4, 4], num_prompt=5),
        make_sample([*a, 1, 2, 3], num_prompt=5),
        make_sample([*a, 2], num_prompt=5),
        make_sample([*b, 1, 2, 3], num_prompt=3),
        make_sample([*b, 1], num_prompt=3),
        make_sample([30, 31, 32, 33], num_prompt=1),
    ]


def test_worked_example() -> None:
    row = pack([make_sample([5, 6, 7, 2], num_prompt=2), make_sample([5, 6, 8, 2], num_prompt=2)])
    assert row.input_ids.tolist() == [[5, 6, 7, 8]]
    assert row.position_ids.tolist() == [[0, 1, 2, 2]]
    assert row.positions[row.terms.slots].tolist() == [1, 2, 1, 3]
    assert row.terms.targets.tolist() == [7, 2, 8, 2]
    assert row.terms.samples.tolist() == [0, 0, 1, 1]
    assert (row.num_forwarded, row.num_trained, row.raw_tokens) == (4, 4, 8)


def test_each_sample_keeps_its_own_terms_of_a_shared_token() -> None:
    row = pack(
        [
            make_sample([1, 2, 3], num_prompt=2, advantage=0.5, old_logprob=-1.0, lag=2),
            make_sample([1, 2, 3], num_prompt=2, advantage=-2.0, old_logprob=-4.0),
        ]
    )
    assert row.num_forwarded == 2
    assert row.terms.targets.tolist() == [3, 3]
    assert row.terms.advantages.tolist() == [0.5, -2.0]
    assert row.terms.old_logprobs.tolist() == [-1.0, -4.0]
    assert row.terms.lags.tolist() == [2, 0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("share", [True, False])
def test_packed_equals_separate(model: Any, share: bool, training: bool) -> None:
    samples = forks()
    model.train(training)
    found, _ = row_logprobs(model, pack(samples, share_prefixes=share), temperature=1.0)
    wanted = torch.cat([separate_logprobs(sample) for sample in samples])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_random_tries_equal_separate_forwards_and_unshared_gradients(model: Any, seed: int) -> None:
    samples = make_groups(seed=seed, num_groups=3, generations=4, prompt=20, completion=12)
    shared, _ = row_logprobs(model, pack(samples), temperature=1.0)
    alone = [row_logprobs(model, pack([s]), temperature=1.0)[0] for s in samples]
    torch.testing.assert_close(shared, torch.cat(alone), rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 1, shared.numel())
    with_sharing = gradient(model, (shared * weights).sum())
    without = gradient(model, (torch.cat(alone) * weights).sum())
    assert float((with_sharing - without).norm() / without.norm()) < 1e-5


def test_many_shapes_of_blocks_and_small_bounds(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_groups(seed=3, num_groups=6, generations=6, prompt=150, completion=60)
    wanted, _ = row_logprobs(model, pack(samples), temperature=1.0)
    stacks = len(pack(samples).attention.stacks)
    monkeypatch.setattr(attention_plan, "MAX_PAIRS", 2000)
    monkeypatch.setattr(attention_plan, "MAX_STACK_KEYS", 200)
    row = pack(samples)
    assert len(row.attention.stacks) > stacks
    found, _ = row_logprobs(model, row, temperature=1.0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_a_row_needs_far_fewer_calls_than_samples() -> None:
    samples = make_groups(seed=5, num_groups=32, generations=16, prompt=70, completion=4)
    row = pack(samples)
    assert row.num_samples == 512
    assert len(row.attention.stacks) <= 16
    gathered = row.attention.key_index.numel()
    assert gathered < 4 * row.num_forwarded


def test_attention_does_not_cross_samples(model: Any) -> None:
    """Changing one sample's tokens changes no other sample's log-probabilities by a bit."""
    first = make_sample([3, 4, 5, 6, 7], num_prompt=2)
    other = make_sample([9, 10, 11, 12, 13], num_prompt=2)
    changed = make_sample([20, 21, 22, 23, 24], num_prompt=2)
    before, _ = row_logprobs(model, pack([first, other]), temperature=1.0)
    after, _ = row_logprobs(model, pack([first, changed]), temperature=1.0)
    assert torch.equal(before[:3], after[:3])
    assert not torch.allclose(before[3:], after[3:])


def test_no_gradient_crosses_samples(model: Any) -> None:
    row = pack([make_sample([3, 4, 5], num_prompt=2), make_sample([9, 10, 11], num_prompt=2)])
    logprobs, _ = row_logprobs(model, row, temperature=1.0)
    embedding = model.get_input_embeddings().weight
    (grad,) = torch.autograd.grad(logprobs[0], embedding)
    touched = set(grad.abs().sum(1).nonzero().flatten().tolist())
    assert touched == {3, 4}


def test_padded_batches_are_refused_loudly(model: Any) -> None:
    token_ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="attention_mask has zeros"):
        model(input_ids=token_ids, attention_mask=torch.tensor([[1, 1, 1, 0]]), use_cache=False)


def test_samples_are_checked() -> None:
    with pytest.raises(ValueError, match="first token cannot be trained"):
        make_sample([1, 2, 3], num_prompt=0)
    with pytest.raises(ValueError, match="no token is trained"):
        make_sample([1, 2, 3], num_prompt=3)
    good = make_sample([1, 2, 3], num_prompt=1)
    with pytest.raises(ValueError, match="g/0: lags has shape"):
        TrainSample(**(vars(good) | {"lags": np.zeros(2, np.int16)}))
    with pytest.raises(ValueError, match="2 tokens are trained, its whole conversation has 1"):
        replace(good, conversation_tokens=1)


def test_terms_are_weighed_by_their_conversation() -> None:
    alone = make_sample([1, 2, 3, 4], num_prompt=2)
    forks = [
        replace(make_sample([5, 6, 7], num_prompt=2), conversation_tokens=4),
        replace(make_sample([5, 6, 8, 9, 1], num_prompt=2), conversation_tokens=4),
    ]
    row = pack([alone, *forks])
    assert row.terms.weights.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert row.terms.weights.dtype == torch.float32
