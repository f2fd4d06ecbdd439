"""A model from a folder, with an error that a person can act on."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from services.common.errors import UserError


def load_model(folder: Path, dtype: torch.dtype, *, of: str = "") -> Any:
    """A causal language model in `dtype`, on the CPU; nothing is looked up on a hub.

    of: the recipe's key that names the folder. Raises UserError when it cannot be loaded.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        why = next(iter(str(error).splitlines()), "")
        where = f"{of}: {folder}" if of else str(folder)
        raise UserError(f"{where} cannot be loaded: {why}") from error
