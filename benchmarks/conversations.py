"""What endless tools cost those who do not call them.

`python benchmarks/conversations.py` runs 1,000 conversations in 64 slots twice, in turns: a tenth
with failing tools, a twentieth with failing environments, and a twentieth with tools that never
return; then the same without the endless ones, ordinary ones in their place. The engine is the test
suite's, which answers after a set time: what is measured is all around it. It prints a table and
writes benchmarks/results/conversations.json.
"""

import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

import structlog

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.services.generator import load  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "conversations.json"
ROUNDS, GROUPS = 3, 200


def measure(*, endless: bool) -> load.Outcome:
    """One load."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(load.run(Path(folder), chosen=load.kinds(GROUPS, endless=endless)))


def main() -> None:
    """Measure both in turns, print the table, write the result."""
    # What fails is meant to.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    walls: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for endless in (True, False):
            outcome = measure(endless=endless)
            walls[endless].append(outcome.wall_s)
            print(
                f"{'with' if endless else 'without'} endless tools: {outcome.wall_s:6.2f} s, "
                f"{outcome.finished} finished, {outcome.failed.total()} failed, "
                f"{outcome.processes} processes for tools",
                flush=True,
            )
    with_s, without_s = (statistics.median(walls[endless]) for endless in (True, False))
    print(
        f"median {with_s:.2f} s with, {without_s:.2f} s without: {with_s / without_s:.2f} times "
        "as long"
    )
    RESULT.parent.mkdir(exist_ok=True)
    result = {
        "num_conversations": GROUPS * load.GENERATIONS,
        "slots": load.SLOTS,
        "turn_s": load.TURN_S,
        "tool_timeout_s": load.TIMEOUT_S,
        "with_endless_s": walls[True],
        "without_endless_s": walls[False],
        "ratio": with_s / without_s,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
