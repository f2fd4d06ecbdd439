"""Writes steps 3 and 4 of one line and step 4 of the next with the trackers' real packages, as the
aggregator does: `python -m tests.services.aggregator.mirrors.tracker_run FOLDER`.
"""

import sys
from pathlib import Path

from services.aggregator.mirrors.trackers import Trackio, Wandb
from services.aggregator.mirrors.types import Mirror, StepValues

STEPS = [
    StepValues(step=step, at_s=0.0, values={"loss": step / 2, "rewards/exact": 1.0})
    for step in (3, 4)
]


def main() -> None:
    folder, config = Path(sys.argv[1]), {"run": "demo"}
    mirrors: list[Mirror] = [
        Wandb("team/grpo", run="demo", folder=folder / "wandb", config=config),
        Trackio("grpo", run="demo", config=config),
    ]
    for mirror in mirrors:
        mirror.open(began=1, step=3)
        mirror.write(STEPS)
        mirror.open(began=2, step=4)
        mirror.write(STEPS[1:])
        mirror.close()


if __name__ == "__main__":
    main()
