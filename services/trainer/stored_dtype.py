"""In which precision the weights of a model folder are stored."""

import math
from collections import Counter
from pathlib import Path

import structlog
from safetensors import safe_open

NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""By the names of the safetensors format; integers are no weights of a precision."""

EXACT_IN = {"bfloat16": {"bfloat16", "float32"}, "float16": {"float16", "float32"}}
"""Types that hold every value of a type; float32 is held by itself."""


def stored_dtype(folder: Path) -> str | None:
    """The dtype of most weights in the safetensors files of a folder; None where there are no
    such files.

    Example: 1,000,000 weights in bfloat16 and 2,000 in float32 (norms) give "bfloat16".
    """
    weights: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                tensor = tensors.get_slice(name)
                dtype = NAMES.get(tensor.get_dtype())
                if dtype is not None:
                    weights[dtype] += math.prod(tensor.get_shape())
    return weights.most_common(1)[0][0] if weights else None


def say_dtype(folder: Path, dtype: str) -> None:
    """Log it when the weights of a folder are loaded in another precision than they are stored in:
    a warning where they are rounded."""
    stored = stored_dtype(folder)
    if stored in (None, dtype):
        return
    log = structlog.get_logger()
    if dtype in EXACT_IN.get(stored, {stored}):
        log.info("weights are widened", stored=stored, model_dtype=dtype, folder=str(folder))
    else:
        log.warning(
            "WEIGHTS ARE ROUNDED: the policy does not begin as the folder has it",
            stored=stored,
            model_dtype=dtype,
            folder=str(folder),
            mend=f'model.dtype = "{stored}"' if stored in ("float32", "bfloat16") else "",
        )
