"""The perturbed weights of the load-path proof, as a file like any version's."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.common import canary


def perturbed_copy(path: Path) -> Path:
    """Write the weights of `path`, each tensor times its factors, beside it; returns the new file.

    Multiplied in float32 and rounded to the tensor's own dtype, as the trainer does: numpy has no
    bfloat16, so it is done with torch.
    """
    target = path.with_name("perturbed.safetensors")
    scaled = {
        name: (value.float() * _factor(name, value)).to(value.dtype)
        for name, value in load_file(path).items()
    }
    save_file(scaled, target)
    return target


def _factor(name: str, value: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(canary.factors(name, tuple(value.shape)))
