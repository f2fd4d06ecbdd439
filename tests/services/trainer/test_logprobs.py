from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import logprobs as module
from services.trainer.compatibility import prepare_model
from services.trainer.logprobs import token_logprobs
from tests.services.trainer.numerics import VOCABULARY, make_model, sequence_logprobs


def head_of(logits: list[float]) -> tuple[torch.Tensor, torch.nn.Linear]:
    """A state and an output head that give these logits."""
    head = torch.nn.Linear(len(logits), len(logits), bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(len(logits)))
    return torch.tensor([logits]), head


def logprob(logits: list[float], *, target: int, temperature: float) -> tuple[float, float]:
    hidden, head = head_of(logits)
    slots = torch.tensor([0])
    value, entropy = token_logprobs(
        hidden, head, slots=slots, targets=torch.tensor([target]), temperature=temperature
    )
    return float(value.detach()), float(entropy)


def test_temperature_divides_logits_and_not_logprobs() -> None:
    at_half, _ = logprob([2.0, 1.0, 0.0], target=0, temperature=0.5)
    raw, _ = logprob([2.0, 1.0, 0.0], target=0, temperature=1.0)
    assert at_half == pytest.approx(-0.142932, abs=1e-6)
    assert raw == pytest.approx(-0.407606, abs=1e-6)
    assert np.exp(at_half - raw) == pytest.approx(1.3030, abs=1e-4)
    assert np.exp(at_half - raw / 0.5) == pytest.approx(1.9587, abs=1e-4)


def test_entropy_is_in_nats_and_of_the_tempered_softmax() -> None:
    assert logprob([1.0, 1.0], target=0, temperature=1.0)[1] == pytest.approx(np.log(2))
    _, entropy = logprob([2.0, 1.0, 0.0], target=0, temperature=0.5)
    p = np.exp([4.0, 2.0, 0.0]) / np.exp([4.0, 2.0, 0.0]).sum()
    assert entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-6)
    # A token that cannot occur adds nothing, and no NaN.
    head = torch.nn.Linear(1, 3)
    with torch.no_grad():
        head.weight.fill_(0.0)
        head.bias.copy_(torch.tensor([1.0, 1.0, -float("inf")]))
    zero = torch.zeros(1, dtype=torch.long)
    _, found = token_logprobs(torch.zeros(1, 1), head, slots=zero, targets=zero, temperature=1.0)
    assert float(found) == pytest.approx(np.log(2))


@pytest.mark.parametrize("chunk_bytes", [4, 4 * 7 * 3, 1 << 20])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_equal_autograd_in_any_chunks(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, bias: bool
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 5, generator=generator, requires_grad=True)
    head = torch.nn.Linear(5, 7, bias=bias)
    slots = torch.tensor([3, 3, 0, 9, 3, 5])
    targets = torch.tensor([1, 1, 6, 0, 2, 4])
    weights = torch.randn(6, generator=generator)
    inputs = [hidden, *head.parameters()]

    found, entropy = token_logprobs(hidden, head, slots=slots, targets=targets, temperature=0.7)
    wanted = (head(hidden) / 0.7).log_softmax(-1)
    torch.testing.assert_close(entropy, -(wanted.exp() * wanted).sum(-1))
    wanted = wanted[slots, targets]
    torch.testing.assert_close(found, wanted)
    for a, b in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((wanted * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert not entropy.requires_grad


def test_a_broken_state_gives_nan_and_no_gradient() -> None:
    hidden = torch.ones(3, 2)
    hidden[1] = float("nan")
    hidden.requires_grad_()
    head = torch.nn.Linear(2, 4)
    positions = torch.arange(3)
    found, _ = token_logprobs(hidden, head, slots=positions, targets=positions, temperature=1.0)
    assert found.isnan().tolist() == [False, True, False]
    found.nansum().backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is not None
    assert hidden.grad is not None
    assert bool(head.weight.grad.isfinite().all())
    assert hidden.grad[1].tolist() == [0.0, 0.0]


def test_bfloat16_states_are_normalised_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 8, generator=generator, dtype=torch.bfloat16)
    head = torch.nn.Linear(8, 300, bias=False, dtype=torch.bfloat16)
    positions = torch.arange(4)
    found, entropy = token_logprobs(
        hidden, head, slots=positions, targets=positions, temperature=1.0
    )
    wanted = head(hidden).float().log_softmax(-1)[positions, positions]
    assert (found.dtype, entropy.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("prepared", [True, False])
def test_sequence_logprobs(monkeypatch: pytest.MonkeyPatch, prepared: bool) -> None:
    model: Any = make_model()
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (5, 9))
    token_ids = torch.from_numpy(rows)
    logits = (model(input_ids=token_ids, use_cache=False).logits / 0.8).log_softmax(-1)
    wanted = logits[:, :-1].gather(2, token_ids[:, 1:, None])[..., 0]
    if prepared:
        prepare_model(model)
    monkeypatch.setattr(module, "SEQUENCE_CHUNK_TOKENS", 20)
    found = sequence_logprobs(model, rows, temperature=0.8)
    assert found.shape == (5, 8)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted.detach().numpy(), atol=1e-5)
    np.testing.assert_array_equal(found, sequence_logprobs(model.eval(), rows, temperature=0.8))
