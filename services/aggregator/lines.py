"""The surviving line of a run: which attempt each optimizer step belongs to.

An attempt resumes from a checkpoint, so steps that an earlier attempt made after it are made again.
Step x belongs to the latest attempt that had begun by x; by step a query answers the owner, by time
all attempts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, false, or_

from services.aggregator.schema import partials


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps `first` <= step < `end` of one attempt; `end` is None for the latest attempt."""

    attempt: int
    first: int
    end: int | None

    def holds(self, attempt: int, step: int) -> bool:
        """Whether this step of this attempt is on the line."""
        if attempt != self.attempt or step < self.first:
            return False
        return self.end is None or step < self.end


def surviving(first_steps: Mapping[int, int]) -> tuple[Segment, ...]:
    """The line, latest attempt first, from the first step of each attempt.

    Example: attempt 1 began at step 0 and attempt 2 at step 40: steps 0 to 39 are attempt 1's,
    those from 40 on attempt 2's, also where attempt 1 had come as far as 50.
    """
    segments: list[Segment] = []
    end: int | None = None
    for attempt in sorted(first_steps, reverse=True):
        first = first_steps[attempt]
        if end is None or first < end:
            segments.append(Segment(attempt, first, end))
            end = first
    return tuple(segments)


def on_line(line: tuple[Segment, ...]) -> ColumnElement[bool]:
    """The condition that a row of `partials` is on the line."""
    steps, attempts = partials.c.step, partials.c.attempt
    return or_(
        false(),
        *(
            and_(
                attempts == segment.attempt,
                steps >= segment.first,
                *(() if segment.end is None else (steps < segment.end,)),
            )
            for segment in line
        ),
    )
