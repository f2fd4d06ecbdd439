"""The recipe's `[traces]`: which conversations are kept to be looked at, and how many.

Torch-free and import-cheap, as all of the recipe.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from services.common.section import Section

MAX_TRACE_BYTES = 8 << 20
"""No trace is larger, whatever a recipe says: the aggregator refuses it."""


class Traces(Section):
    """Conversations that are kept whole, to be read on the page."""

    per_version: Annotated[int, Field(ge=0, le=256)] = 8
    """Conversations traced of a policy version, at most; 0 traces none."""
    every_versions: Annotated[int, Field(ge=1)] = 1
    """Only versions that are a multiple of it are traced."""
    max_bytes: Annotated[int, Field(ge=4096, le=MAX_TRACE_BYTES)] = 512 << 10
    """Largest trace; a conversation that would need more is not traced, and counted."""
    keep: Annotated[int, Field(ge=1, le=100_000)] = 2000
    """Traces that the aggregator keeps of a run: the newest."""
    keep_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Bytes that it keeps of them, compressed."""

    def mistakes(self, *, max_message_bytes: int) -> Iterator[str]:
        """What is wrong between keys, one line each."""
        if self.per_version and self.max_bytes > max_message_bytes // 2:
            yield (
                f"traces.max_bytes: {self.max_bytes} is more than half of "
                f"network.max_message_bytes ({max_message_bytes}); a batch of metrics must have "
                "room for one trace and for the metrics"
            )
        if self.keep_bytes < self.max_bytes:
            yield (
                f"traces.keep_bytes: {self.keep_bytes} is below traces.max_bytes "
                f"({self.max_bytes}); the largest trace would never be kept"
            )
