"""Which device the trainer computes on. A GPU that is expected and cannot be used is an error,
never a run that is a hundred times slower than meant.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from services.common.errors import UserError

NO_GPU = re.compile(r"|void|none|all", re.IGNORECASE)
"""Values of NVIDIA_VISIBLE_DEVICES that name no device: images for CUDA set "all" wherever they
run."""


def choose_device(wanted: str, *, rank: int = 0, size: int = 1) -> torch.device:
    """The device of a rank by `trainer.device`: "cpu", "cuda", or "auto", which is a GPU where the
    machine has one.

    rank, size: of the ranks on this machine. Raises UserError when "cuda" is not there; when "auto"
    finds an NVIDIA device that torch cannot use; and when several ranks share too few GPUs.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        present = nvidia_device()
        if present:
            raise UserError(
                f'trainer.device: "{wanted}", and this machine has an NVIDIA device ({present}) '
                f"that torch cannot use ({why_unusable()}); mend that, or set it to "
                '"cpu" to run on the CPU on purpose'
            )
        if wanted == "cuda":
            raise UserError(
                'trainer.device: "cuda" is asked for and no GPU is there; set it to "cpu" or "auto"'
            )
        return torch.device("cpu")
    if size > found:
        raise UserError(
            f"trainer.ranks: {size} ranks need a GPU each, and {found} are here; have at most "
            f'{found} on a machine, or set trainer.device to "cpu"'
        )
    device = torch.device("cuda", rank if size > 1 else torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device


def nvidia_device(
    *, devices: Path = Path("/dev"), environ: Mapping[str, str] | None = None
) -> str | None:
    """What says that an NVIDIA GPU was given to this process: its device file, or the value of
    NVIDIA_VISIBLE_DEVICES; None for nothing, and where CUDA_VISIBLE_DEVICES hides all of them on
    purpose."""
    environ = os.environ if environ is None else environ
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    files = sorted(file.name for file in devices.glob("nvidia[0-9]*"))
    if files:
        return str(devices / files[0])
    visible = environ.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    return None if NO_GPU.fullmatch(visible) else f"NVIDIA_VISIBLE_DEVICES={visible}"


def why_unusable() -> str:
    """Why torch sees no GPU, as far as it can tell."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return next(iter(str(error).splitlines()), "") or type(error).__name__
    return f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no device"
