"""The wrong clock of one process."""

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos import clock
from tests.chaos.keeper import ROOT

PROBE = """
import json, sys, time
print(json.dumps([sys.argv[1:], __name__, time.time(), time.time_ns() / 1e9]))
"""


def test_a_module_runs_with_its_arguments_and_another_time(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    argv = clock.command((sys.executable, "-m", "probe", "--set", "a=b"), -1000)
    begin_s = time.time()
    path = f"{ROOT}:{tmp_path}"
    shown = subprocess.check_output(argv, cwd=tmp_path, env={"PYTHONPATH": path}, text=True)
    arguments, name, now_s, now_ns_s = json.loads(shown)
    assert (arguments, name) == (["--set", "a=b"], "__main__")
    for now in (now_s, now_ns_s):
        assert begin_s - 1001 <= now <= time.time() - 999


def test_a_clock_can_be_set_again() -> None:
    first = clock.command(("python", "-m", "m", "x"), 5)
    assert first == ("python", "-m", "tests.chaos.clock", "+5", "m", "x")
    assert clock.command(first, -5) == ("python", "-m", "tests.chaos.clock", "-5", "m", "x")
