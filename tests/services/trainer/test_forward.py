from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer import attention_plan
from services.trainer.attention import packed_attention
from services.trainer.attention_plan import plan_attention
from services.trainer.compatibility import prepare_model
from services.trainer.forward import PolicyForward
from services.trainer.packing import pack
from services.trainer.trie import Trie, build_trie
from services.trainer.types import TrainSample
from tests.services.trainer.architectures import ARCHITECTURES
from tests.services.trainer.numerics import make_groups, make_model


def make_trie(samples: list[TrainSample]) -> Trie:
    return build_trie(
        [sample.context for sample in samples],
        depths=[sample.trained_positions - 1 for sample in samples],
    )


def dense_mask(trie: Trie, window: int | None) -> torch.Tensor:
    """[N, N] by walking every path, token by token."""
    num_nodes = trie.token_ids.size
    mask = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
    for path, size in zip(trie.paths(), trie.run_sizes().tolist(), strict=True):
        assert trie.depths[path].tolist() == list(range(path.size))
        for place in range(path.size - size, path.size):
            first = 0 if window is None else max(0, place - window + 1)
            mask[path[place], path[first : place + 1]] = True
    return mask


def attend_densely(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Scores of all pairs, one sink a head, softmax: [1, N, heads, d]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    exps = scores.exp() * mask
    total = exps.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp().view(1, -1, 1, 1)
    output: torch.Tensor = exps / total @ value
    return output.transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    window=st.sampled_from([None, 1, 2, 3, 5, 8, 40]),
    small=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
def test_attention_sees_the_last_tokens_of_the_path(
    seed: int, window: int | None, small: bool, softcap: float | None, sinks: bool
) -> None:
    samples = make_groups(seed=seed, num_groups=3, generations=4, prompt=20, completion=12)
    trie = make_trie(samples)
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 4, trie.token_ids.size, 8)
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    key, value = key[:, :2], value[:, :2]
    scores = torch.randn(4, generator=generator, dtype=torch.float64) if sinks else None
    with pytest.MonkeyPatch.context() as patch:
        if small:
            # Many small blocks, so that runs are cut and joined in many ways.
            patch.setattr(attention_plan, "MAX_PAIRS", 300)
            patch.setattr(attention_plan, "MAX_STACK_KEYS", 40)
            patch.setattr(attention_plan, "MIN_WINDOW_BLOCK", 2)
        found, _ = packed_attention(
            torch.nn.Module(),
            query,
            key,
            value,
            None,
            attention_plan=plan_attention(trie),
            sliding_window=window,
            softcap=softcap,
            s_aux=scores,
        )
    wanted = attend_densely(
        query, key, value, dense_mask(trie, window), softcap=softcap, sinks=scores
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_a_window_gathers_little_more_than_it_sees() -> None:
    """One sequence of 4,096 tokens and a window of 256: blocks of 256 queries, each with the 255
    keys before it, and one mask a block."""
    trie = build_trie([np.arange(4096)], depths=[np.array([4095])])
    plan = plan_attention(trie).for_window(256)
    assert plan.key_index.numel() <= 2 * 4096
    assert sum(stack.mask.numel() for stack in plan.stacks if stack.mask is not None) <= 512 * 4096
    assert plan_attention(trie).for_window(4096).stacks[0].mask is None


@pytest.mark.parametrize("name", ["Qwen3", "Mistral", "GptOss", "GPT2", "Mamba", "Qwen3Moe"])
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    [architecture] = [each for each in ARCHITECTURES if each.name == name]
    samples = make_groups(seed=4, num_groups=2, generations=3, prompt=9, completion=9)

    def gradients(*, checkpointing: bool) -> dict[str, torch.Tensor]:
        model = architecture.make().train()
        way = prepare_model(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            assert model.is_gradient_checkpointing
        output = PolicyForward(model, temperature=1.0)(
            pack(samples, share_prefixes=way.shares_prefixes)
        )
        total = (output.logprobs * torch.linspace(-1, 1, output.logprobs.numel())).sum()
        if output.aux_loss is not None:
            total = total + output.aux_loss
        total.backward()
        return {
            name: weight.grad
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }

    plain, checkpointed = gradients(checkpointing=False), gradients(checkpointing=True)
    assert plain.keys() == checkpointed.keys()
    for key, gradient in plain.items():
        torch.testing.assert_close(checkpointed[key], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "bidirectional layers"),
    ],
)
def test_attention_refuses_what_it_does_not_do(argument: dict[str, Any], named: str) -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=f"packed attention does not know {named}"):
        packed_attention(torch.nn.Module(), states, states, states, None, **argument)


def test_plain_rows_give_what_rows_of_one_sample_give() -> None:
    model = make_model()
    prepare_model(model)
    forward = PolicyForward(model, temperature=0.7)
    [sample] = make_groups(seed=6, num_groups=1, generations=1, prompt=5, completion=9)
    output = forward(pack([sample]))
    found = forward.sequence_logprobs(sample.token_ids[None], temperature=0.7)
    assert found.shape == (1, sample.token_ids.size - 1)
    trained = torch.from_numpy(found[0, sample.trained_positions - 1])
    torch.testing.assert_close(output.logprobs.detach(), trained, rtol=0, atol=1e-5)
    assert not output.entropy.requires_grad
