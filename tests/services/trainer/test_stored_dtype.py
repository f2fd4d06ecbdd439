from pathlib import Path

import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from services.trainer.stored_dtype import say_dtype, stored_dtype


def write(folder: Path, file: str, **tensors: torch.Tensor) -> None:
    save_file(tensors, folder / file)


def test_the_dtype_of_most_weights_counts(tmp_path: Path) -> None:
    assert stored_dtype(tmp_path) is None
    write(tmp_path, "model-1.safetensors", matrix=torch.zeros(8, 8, dtype=torch.bfloat16))
    write(
        tmp_path,
        "model-2.safetensors",
        norm=torch.ones(8),
        norm_2=torch.ones(8),
        ids=torch.zeros(999, dtype=torch.int64),
    )
    assert stored_dtype(tmp_path) == "bfloat16"


def test_rounded_weights_are_said_aloud(tmp_path: Path) -> None:
    def levels(dtype: str) -> list[str]:
        with capture_logs() as logs:
            say_dtype(tmp_path, dtype)
        return [log["log_level"] for log in logs]

    assert levels("float32") == []
    write(tmp_path, "model.safetensors", matrix=torch.zeros(8, 8))
    assert (levels("float32"), levels("bfloat16")) == ([], ["warning"])
    write(tmp_path, "model.safetensors", matrix=torch.zeros(8, 8, dtype=torch.bfloat16))
    assert (levels("float32"), levels("bfloat16")) == (["info"], [])
    write(tmp_path, "model.safetensors", matrix=torch.zeros(8, 8, dtype=torch.float16))
    assert (levels("float32"), levels("bfloat16")) == (["info"], ["warning"])
