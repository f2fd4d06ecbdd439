"""What the process has to say before vLLM is imported."""

import os
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path

import structlog

GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""Device files that a machine with a GPU has (NVIDIA, AMD)."""

CXX = "clang++" if sys.platform == "darwin" else "g++"
"""The compiler that torch runs on CPUs where $CXX names no other."""


def prepare(*, enforce_eager: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Turn torch.compile off where there is no GPU and it gains nothing or cannot work.

    An eager engine compiles one small function of its sampler all the same, at the first request.
    On CPUs that takes 5 to 25 s and makes nothing faster, and without a C++ compiler the engine
    dies of it. A variable that the user has set stays as it is.
    """
    if "TORCHDYNAMO_DISABLE" in environ or any(path.exists() for path in GPU_DRIVERS):
        return
    compiler = environ.get("CXX", CXX)
    missing = shutil.which(compiler, path=environ.get("PATH", os.defpath)) is None
    if not enforce_eager and not missing:
        return
    environ["TORCHDYNAMO_DISABLE"] = "1"
    structlog.get_logger().info(
        "torch.compile is off",
        why=f"no C++ compiler ({compiler})" if missing else "an eager engine on CPUs gains nothing",
    )
