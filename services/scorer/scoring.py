"""One group from conversations to advantages, and what is measured and said about it on the way."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from services.common.config import Recipe
from services.common.custom_metrics import CUSTOM_PREFIX
from services.common.recorder import Recorder
from services.scorer.advantages import GroupAdvantages, combine, group_advantages
from services.scorer.conversations import Conversations
from services.scorer.rewards import Judges, Verdict

COMPLAIN_EVERY_S = 60.0
"""A function that keeps failing is logged once in so long, with the number of failures between."""


@dataclass(frozen=True)
class Judgement:
    """One scored group, conversations in their order."""

    verdicts: list[Verdict]
    """By function."""
    totals: list[float | None]
    """By conversation; None where it is unscored."""
    advantages: GroupAdvantages
    """All 0 for evaluation, which is not trained on."""
    enough: bool
    """True when at least `advantage.min_group` conversations have a total: a relative advantage
    needs company.
    """


async def score(
    conversations: Conversations, *, judges: Judges, recipe: Recipe, evaluation: bool
) -> Judgement:
    """Call the reward functions and turn their rewards into totals and advantages.

    Raises RewardError when a function returned what cannot be read as rewards.
    """
    verdicts = await judges.judge(conversations)
    weights = [function.weight for function in judges.functions]
    totals = [
        combine(
            [verdict.rewards[position] for verdict in verdicts],
            weights=weights,
            on_abstain=recipe.rewards.on_abstain,
        )
        for position in range(len(conversations.members))
    ]
    advantages = group_advantages(
        [None] * len(totals) if evaluation else totals, scale=recipe.advantage.scale
    )
    return Judgement(
        verdicts=verdicts,
        totals=totals,
        advantages=advantages,
        enough=advantages.num_scored >= recipe.advantage.min_group,
    )


def record(judgement: Judgement, recorder: Recorder) -> None:
    """Record the rewards of a group of training. Evaluation's are the trainer's to record: it knows
    which answers are of the policy that it asked.
    """
    present = [total for total in judgement.totals if total is not None]
    if present:
        recorder.observe_many("reward", present)
    for verdict in judgement.verdicts:
        given = [reward for reward in verdict.rewards if reward is not None]
        if given:
            recorder.observe_many(f"rewards/{verdict.name}", given)
        for name, value in verdict.logged:
            recorder.observe(f"{CUSTOM_PREFIX}{name}", value)
    recorder.count("reward/unscored_total", len(judgement.totals) - len(present))
    if judgement.enough and judgement.advantages.std is not None:
        recorder.observe("reward_std", judgement.advantages.std)
        recorder.ratio("reward/zero_std_frac", float(judgement.advantages.zero_signal), 1.0)


def record_seconds(judgement: Judgement, recorder: Recorder) -> None:
    """Record how long each function took for a group of training: time is spent also on a group
    whose claim is lost in the end.
    """
    for verdict in judgement.verdicts:
        if verdict.seconds is not None:
            recorder.observe(f"reward/function_s/{verdict.name}", verdict.seconds)


class Complaints:
    """Says in the log and in metrics which functions fail, without a line a group."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._next_s: dict[str, float] = {}
        self._held_back: dict[str, int] = {}
        self._nonfinite_told: set[str] = set()

    def of(self, judgement: Judgement, *, group_id: str) -> None:
        """Count and, within limits, log the failures and the unusable numbers of one group."""
        for verdict in judgement.verdicts:
            if verdict.num_nonfinite:
                self._recorder.count("nonfinite_total/reward", verdict.num_nonfinite)
                if verdict.name not in self._nonfinite_told:
                    self._nonfinite_told.add(verdict.name)
                    structlog.get_logger().warning(
                        "a reward is NaN, infinite or beyond 1e100: taken as an abstention",
                        function=verdict.name,
                        group=group_id,
                    )
            if verdict.failure is not None:
                self._recorder.count("reward/failed_calls_total")
                self._say(verdict, group_id)

    def _say(self, verdict: Verdict, group_id: str) -> None:
        assert verdict.failure is not None
        now = time.monotonic()
        if now < self._next_s.get(verdict.name, 0.0):
            self._held_back[verdict.name] = self._held_back.get(verdict.name, 0) + 1
            return
        self._next_s[verdict.name] = now + COMPLAIN_EVERY_S
        structlog.get_logger().error(
            "a reward function failed: it abstains for this group",
            function=verdict.name,
            group=group_id,
            why=verdict.failure.reason,
            traceback=verdict.failure.traceback_text,
            more_since_last=self._held_back.pop(verdict.name, 0),
        )


class BusyClock:
    """How much of the time at least one group was being scored (the union of their intervals), and
    how much of all that can be in work was.

    `places` are the groups that a scorer has in work at most, `workers` its processes for sync
    functions: whichever is nearer its end is how much of it is used.
    """

    def __init__(self, *, places: int, workers: int) -> None:
        self._places, self._workers = places, workers
        self._lock = threading.Lock()
        self._running = 0
        self._busy_s = self._place_s = self._worker_s = 0.0
        self._seen_s = self._since_s = self._load_since_s = time.monotonic()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """One interval."""
        with self._lock:
            self._advance()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._advance()
                self._running -= 1

    def take(self) -> tuple[float, float]:
        """(busy seconds, all seconds) since the last call; thread-safe."""
        with self._lock:
            self._advance()
            busy_s, total_s = self._busy_s, self._seen_s - self._since_s
            self._busy_s, self._since_s = 0.0, self._seen_s
        return busy_s, total_s

    def worked(self, seconds: float) -> None:
        """A sync function had a worker process for so long."""
        with self._lock:
            self._worker_s += seconds

    def take_load(self) -> tuple[float, float]:
        """(seconds' worth of a full scorer, all seconds) since the last call; thread-safe.

        Example: 8 places and 2 workers; in 10 s 4 groups were in work all the time, each waiting
        for the workers, which never rested: places 0.5, workers 1.0, so (10.0, 10.0).
        """
        with self._lock:
            self._advance()
            used_s = max(self._place_s / self._places, self._worker_s / self._workers)
            total_s = self._seen_s - self._load_since_s
            self._place_s = self._worker_s = 0.0
            self._load_since_s = self._seen_s
        return used_s, total_s

    def _advance(self) -> None:
        now = time.monotonic()
        elapsed_s = now - self._seen_s
        if self._running:
            self._busy_s += elapsed_s
        self._place_s += elapsed_s * self._running
        self._seen_s = now
