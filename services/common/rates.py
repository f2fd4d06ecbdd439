"""How often a peer may call: a token bucket for each, with bounded memory.

A bucket holds one second's worth, at least one call. It is kept as one time: when it will be full
again (the "generic cell rate algorithm"), so what is full already need not be kept at all.
"""

import time
from collections.abc import Callable

MAX_PEERS = 10_000
"""Buckets kept at a time; beyond them those made first are forgotten, and so full again."""


class Rates:
    """Buckets of peers. Use from one thread.

    Example: Rates(2.0) lets a peer call twice at once, then once every half a second; the third
    call within the same instant is told to wait 0.5 s.
    """

    def __init__(
        self,
        per_s: float,
        *,
        max_peers: int = MAX_PEERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = 1 / per_s
        self._capacity_s = max(1.0, self._interval_s)
        self._max_peers = max_peers
        self._clock = clock
        self._full_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._full_s)

    def take(self, peer: str) -> float:
        """Count a call: 0.0 when the peer may make it, else the seconds until it may, and the call
        does not count."""
        now_s = self._clock()
        full_s = max(now_s, self._full_s.get(peer, now_s)) + self._interval_s
        # The tolerance is for rounding: 1,000 additions of 0.001 s are a little more than 1 s.
        excess_s = full_s - now_s - self._capacity_s
        if excess_s > 1e-9 * max(1.0, now_s):
            return excess_s
        if peer not in self._full_s and len(self._full_s) >= self._max_peers:
            self._forget(now_s)
        self._full_s[peer] = full_s
        return 0.0

    def _forget(self, now_s: float) -> None:
        self._full_s = {peer: full_s for peer, full_s in self._full_s.items() if full_s > now_s}
        # Some more than one, so that not every new peer costs a look at all.
        excess = len(self._full_s) - self._max_peers * 9 // 10
        for peer in list(self._full_s)[: max(0, excess)]:
            del self._full_s[peer]
