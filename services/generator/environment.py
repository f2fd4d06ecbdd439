"""What the process needs to say before vLLM is imported."""

import os
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path

import structlog

NVIDIA, AMD = Path("/dev/nvidiactl"), Path("/dev/kfd")
"""Device files of GPU drivers."""

CXX = "clang++" if sys.platform == "darwin" else "g++"
"""The one that torch's compiler for CPUs runs where $CXX names no other."""


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Turn torch's compiler off on a machine that has neither a GPU nor a C++ compiler.

    vLLM compiles a function of its sampler at the first request, eager engine or not, and its
    worker dies there when there is no compiler. What the user has set stays.
    """
    if "TORCHDYNAMO_DISABLE" in environ or NVIDIA.exists() or AMD.exists():
        return
    compiler = environ.get("CXX", CXX)
    if shutil.which(compiler, path=environ.get("PATH", os.defpath)) is None:
        environ["TORCHDYNAMO_DISABLE"] = "1"
        structlog.get_logger().info("torch.compile is off: no C++ compiler", looked_for=compiler)
