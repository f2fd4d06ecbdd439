"""How many generators and scorers a run should have, as pure functions of what was measured.

Generators are producers. A backlog of their groups means that there are too many of them, and the
trainer's wait alone swings between too few and too many: so neither is the signal. What one replica
makes, beside what the trainer could take, gives a number that is the same whatever number is
running, and that does not move while replicas start.

Scorers are consumers: what waits for them and what they hold, over what one of them takes at once.
"""

import math
from dataclasses import dataclass
from functools import partial

from services.aggregator.rules import RULES, Evidence, find
from services.aggregator.verdict import MIN_STEPS
from services.aggregator.window import Window, all_shares
from services.aggregator.wording import percent, seconds

AIM_WAIT_SHARE = 0.05
"""Of a step, that the trainer may still wait with the number aimed at. Half of what makes the
number rise (10 %), so that noise between the two changes nothing."""

MAX_GROWTH = 2.0
"""Times the replicas that produced in the window: a first estimate may be far off."""

CALM_WAIT_SHARE = 0.02
"""Of the calm time, that the trainer may have waited for one replica to be one too many."""

SPARE_REPLICAS = 1.25
"""Replicas' worth of slots that must have been free for want of requests, before one goes."""

CALM_COVERED = 0.9
"""Of the calm time, that must have been spent in steps of known length."""

QUIET_S, QUIET_STEPS = 60.0, 3.0
"""Seconds, and times the longest step, without a step: then the window tells of another time, such
as that before the trainer was restarted."""

SCORER_IDLE = 2.0
"""Scorers go only where what is left would hold this many times the work."""

GENERATION_BOUND = next(rule for rule in RULES if rule.name == "generation-bound")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The replicas of a service."""

    live: int
    """Heard of lately."""
    unchanged_s: float
    """Seconds since one of them came or went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calm:
    """A longer time, over which one replica too many can be told."""

    wanted_s: float
    """How long it should be."""
    steps_s: float
    """Seconds of the steps in it."""
    wait_s: float
    """Of these, the trainer's wait on an empty queue."""
    slots_starved_frac: float | None
    """Slots free while no request waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generators:
    """How many generators there should be, and why."""

    replicas: int
    reason: str
    producing: float | None = None
    """Replicas that produced, on the average of the window."""
    needed_groups_per_s: float | None = None
    """What the trainer would take if it never waited on an empty queue."""
    produced_groups_per_s: float | None = None
    evidence: tuple[Evidence, ...] = ()
    """The conditions for more, with what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """How many scorers there should be, and why."""

    replicas: int
    reason: str


def generators(
    window: Window,
    fleet: Fleet,
    *,
    replica_s: float,
    quiet_s: float,
    calm: Calm | None,
    over: bool,
) -> Generators:
    """How many generators a run should have.

    More, where generation holds the run back by the verdict's own conditions (the trainer waits
    10 % of the time or more, slots are busy 80 % of it or more, less than a step's groups wait
    anywhere): the fewest with which the trainer would wait less than AIM_WAIT_SHARE, at most twice
    those that produced, and no more than requests wait for, which pacing bounds. One fewer, where
    nothing changed and hardly anything was waited for in the calm time. None, where the run is
    `over`. Else those that are live, and at least one.

    `replica_s` are seconds of producing replicas in the window, `quiet_s` those since its last step
    ended; `calm` is None where that time is not to be looked at.

    Example: 2 replicas; steps of 32 groups take 10 s, 6 of them waited, and 32 groups are made in
    that time. The trainer could take 32 / 4 = 8 groups/s and gets 3.2: 2 x 8 / 3.2 = 5 replicas,
    4.75 with 5 % of waiting, so 5 are enough; from 2, it is 4 at first.
    """
    live = max(1, fleet.live)
    if over:
        return Generators(replicas=0, reason="the run is over: no group is under way or wanted")
    if len(window.steps) < MIN_STEPS:
        known = f"{len(window.steps)} steps of known length, {MIN_STEPS} are needed"
        return Generators(replicas=live, reason=f"held: there are {known}")
    longest_s = max(step.step_s for step in window.steps)
    if quiet_s > QUIET_S + QUIET_STEPS * longest_s:
        return Generators(replicas=live, reason=f"held: the last step ended {quiet_s:.0f} s ago")
    # Of all steps together, not of the median one: groups come in bursts, and a wait in every third
    # step is a wait. What an evaluation or a checkpoint takes makes both numbers smaller: held.
    wait_share = _wait_share(window)
    finding = find(
        GENERATION_BOUND, {**all_shares(window.steps), "rollout_wait_s": wait_share}, window
    )
    needed, produced, producing = _rates(window, replica_s, wait_share)
    answer = partial(
        Generators,
        producing=producing,
        needed_groups_per_s=needed,
        produced_groups_per_s=produced,
        evidence=finding.evidence,
    )
    if finding.holds and needed and produced and producing:
        wanted = producing * needed / produced
        # Less than a thousandth of a replica is arithmetic.
        enough = math.ceil(wanted * (1 - AIM_WAIT_SHARE) - 1e-3)
        most = min(producing * MAX_GROWTH, _with_work(window, producing))
        replicas = max(live, min(enough, math.ceil(most - 1e-3)))
        reason = (
            f"the trainer waits {percent(wait_share)} of the time: it could take "
            f"{seconds(needed)} groups/s, and {producing:.1f} replicas made {seconds(produced)}; "
            f"{enough} are enough, and now at most {most:.1f} sensible"
        )
        return answer(replicas=replicas, reason=reason)
    if finding.holds is None or finding.holds:
        lacking = ", ".join(finding.missing) or "count of groups made"
        return answer(replicas=live, reason=f"held: there is no {lacking}")
    if calm is not None and _one_too_many(calm, fleet):
        reason = (
            f"in {calm.steps_s:.0f} s the trainer waited {percent(calm.wait_s / calm.steps_s)}, "
            f"and slots were free {percent(calm.slots_starved_frac)} of the time"
        )
        return answer(replicas=live - 1, reason=reason)
    against = next(each for each in map(_against, finding.evidence) if each is not None)
    return answer(replicas=live, reason=f"held: {against}")


