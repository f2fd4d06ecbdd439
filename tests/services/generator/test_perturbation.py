"""The perturbed file is the trainer's own arithmetic, in every dtype."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common import canary
from services.generator.perturbation import perturbed_copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_tensor_is_scaled_by_its_own_factors(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(3, 5, dtype=dtype), "b.weight": torch.randn(7, dtype=dtype)}
    save_file(tensors, tmp_path / "1.safetensors")
    path = perturbed_copy(tmp_path / "1.safetensors")
    assert path.parent == tmp_path
    written = load_file(path)
    assert written.keys() == tensors.keys()
    for name, value in tensors.items():
        factors = torch.from_numpy(canary.factors(name, tuple(value.shape)))
        assert written[name].dtype == dtype
        assert torch.equal(written[name], (value.float() * factors).to(dtype))
        assert not torch.equal(written[name], value)


def test_the_second_factors_of_an_adapter_are_moved_from_zero(tmp_path: Path) -> None:
    """No factor moves a 0; what is added is a twentieth at most."""
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    first = name.replace("lora_B", "lora_A")
    save_file({name: torch.zeros(6, 4), first: torch.zeros(4, 6)}, tmp_path / "1.safetensors")
    written = load_file(perturbed_copy(tmp_path / "1.safetensors"))
    assert torch.equal(written[first], torch.zeros(4, 6))
    factors = torch.from_numpy(canary.factors(name, (6, 4)))
    assert torch.equal(written[name], factors - 1)
    assert 0 < written[name].abs().max() <= canary.PERTURBATION
