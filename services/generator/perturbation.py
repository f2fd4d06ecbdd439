"""The perturbed weights of the load-path proof, as a file like any version's."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.common import canary


def perturbed_copy(path: Path) -> Path:
    """Write the weights of `path`, each tensor perturbed (services/common/canary.py), beside it;
    returns the new file.

    Computed in float32 and rounded to the tensor's own dtype, as the trainer does: numpy has no
    bfloat16, so it is done with torch.
    """
    target = path.with_name("perturbed.safetensors")
    perturbed = {name: _perturbed(name, value) for name, value in load_file(path).items()}
    save_file(perturbed, target)
    return target


def _perturbed(name: str, value: torch.Tensor) -> torch.Tensor:
    shape = tuple(value.shape)
    factors, offsets = canary.factors(name, shape), canary.offsets(name, shape)
    scaled = value.float() * torch.from_numpy(factors) + torch.from_numpy(offsets)
    return scaled.to(value.dtype)
