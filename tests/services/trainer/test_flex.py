"""The mask of flex attention against the blocks; its backward is for GPUs, and refused here."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import UserError
from services.trainer import compatibility
from services.trainer.attention import packed_attention
from services.trainer.compatibility import prepare_model
from services.trainer.packing import pack
from tests.services.trainer.numerics import make_groups, make_model


class Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([None, 1, 3, 50]), st.booleans())
def test_every_token_sees_what_it_sees_in_blocks(
    seed: int, window: int | None, share: bool
) -> None:
    samples = make_groups(seed=seed, num_groups=2, generations=3, prompt=12, completion=6)
    row = pack(samples, share_prefixes=share)
    torch.manual_seed(seed)
    query, key, value = (torch.randn(1, heads, row.num_forwarded, 16) for heads in (4, 2, 2))
    found, expected = (
        packed_attention(
            Layer(),
            query,
            key,
            value,
            None,
            attention_plan=row.attention,
            sliding_window=window,
            scaling=0.3,
            attention_kernel=kernel,
        )[0]
        for kernel in ("flex", "blocks")
    )
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_scores_that_it_does_not_know_are_refused() -> None:
    row = pack(make_groups(seed=0, num_groups=1, generations=2, prompt=4, completion=3))
    states = torch.randn(1, 2, row.num_forwarded, 16)
    flex: Any = {"attention_plan": row.attention, "attention_kernel": "flex"}
    with pytest.raises(ValueError, match="soft cap"):
        packed_attention(Layer(), states, states, states, None, softcap=5.0, **flex)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_without_a_backward_it_is_refused_at_start() -> None:
    with pytest.raises(UserError, match=r'trainer\.attention: .* set it to "blocks"'):
        prepare_model(make_model(), kernel="flex")


def test_gradients_are_part_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    way = prepare_model(model)
    proof = compatibility._Proof(model)
    prepare_model(model)  # the proof leaves the reference attention behind
    assert proof.why_not_gradient(way) == ""
    gradient = proof._gradient
    monkeypatch.setattr(proof, "_gradient", lambda each: gradient(each) * (1 + 2 * (each is way)))
    assert "gradients differ by 2, at most 0.0001 is allowed" in proof.why_not_gradient(way)
