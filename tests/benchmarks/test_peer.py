"""What TRL is measured with in place of FlashAttention says the same."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_samples_of_a_row_see_what_they_see_alone() -> None:
    paths = [str(Path(sys.prefix) / "trl"), str(ROOT / "benchmarks"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("peer_attention.py"))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-5
