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
