"""How long each stage of a pipeline sleeps, by name, in one file that every process reads again and
again: a stage is slowed, or made faster, while the run goes on.

Sleeps, and not work: stages on one machine would compete for its cores, and one that is slow would
slow the others. Torch-free, since scorers read it.

    completion      mean seconds of a completion          completion/generator-1   of this one
    spread          sigma of its lognormal                 tail, tail_frac          every n-th lasts
    load            weights loaded, the engine paused                              so long
    tool/NAME, environment/NAME    a call                  judge, grader            a group
    scorer-1        a group, in this scorer alone          training, publish        a step
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

FILE = "VERDICT_SLEEPS"
"""Environment variable of a pipeline's processes: the file."""

PROCESS = "VERDICT_PROCESS"
"""Environment variable of a pipeline's processes: which one it is."""


def write(path: Path, seconds: Mapping[str, float]) -> None:
    """From now on these."""
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(seconds))
    fresh.rename(path)


def seconds(name: str, default: float = 0.0) -> float:
    """As the file of this process's pipeline says now."""
    found: dict[str, float] = json.loads(Path(os.environ[FILE]).read_text())
    return float(found.get(name, default))


def of_this_process(name: str, default: float = 0.0) -> float:
    """The same, of this process where the file tells it apart from its kind."""
    return seconds(f"{name}/{os.environ[PROCESS]}", seconds(name, default))
