from pathlib import Path

import pytest
import torch

from services.common.errors import UserError
from services.trainer import device
from services.trainer.device import choose_device, nvidia_device


def test_what_says_that_a_gpu_was_given(tmp_path: Path) -> None:
    def found(**environ: str) -> str | None:
        return nvidia_device(devices=tmp_path, environ=environ)

    assert found() is None
    for value in ("", "void", "none", "all"):
        assert found(NVIDIA_VISIBLE_DEVICES=value) is None
    assert found(NVIDIA_VISIBLE_DEVICES="0,1") == "NVIDIA_VISIBLE_DEVICES=0,1"
    assert found(NVIDIA_VISIBLE_DEVICES="GPU-5a") == "NVIDIA_VISIBLE_DEVICES=GPU-5a"
    (tmp_path / "nvidiactl").touch()
    assert found() is None
    (tmp_path / "nvidia0").touch()
    assert found() == str(tmp_path / "nvidia0")
    assert found(CUDA_VISIBLE_DEVICES="0") == str(tmp_path / "nvidia0")
    assert found(CUDA_VISIBLE_DEVICES="") is None
    assert found(CUDA_VISIBLE_DEVICES="-1") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines whose torch sees no GPU")
def test_a_gpu_that_torch_cannot_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for wanted in ("auto", "cuda"):
        with pytest.raises(UserError, match=r"torch cannot use \(.*set it to \"cpu\" to run"):
            choose_device(wanted)
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="no GPU is there"):
        choose_device("cuda")


@pytest.mark.skipif(torch.version.cuda is not None, reason="of builds of torch for the CPU")
def test_a_build_for_the_cpu_is_named() -> None:
    assert device.why_unusable() == f"torch {torch.__version__} is a build without CUDA"
