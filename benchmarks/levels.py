"""When a reward is reached, for benchmarks/endtoend.py. Pure."""

from collections.abc import Mapping

SMOOTHED_STEPS = 8
"""A reward is reached when the mean over so many steps is: one step alone differs by chance."""


def reached_step(means: Mapping[int, float], *, level: float) -> int | None:
    """The first step at which the mean reward is at least `level`; None where there is none.

    means: by step, over all conversations that were scored in the SMOOTHED_STEPS steps of which it
    is the last. Not a mean of steps: where conversations take long they are scored in bursts, in
    one step a thousand and in the next none.

    Example: where it is first met by the conversations of steps 3 to 10, it is reached at step 10.
    """
    return next(
        (step for step in sorted(means) if step >= SMOOTHED_STEPS and means[step] >= level), None
    )
