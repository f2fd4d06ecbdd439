from typing import Any

import pytest
import torch

from services.common.errors import UserError
from services.trainer.attention import IMPLEMENTATION
from services.trainer.compatibility import prepare_model
from services.trainer.forward import PolicyForward, RowOutput, Way
from services.trainer.packing import pack
from services.trainer.types import TrainSample
from tests.services.trainer.architectures import ARCHITECTURES, GPT, WINDOW, Architecture
from tests.services.trainer.numerics import VOCABULARY, make_groups, make_model, make_sample

TEMPERATURE = 0.7

# The reference implementations of state-space layers say that faster ones exist.
pytestmark = pytest.mark.filterwarnings("ignore")


def separate(model: Any, sample: TrainSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the trained tokens and entropies there, by the whole model alone."""
    token_ids = torch.from_numpy(sample.token_ids)
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0].float() / TEMPERATURE
    positions = torch.from_numpy(sample.trained_positions)
    log_softmax = logits[positions - 1].log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(1, token_ids[positions, None])[:, 0], entropy


def gradient(model: Any, value: torch.Tensor) -> torch.Tensor:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    parts = torch.autograd.grad(value, weights, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(weight) if part is None else part).flatten()
            for weight, part in zip(weights, parts, strict=True)
        ]
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_every_architecture_is_trained_as_it_computes(architecture: Architecture) -> None:
    model = architecture.make()
    way = prepare_model(model)
    assert (way.shares_prefixes, way.scores) == (architecture.shares, architecture.scores)
    assert architecture.reason in way.reason
    assert bool(way.reason) is not way.shares_prefixes
    assert (model.config._attn_implementation == IMPLEMENTATION) is way.shares_prefixes

    samples = make_groups(seed=1, num_groups=2, generations=3, prompt=9, completion=9)
    assert max(sample.num_context for sample in samples) > 2 * WINDOW
    forward = PolicyForward(model, temperature=TEMPERATURE)
    output: RowOutput = forward(pack(samples, share_prefixes=way.shares_prefixes))
    weights = torch.linspace(-1, 1, output.logprobs.numel())
    found = gradient(model, (output.logprobs * weights).sum())

    plain = architecture.make().eval()
    plain.set_attn_implementation("eager")
    pairs = [separate(plain, sample) for sample in samples]
    wanted = torch.cat([logprobs for logprobs, _ in pairs])
    torch.testing.assert_close(output.logprobs, wanted, rtol=0, atol=1e-4)
    entropy = torch.cat([entropy for _, entropy in pairs])
    torch.testing.assert_close(output.entropy, entropy, rtol=0, atol=1e-4)
    expected = gradient(plain, (wanted * weights).sum())
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    assert (output.aux_loss is not None) is architecture.routers


def test_a_sample_at_a_time_is_right_on_rows_that_share_prefixes_too() -> None:
    """As a reference model meets them whose policy shares."""
    [architecture] = [each for each in ARCHITECTURES if each.name == "Mamba"]
    model = architecture.make()
    prepare_model(model)
    samples = make_groups(seed=2, num_groups=2, generations=3, prompt=6, completion=5)
    forward = PolicyForward(model, temperature=1.0)
    shared, unshared = forward(pack(samples)), forward(pack(samples, share_prefixes=False))
    torch.testing.assert_close(shared.logprobs, unshared.logprobs, rtol=0, atol=1e-5)


def test_a_wide_window_is_proven_by_a_narrow_one() -> None:
    """A model whose layers do not tell the attention of their window would pass on short rows."""
    settings = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}
    model = make_model(**settings)
    assert prepare_model(model).shares_prefixes
    assert model.config.sliding_window == 4096
    attention = model.model.layers[0].self_attn
    assert attention.sliding_window == 4096

    silent = make_model(**settings)
    for layer in silent.model.layers:
        layer.self_attn.sliding_window = None
    way = prepare_model(silent)
    assert not way.shares_prefixes
    assert "differ" in way.reason


def test_dropout_is_refused() -> None:
    with pytest.raises(UserError, match=r"dropout \(attention_dropout = 0.1\)"):
        prepare_model(make_model(attention_dropout=0.1))
    gpt2 = Architecture("GPT2", GPT | {"resid_pdrop": 0.1})
    with pytest.raises(UserError, match=r"h\.0\.attn\.resid_dropout = 0\.1, .*, …\)"):
        prepare_model(gpt2.make())


def test_an_unknown_head_is_refused() -> None:
    scaled = make_model()
    head = scaled.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(UserError, match="other log-probabilities in training"):
        prepare_model(scaled)


def test_rotary_embeddings_that_look_at_the_longest_sequence_are_not_shared() -> None:
    model = make_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    way = prepare_model(model)
    assert not way.shares_prefixes
    assert "dynamic" in way.reason
    assert str(way).startswith("one sample at a time (its rotary embeddings (dynamic)")


def test_a_model_that_was_not_prepared_says_so() -> None:
    with pytest.raises(ValueError, match="has not been prepared"):
        PolicyForward(make_model(), temperature=1.0)
    assert str(Way()) == "shared prefixes"


def test_canary_rows_go_through_windows() -> None:
    model = make_model(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0)
    plain = make_model(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0).eval()
    prepare_model(model)
    sample = make_sample(list(range(20)), num_prompt=1)
    found = PolicyForward(model, temperature=1.0).sequence_logprobs(
        sample.token_ids[None] % VOCABULARY, temperature=TEMPERATURE
    )
    wanted, _ = separate(plain, sample)
    torch.testing.assert_close(torch.from_numpy(found[0]), wanted.detach(), rtol=0, atol=1e-5)