def scorers(
    *, waiting: float, held: float, peak: float | None, live: int, max_groups: int, held_back: bool
) -> Scorers:
    """How many scorers a run should have.

    `waiting` groups wait for a scorer and `held` are with one, `peak` is the most of both lately,
    None where nobody looked; a scorer takes `max_groups` at once. `held_back`: the rollout queue is
    full, so that scored groups cannot go on: then more scorers would only hold more.

    What scorers hold counts, since it never exceeds what they can; what waits makes the number
    grow. Down it goes where half of what is left would hold the peak.

    Example: 8 a scorer, 20 waiting, 16 held by 2: 36 / 8, so 5. One waiting and none live: 1.
    """
    wanted = math.ceil((waiting + held) / max_groups)
    if held_back and wanted > live:
        return Scorers(
            replicas=max(live, 1), reason="held: the rollout queue is full, scored groups wait too"
        )
    if peak is None:
        reason = "held: the trainer, which looks at the queue, has not reported lately"
        return Scorers(replicas=max(wanted, live), reason=reason)
    replicas = max(wanted, min(live, math.ceil(SCORER_IDLE * peak / max_groups)))
    reason = (
        f"{waiting:g} groups wait and {held:g} are held, lately {peak:g} at most; a scorer takes "
        f"{max_groups}"
    )
    return Scorers(replicas=replicas, reason=reason)


def _wait_share(window: Window) -> float | None:
    """Of the steps that have it, the trainer's wait; None when fewer than half have."""
    known = [step for step in window.steps if step.rollout_wait_s is not None]
    if 2 * len(known) < len(window.steps):
        return None
    wait_s = math.fsum(step.rollout_wait_s or 0.0 for step in known)
    return min(1.0, max(0.0, wait_s / math.fsum(step.step_s for step in known)))


def _rates(
    window: Window, replica_s: float, wait_share: float | None
) -> tuple[float | None, float | None, float | None]:
    """Groups a second that are needed and produced, and the replicas that produced."""
    window_s = math.fsum(step.step_s for step in window.steps)
    needed = None
    if wait_share is not None and window.groups_per_step:
        taken_per_s = len(window.steps) * window.groups_per_step / window_s
        # Never all of it: the parts of a step are timed apart from the whole.
        needed = taken_per_s / max(1.0 - wait_share, 1e-3)
    produced = window.groups_generated / window_s if window.groups_generated else None
    return needed, produced, replica_s / window_s if replica_s > 0 else None


def _with_work(window: Window, producing: float) -> float:
    """For how many replicas there is work, each with as much as one has now.

    Example: 2 replicas hold 16 groups and 8 requests wait: a third one would find work.
    """
    if window.requests_waiting is None or not window.requests_held:
        return math.inf
    return producing * (1 + window.requests_waiting / window.requests_held)


def _one_too_many(calm: Calm, fleet: Fleet) -> bool:
    return (
        fleet.live > 1
        and fleet.unchanged_s >= calm.wanted_s
        and calm.steps_s >= CALM_COVERED * calm.wanted_s
        and calm.wait_s < CALM_WAIT_SHARE * calm.steps_s
        and calm.slots_starved_frac is not None
        and calm.slots_starved_frac * fleet.live >= SPARE_REPLICAS
    )


def _against(evidence: Evidence) -> str | None:
    """What speaks against more: "perf/rollout_wait_s is 0.02 (share of a step), not >= 0.1"."""
    if evidence.holds or evidence.value is None or evidence.threshold is None:
        return None
    return (
        f"{evidence.key} is {evidence.value:.3g} ({evidence.measure}), not "
        f"{evidence.compare} {evidence.threshold:g}"
    )
