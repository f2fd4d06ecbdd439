"""When a reward is reached, for benchmarks/endtoend.py. Pure."""

from collections.abc import Mapping

SMOOTHED_STEPS = 8
"""A reward is reached when the mean over so many steps is: one step alone differs by chance."""


def reached_step(rewards: Mapping[int, float], *, level: float) -> int | None:
    """The first step at which the mean reward of SMOOTHED_STEPS steps in a row, it being the last,
    is at least `level`; None where there is none.

    Example: where `level` is first met by the mean of steps 3 to 10, it is reached at step 10.
    """
    for step in sorted(rewards):
        window = [rewards.get(each) for each in range(step - SMOOTHED_STEPS + 1, step + 1)]
        values = [value for value in window if value is not None]
        if len(values) == SMOOTHED_STEPS and sum(values) / SMOOTHED_STEPS >= level:
            return step
    return None
