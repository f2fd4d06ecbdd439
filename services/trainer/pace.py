"""Pace by age: until when each group may wait, and so which of them may have a seat of the open
step.

Short groups overtake long ones. With only their number bounded, the long ones come too late and are
dropped, again and again: what is trained on becomes short. So a step keeps seats for the groups
that could not be admitted any more once it and the steps after it were filled with others.

Pure: knows no queue and no clock.
"""

from collections import deque
from collections.abc import Collection, Mapping

from services.trainer.intake import Policy


def began_of(places: Mapping[str, str]) -> dict[str, int]:
    """The version that was served when each group began, from the server's list of outstanding
    groups; those that nobody has begun are absent: they do not age.

    Example: `{"0.3.1.0": "groups:generator-0-1f:1|7|"}` gives `{"0.3.1.0": 7}`.
    """
    found = {}
    for group_id, place in places.items():
        _, began, _ = place.split("|")
        if began.isdecimal() and int(began) > 0:
            found[group_id] = int(began)
    return found


def last_step(began: int | None, *, policy: Policy, weight_sync_steps: int) -> int | None:
    """The last step that can admit a group that began at this version: 1 is the open one, below it
    is too late. Of a group whose version is not known yet, as if it began now; None for a version
    of no line that goes on.

    Example: max_staleness 2, a version a step, version 7 is current: a group of version 7 can be
    admitted by this step and two more (3), one of version 5 by this one only (1), and one of
    version 4 is stale (0).
    """
    if began is not None and began not in policy.step_of:
        return None
    age = 0 if began is None else policy.staleness(began)
    steps_behind = policy.step - policy.step_of[policy.version]
    until_publish = max(1, weight_sync_steps - steps_behind)
    return until_publish + (policy.max_staleness - age) * weight_sync_steps


def may_sit(
    last: int | None, waited_for: Collection[int], *, seats: int, groups_per_step: int
) -> bool:
    """Whether a group may have one of the `seats` that the open step has left. `waited_for` are the
    last steps of all other groups that can still be in time.

    It may, when those that must be admitted before it still find room: in the seats that are then
    left, and in the steps between.

    Example: one seat is left, and a group is under way whose last step is this one: only a group
    that is as urgent may sit. Were its last step the next one (with 4 groups a step), anybody may.
    """
    if last is None:
        return True
    return all(
        sum(each <= step for each in waited_for) <= seats - 1 + groups_per_step * (step - 1)
        for step in {each for each in waited_for if 0 < each < last}
    )


class LagAtBegin:
    """How many versions before the one of its dispatch groups begin with, of late.

    Prompts are dispatched when a step is done, which is when a version has just been published:
    generators that have room begin them before they have loaded it.
    """

    def __init__(self, groups_per_step: int) -> None:
        self._places: dict[str, int] = {}
        """In the line, of the version at dispatch, of groups not seen to have begun."""
        self._lags: deque[int] = deque(maxlen=4 * groups_per_step)
        self.usual = 0
        """Of the last groups, four of five had no more; 0 before there are some."""

    def dispatched(self, group_id: str, *, at: Policy) -> None:
        """A group is dispatched now."""
        self._places[group_id] = at.place(at.version)

    def seen(self, began: Mapping[str, int], *, outstanding: Collection[str], at: Policy) -> None:
        """The versions with which groups have begun, those of before too; groups that are not
        `outstanding` any more are forgotten."""
        for group_id in self._places.keys() & began.keys():
            place = self._places.pop(group_id)
            if began[group_id] in at.step_of:
                self._lags.append(max(0, place - at.place(began[group_id])))
        for group_id in self._places.keys() - set(outstanding):
            del self._places[group_id]
        if self._lags:
            self.usual = sorted(self._lags)[len(self._lags) * 4 // 5]
