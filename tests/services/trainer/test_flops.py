from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from services.trainer.compatibility import prepare_model
from services.trainer.flops import Flops, peak_by_name, peak_flops
from services.trainer.forward import PolicyForward
from services.trainer.packing import pack
from tests.services.trainer.architectures import ARCHITECTURES
from tests.services.trainer.numerics import make_model, make_sample

TOKENS, TRAINED = 41, 8

pytestmark = pytest.mark.filterwarnings("ignore")


def row_of(num_tokens: int = TOKENS, num_trained: int = TRAINED) -> Any:
    token_ids = [i % 7 for i in range(num_tokens)]
    return pack([make_sample(token_ids, num_prompt=num_tokens - num_trained)])


def test_worked_example() -> None:
    flops = Flops(per_token=2000, per_pair={None: 256}, per_logits=1000)
    assert flops.of_row(row_of(11, 4)) == 114_240


def test_a_window_bounds_pairs() -> None:
    flops = Flops(per_token=0, per_pair={3: 1.0}, per_logits=0)
    # 10 tokens: 1 + 2 + 3 x 8 pairs.
    assert flops.of_row(row_of(11, 4)) == 3 * 27


def test_shared_prefixes_count_once() -> None:
    flops = Flops(per_token=1, per_pair={None: 0}, per_logits=0)
    row = pack([make_sample([1, 2, 3, 4], num_prompt=2), make_sample([1, 2, 5, 6], num_prompt=2)])
    assert flops.of_row(row) == 3 * 4


@pytest.mark.parametrize("name", ["Qwen3", "GPT2", "DeepseekV3", "Mixtral", "Llama"])
def test_products_are_what_torch_counts(name: str) -> None:
    """torch counts all products of a forward; attention written out has all pairs, not only those
    that are seen."""
    [architecture] = [each for each in ARCHITECTURES if each.name == name]
    model = architecture.make()
    flops = Flops.of_model(model)
    prepare_model(model)
    # The grouped products of experts are not known to torch's counter, loops over experts are.
    model.set_experts_implementation("eager")
    forward = PolicyForward(model, temperature=1.0)
    row = row_of()
    with (
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
    ):
        forward(row)
    num = row.num_forwarded
    unseen = num * num - num * (num + 1) // 2
    wanted = flops.of_row(row) / 3 + unseen * sum(flops.per_pair.values())
    # Of rotary embeddings: a product of size 1.
    assert wanted == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_layers_may_differ() -> None:
    """Of Gemma 3 each layer has its window; a window of 0 is none."""
    [gemma] = [each for each in ARCHITECTURES if each.name == "Gemma3Text"]
    # 2 FLOPs x 4 heads x (8 + 8) numbers a layer.
    assert Flops.of_model(gemma.make()).per_pair == {5: 128.0, None: 128.0}
    [qwen2] = [each for each in ARCHITECTURES if each.name == "Qwen2Moe"]
    assert Flops.of_model(qwen2.make()).per_pair == {None: 256.0}
    [mamba] = [each for each in ARCHITECTURES if each.name == "Mamba"]
    assert sum(Flops.of_model(mamba.make()).per_pair.values()) == 0


def test_peaks() -> None:
    assert peak_by_name("NVIDIA H100 80GB HBM3") == 989.5e12
    assert peak_by_name("NVIDIA H100 PCIe") == 756.5e12
    assert peak_by_name("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_by_name("NVIDIA L40S") == 362.05e12
    assert peak_by_name("NVIDIA L4") == 121e12
    assert peak_by_name("NVIDIA GeForce RTX 2080") is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_a_tied_head_is_counted_as_the_head_alone() -> None:
    tied, untied = make_model(tie_word_embeddings=True), make_model()
    assert Flops.of_model(tied) == Flops.of_model(untied)


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    """A frozen matrix has two products, forward and for its input; a trained one three."""
    whole, frozen = make_model(), make_model().requires_grad_(False)
    assert Flops.of_model(whole).token_passes == Flops.of_model(whole).head_passes == 3
    assert Flops.of_model(frozen).token_passes == Flops.of_model(frozen).head_passes == 2
    layer = frozen.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    flops = Flops.of_model(frozen)
    assert flops.token_passes == pytest.approx(2 + 2 * layer.numel() / flops.per_token)
    flops = Flops(per_token=2000, per_pair={None: 256}, per_logits=1000, token_passes=2)
    assert flops.of_row(row_of(11, 4)) == 114_240 - 10 * 2000
