"""Samples through the rollout queue: one hop, the whole way, and two baselines on the same server.

    python benchmarks/queue.py [--quick] [--rounds 3] [--scale 1.0]

Prints a table and writes benchmarks/results/queue.json; queue_run.py has what is measured and how.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType


def of_the_standard_library() -> ModuleType:
    """The module `queue` that this file hides from whatever is run in this folder."""
    path = Path(sysconfig.get_path("stdlib")) / "queue.py"
    spec = importlib.util.spec_from_file_location("queue", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "queue":
    # `python benchmarks/any.py` has this folder first on its path, and multiprocessing, redis and
    # concurrent.futures import `queue`: they mean the other one.
    sys.modules["queue"] = of_the_standard_library()
elif __name__ == "__main__":
    import queue_run

    queue_run.main()
