"""What the launches of a run have cost: a run that is stopped and goes on counts them together."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """Of one launch, or of several."""

    wall_s: float = 0.0
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Of each process."""

    def __add__(self, other: "Cost") -> "Cost":
        names = {*self.restarts, *other.restarts}
        both = Counter(self.restarts) + Counter(other.restarts)
        return Cost(self.wall_s + other.wall_s, {name: both[name] for name in sorted(names)})


def read(path: Path) -> Cost:
    """What was written last; nothing for a first launch."""
    if not path.exists():
        return Cost()
    found = json.loads(path.read_text())
    return Cost(found["wall_s"], found["restarts"])


def write(cost: Cost, path: Path) -> None:
    """Write by a rename, so that a killed launcher leaves what was there."""
    temporary = path.with_suffix(".tmp")
    text = json.dumps({"wall_s": round(cost.wall_s, 1), "restarts": dict(cost.restarts)})
    temporary.write_text(text + "\n")
    temporary.rename(path)
