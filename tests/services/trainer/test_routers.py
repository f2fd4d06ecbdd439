import sys

import pytest
import torch
from structlog.testing import capture_logs
from transformers import DogeConfig, DogeForCausalLM

from services.trainer.compatibility import prepare_model
from services.trainer.forward import PolicyForward
from services.trainer.packing import pack
from services.trainer.routers import RouterLoss
from tests.services.trainer.architectures import ARCHITECTURES, Architecture
from tests.services.trainer.numerics import make_groups, make_sample

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.routers], ids=str)
def test_the_loss_is_transformers_own(architecture: Architecture) -> None:
    model, plain = architecture.make(), architecture.make()
    way = prepare_model(model)
    sample = make_sample([3, 9, 27, 31, 44, 12, 6, 8, 1, 5], num_prompt=3)
    row = pack([sample], share_prefixes=way.shares_prefixes)
    found = PolicyForward(model, temperature=0.7)(row).aux_loss
    # The last token is only a target: it is not forwarded.
    token_ids = torch.from_numpy(sample.context)[None]
    wanted = plain(input_ids=token_ids, output_router_logits=True, use_cache=False).aux_loss
    torch.testing.assert_close(found, wanted)
    assert found is not None
    found.backward()
    wanted.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_several_forwards_count_as_one_row() -> None:
    """A model that takes one sample at a time has the loss over all tokens of the row."""
    [made] = [each for each in ARCHITECTURES if each.name == "Qwen3Next"]
    model = made.make()
    prepare_model(model)
    samples = make_groups(seed=3, num_groups=2, generations=2, prompt=4, completion=6)
    forward = PolicyForward(model, temperature=1.0)
    found = forward(pack(samples, share_prefixes=False)).aux_loss
    layers: list[list[torch.Tensor]] = []
    for sample in samples:
        output = model.model(
            input_ids=torch.from_numpy(sample.context)[None],
            use_cache=False,
            output_router_logits=True,
        )
        layers.append(list(output.router_logits))
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    joined = tuple(torch.cat(parts) for parts in zip(*layers, strict=True))
    torch.testing.assert_close(found, function(joined, 4, 2))


def test_even_loads_cost_the_experts_per_token() -> None:
    """Equations 4 to 6 of the paper: 4 experts, 2 a token, all probabilities alike: 4 x 4 x
    (1/2 x 1/4) = 2."""
    [made] = [each for each in ARCHITECTURES if each.name == "Mixtral"]
    loss = RouterLoss.of(made.make())
    assert loss is not None
    assert (loss.num_experts, loss.num_experts_per_token) == (4, 2)

    class Output:
        router_logits = (torch.zeros(8, 4),)

    assert loss([Output()]) == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["Llama", "DeepseekV3", "Mamba"])
def test_models_without_such_a_loss_have_none(name: str) -> None:
    [made] = [each for each in ARCHITECTURES if each.name == name]
    assert RouterLoss.of(made.make()) is None


def test_a_loss_of_another_kind_is_left_out_and_said() -> None:
    config = DogeConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        is_moe=True,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with capture_logs() as logs:
        assert RouterLoss.of(DogeForCausalLM(config)) is None
    assert [log["log_level"] for log in logs] == ["warning"]
