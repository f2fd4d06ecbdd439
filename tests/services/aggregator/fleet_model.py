"""A run and its autoscaler as a model, second by second: a trainer, generators that take time to
start, and an autoscaler that asks the rule and waits before it acts.
"""

import math
import operator
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.aggregator.scale import Calm, Fleet, Generators, generators
from services.aggregator.verdict import MIN_STEPS
from services.aggregator.window import Step, Window

WINDOW_S, CALM_S, POLL_S = 300, 3600, 30
UP_S, DOWN_S = 60, 300
"""Stabilisation: the autoscaler takes the least it was told for so long upwards, the most
downwards."""

TOLERANCE = 0.1
"""An autoscaler leaves a number alone that is so near."""

GROUPS_PER_STEP, STALENESS, SLOTS = 16, 4, 8


@dataclass
class Replica:
    """One generator: SLOTS groups at a time, each a list of the seconds that are left of it."""

    begun_s: int
    ready_s: int
    left: list[float] = field(default_factory=list)


class Sums(NamedTuple):
    """What was counted up to a second, in seconds of replicas and slots, and in groups."""

    replicas: int = 0
    busy: int = 0
    starved: int = 0
    taken: int = 0
    samples: int = 0
    requests: int = 0


@dataclass
class World:
    """`ratio` replicas make just what the trainer can take, which works `work_s` on a step.

    Of a saturated engine the groups share one rate, so that free slots tell nothing of how much it
    could still do; of any other each group goes on by itself.
    """

    ratio: float
    replicas: int = 1
    work_s: float = 20.0
    start_s: int = 90
    noise: float = 0.0
    saturated: bool = False
    seed: int = 0
    most: int = 50

    def __post_init__(self) -> None:
        self.now_s = 0
        self.wanted = self.replicas
        self.changes: list[tuple[int, int]] = []
        """(when, to how many) of the autoscaler."""
        self.answers: list[Generators] = []
        self.steps: list[tuple[int, Step]] = []
        """Each with the second it ended."""
        self._sums = [Sums()]
        self._random = random.Random(self.seed)
        self._fleet = [Replica(0, 0) for _ in range(self.replicas)]
        self._changed_s = 0
        self._requests = self._samples = self._outstanding = 0
        self._waited_s, self._begun_s = 0, 0
        self._works_until_s: float | None = None
        self._told: deque[tuple[int, int]] = deque()
        # So that `ratio` replicas make GROUPS_PER_STEP in work_s.
        self._group_s = SLOTS * self.ratio * self.work_s / GROUPS_PER_STEP

    def run(self, hours: float) -> None:
        """Let time go on."""
        for _ in range(round(hours * 3600)):
            self._second()
            self.now_s += 1
            if self.now_s % POLL_S == 0:
                self._scale()

    def waits(self, since_s: int) -> float:
        """The trainer's share of waiting in the steps that ended since then."""
        steps = [step for ended_s, step in self.steps if ended_s >= since_s]
        waited_s = sum(step.rollout_wait_s or 0.0 for step in steps)
        return waited_s / sum(step.step_s for step in steps)

    def _second(self) -> None:
        bound = (STALENESS + 1) * GROUPS_PER_STEP
        self._requests += bound - self._outstanding
        self._outstanding = bound
        busy = starved = taken = 0
        serving = [each for each in self._fleet if each.ready_s <= self.now_s]
        while self._requests and serving:
            least = min(serving, key=lambda each: len(each.left))
            if len(least.left) == SLOTS:
                break
            least.left.append(self._group_s * self._spread())
            self._requests -= 1
            taken += 1
        for replica in serving:
            busy += len(replica.left)
            starved += 0 if self._requests else SLOTS - len(replica.left)
            speed = SLOTS / len(replica.left) if self.saturated and replica.left else 1.0
            left = [each - speed for each in replica.left if each > speed]
            self._samples += len(replica.left) - len(left)
            replica.left = left
        self._train()
        now = (len(serving), busy, starved, taken, self._samples, self._requests)
        self._sums.append(Sums(*map(operator.add, self._sums[-1], now)))

    def _spread(self) -> float:
        """A group's length beside the mean: 1 on the average."""
        return math.exp(self._random.gauss(-(self.noise**2) / 2, self.noise))

    def _train(self) -> None:
        if self._works_until_s is not None and self.now_s >= self._works_until_s:
            step_s = self.now_s - self._begun_s
            step = Step(step=len(self.steps), step_s=step_s, rollout_wait_s=self._waited_s)
            self.steps.append((self.now_s, step))
            self._works_until_s, self._waited_s, self._begun_s = None, 0, self.now_s
            self._outstanding -= GROUPS_PER_STEP
        if self._works_until_s is None:
            if self._samples >= GROUPS_PER_STEP:
                self._samples -= GROUPS_PER_STEP
                self._works_until_s = self.now_s + self.work_s
            else:
                self._waited_s += 1

    def _window(self, since_s: int) -> tuple[Window, int]:
        """The steps that ended since then, and the seconds of replicas meanwhile."""
        recent = next(
            (n for n, (ended_s, _) in enumerate(reversed(self.steps)) if ended_s <= since_s),
            len(self.steps),
        )
        chosen = self.steps[-max(MIN_STEPS, recent) :]
        if not chosen:
            return Window(steps=()), 0
        first_s, last_s = round(chosen[0][0] - chosen[0][1].step_s), chosen[-1][0]
        between = Sums(*map(operator.sub, self._sums[last_s], self._sums[first_s]))
        slots = between.replicas * SLOTS
        window = Window(
            steps=tuple(step for _, step in chosen),
            groups_per_step=float(GROUPS_PER_STEP),
            requests_waiting=between.requests / (last_s - first_s),
            requests_held=between.busy / (last_s - first_s),
            groups_waiting=0.0,
            samples_waiting=between.samples / (last_s - first_s),
            slots_busy_frac=between.busy / slots,
            slots_starved_frac=between.starved / slots,
            groups_generated=float(between.taken),
        )
        return window, between.replicas

    def _ask(self) -> Generators:
        # A replica that has not served yet has reported nothing.
        live = [each for each in self._fleet if each.ready_s < self.now_s]
        ready_s = max((each.ready_s for each in live), default=self.now_s)
        fleet = Fleet(live=len(live), unchanged_s=self.now_s - max(ready_s, self._changed_s))
        window, replica_s = self._window(self.now_s - WINDOW_S)
        calm = None
        if fleet.live > 1 and fleet.unchanged_s >= CALM_S:
            longer, _ = self._window(self.now_s - CALM_S)
            calm = Calm(
                wanted_s=CALM_S,
                steps_s=sum(step.step_s for step in longer.steps),
                wait_s=sum(step.rollout_wait_s or 0.0 for step in longer.steps),
                slots_starved_frac=longer.slots_starved_frac,
            )
        return generators(
            window,
            fleet,
            replica_s=replica_s,
            quiet_s=self.now_s - self.steps[-1][0] if self.steps else 0.0,
            calm=calm,
            over=False,
        )

    def _scale(self) -> None:
        answer = self._ask()
        self.answers.append(answer)
        wanted = min(answer.replicas, self.most)
        if abs(1 - wanted / self.wanted) <= TOLERANCE:
            wanted = self.wanted
        self._told.append((self.now_s, wanted))
        while self._told[0][0] <= self.now_s - DOWN_S:
            self._told.popleft()
        lately = [number for at_s, number in self._told if at_s > self.now_s - UP_S]
        up, down = min(lately), max(number for _, number in self._told)
        self._become(up if up > self.wanted else down if down < self.wanted else self.wanted)

    def _become(self, number: int) -> None:
        if number == self.wanted:
            return
        self.changes.append((self.now_s, number))
        while len(self._fleet) > number:
            self._requests += len(self._fleet.pop().left)  # given back
            self._changed_s = self.now_s
        ready_s = self.now_s + self.start_s
        self._fleet += [Replica(self.now_s, ready_s) for _ in range(number - len(self._fleet))]
        self.wanted = number


def numbers(changes: Sequence[tuple[int, int]]) -> list[int]:
    """To how many, one change after another."""
    return [number for _, number in changes]
