"""The three instruments, and the reductions that each allows: what producers, the recipe and the
aggregator agree on."""

from typing import Literal

Instrument = Literal["count", "observation", "ratio"]
"""What a producer sends."""

Reduction = Literal[
    "sum", "rate", "mean", "min", "max", "p50", "p95", "p99", "last", "sum_last", "ratio"
]
"""What a query answers. `rate` is per second of the window; `sum_last` adds up each live producer's
last.
"""

REDUCTIONS: dict[Instrument, tuple[Reduction, ...]] = {
    "count": ("sum", "rate"),
    "observation": ("mean", "min", "max", "p50", "p95", "p99", "last", "sum_last"),
    "ratio": ("ratio",),
}
"""By instrument, what it allows; the first is the default where none is declared."""
