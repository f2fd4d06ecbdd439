"""What flat means for benchmarks/soak.py: memory over the lives of processes, streams, a ledger.

Pure: it looks at nothing but what it is given.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SETTLED_AFTER_S = 600.0
"""A process is not looked at before: it starts, compiles, fills caches; the engine touches its
whole KV cache, and malloc finds its level over the first hundred loads of weights."""


@dataclass
class Memory:
    """Memory of one kind of processes over the soak, each life of a process for itself."""

    lives: dict[tuple[int, float], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By process id and start: seconds of the soak, MiB."""

    def growth(self) -> tuple[float, float, float] | None:
        """MiB an hour, half the width of its 95 % interval, and the median in MiB; None where no
        life was long enough.

        One slope is fitted to all lives, each with a level of its own: a new process begins lower.
        """
        times: list[float] = []
        sizes: list[float] = []
        values: list[float] = []
        degrees = 0
        for points in self.lives.values():
            began_s = points[0][0]
            kept = [(t, v) for t, v in points if t - began_s >= SETTLED_AFTER_S]
            if len(kept) < 3:
                continue
            middle_t, middle_v = (sum(column) / len(kept) for column in zip(*kept, strict=True))
            times += [t - middle_t for t, _ in kept]
            sizes += [v - middle_v for _, v in kept]
            values += [v for _, v in kept]
            degrees += len(kept) - 1
        squares = sum(t * t for t in times)
        if degrees < 2 or not squares:
            return None
        slope = sum(t * v for t, v in zip(times, sizes, strict=True)) / squares
        rest = sum((v - slope * t) ** 2 for t, v in zip(times, sizes, strict=True))
        error = math.sqrt(rest / (degrees - 1) / squares)
        return slope * 3600, 1.96 * error * 3600, statistics.median(values)


def of_halves(points: Sequence[Mapping[str, float]], name: str) -> tuple[float, float, float]:
    """Mean of the first and of the second half of the looks, and the greatest."""
    values = [point[name] for point in points]
    half = max(1, len(values) // 2)
    first, second = values[:half], values[half:] or values[-1:]
    return sum(first) / len(first), sum(second) / len(second), max(values)


def balanced(groups: Mapping[str, Any]) -> bool:
    """dispatched = trained + rolled back + dropped + given up, nothing in flight, nothing twice."""
    settled = groups["trained"] + groups["rolled_back"] + groups["given_up"]
    settled += sum(groups["dropped"].values())
    rest = groups["in_flight"], groups["trained_twice"]
    return bool(groups["dispatched"] == settled and rest == (0, 0))
