"""The sum over producers of each one's last value (sum_last), window by window."""

from collections.abc import Mapping

import numpy as np

from services.aggregator.groups import Groups
from services.aggregator.windows import Windows

LIVE_S = 15.0
"""A producer whose last observation is older than this, beside the newest one, is not alive:
sum_last leaves it out.
"""

Lasts = dict[str, tuple[float, float]]
"""By producer, when its last value was observed, and that value."""


def sums_of_lasts(found: Windows, lasts: Lasts, names: Mapping[int, str]) -> list[float | None]:
    """Of each window, each live producer's last, added up; None before the first. `lasts` is
    carried from window to window: replicas flush out of step. `names` are those of producers, by
    source.
    """
    rows = found.sources
    at = found.grouped(rows).at
    order = np.lexsort((rows.source, at))
    rows, at = rows.take(order), at[order]
    begins = (np.diff(at, prepend=-1) != 0) | (np.diff(rows.source, prepend=-1) != 0)
    newest = Groups(rows, np.cumsum(begins) - 1, int(np.count_nonzero(begins))).lasts().rows
    observed = zip(
        found.grouped(newest).at.tolist(),
        newest.source.tolist(),
        newest.columns["last_at_s"].tolist(),
        newest.columns["last"].tolist(),
        strict=True,
    )
    following = next(observed, None)
    sums: list[float | None] = []
    for number in range(len(found.numbers)):
        while following is not None and following[0] == number:
            _, source_id, at_s, last = following
            held = lasts.get(names[source_id])
            if held is None or at_s >= held[0]:
                lasts[names[source_id]] = (at_s, last)
            following = next(observed, None)
        newest_s = max((at_s for at_s, _ in lasts.values()), default=0.0)
        live = [last for at_s, last in lasts.values() if newest_s - at_s <= LIVE_S]
        sums.append(sum(live) if live else None)
    return sums
