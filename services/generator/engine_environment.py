"""What vLLM's worker processes are to find in their environment."""

import json
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

LARGE_PAGES = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
"""Have malloc ask for transparent huge pages. A load takes memory for a layer and gives it back
again and again: to have it in pages of 4 KiB is half of its time on a CPU. To keep it instead
(M_TRIM_THRESHOLD) is as fast, but took another 1.2 times the model's size."""

FEW_PRIMITIVES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
"""oneDNN keeps a kernel for each shape of a multiplication, and their shapes change with the number
of tokens in a batch: with its 1,024 the memory of an engine grows for an hour, by 130 MB for the
smallest model. Each layer keeps its own last kernels besides."""

SMALL_VOCABULARY = 2048
"""Up to here compilation gains less than a twentieth of a sampled token's time."""


def prepare(
    *,
    enforce_eager: bool,
    vocab_size: int | None,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """On a machine without a GPU: have large pages, keep few kernels in memory, and turn
    torch.compile off where it cannot work or is not worth its time. Call it before an engine is
    started.

    An eager engine compiles one function of its sampler all the same, at the first request: without
    a C++ compiler it dies there. Compilation takes 5 to 25 s, and makes that function ten times as
    fast: 0.1 instead of 1.2 ms a token with a vocabulary of 150,000, and nothing that can be
    measured with one of 100. A variable that the user has set stays as it is.
    """
    if any(path.exists() for path in GPU_DRIVERS):
        return
    for name, value in (LARGE_PAGES, FEW_PRIMITIVES):
        environ.setdefault(name, value)
    if "TORCHDYNAMO_DISABLE" in environ:
        return
    compiler = environ.get("CXX", CXX)
    if shutil.which(compiler, path=environ.get("PATH", os.defpath)) is None:
        why = f"no C++ compiler ({compiler})"
    elif enforce_eager and vocab_size is not None and vocab_size <= SMALL_VOCABULARY:
        why = f"not worth its time for a vocabulary of {vocab_size}"
    else:
        return
    environ["TORCHDYNAMO_DISABLE"] = "1"
    structlog.get_logger().info("torch.compile is off", why=why)


def vocab_size(folder: Path) -> int | None:
    """What a model folder's config.json says, or None."""
    found = json.loads((folder / "config.json").read_text()).get("vocab_size")
    return found if isinstance(found, int) else None
