"""The rules of the verdict: conditions on shares of a step and on what was measured meanwhile.

A condition on an absent value does not hold. Whether that decides anything is another question: a
rule is undecided when all that speaks against it is the absence of something.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from services.aggregator.window import TRAINING, Shares, Window, environment_frac

T = TypeVar("T")

PAUSED_FRAC = 0.10
"""Generators that are paused for less of the time are not held back by it."""

Name = Literal[
    "environment-bound",
    "generation-bound",
    "scoring-bound",
    "straggler-bound",
    "pacing-bound",
    "sync-bound",
    "training-bound",
    "balanced",
    "not enough data",
]
Compare = Literal[">=", "<", ">"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One condition, with what was found."""

    key: str
    """The metric."""
    measure: str
    """What `value` is of it."""
    value: float | None
    compare: Compare
    threshold: float | None
    """None where it is itself measured (groups per step) and absent."""
    holds: bool


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison. `limit` None compares with the groups of a step."""

    key: str
    measure: str
    read: Callable[[Shares, Window], float | None]
    compare: Compare
    limit: float | None
    optional: bool = False
    """Recorded only where it occurs: its absence is no gap in the evidence."""

    def look(self, shares: Shares, window: Window) -> Evidence:
        """Compare, for the whole window or one of its steps."""
        value = self.read(shares, window)
        threshold = window.groups_per_step if self.limit is None else self.limit
        holds = value is not None and threshold is not None
        if value is not None and threshold is not None:
            if self.compare == ">=":
                holds = value >= threshold
            else:
                holds = value < threshold if self.compare == "<" else value > threshold
        return Evidence(self.key, self.measure, value, self.compare, threshold, holds)

    def lacks(self, evidence: Evidence) -> list[str]:
        """The metrics that it would have needed."""
        if self.optional:
            return []
        absent = [self.key] if evidence.value is None else []
        return absent + (["batch/groups_per_step"] if evidence.threshold is None else [])


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table: it holds when of each clause at least one condition holds."""

    name: Name
    clauses: tuple[tuple[Condition, ...], ...]
    share: Callable[[Shares, Window], float | None]
    needs: tuple[str, ...] = ()
    """Parts of a step that only the share needs."""
    spread: int = 0
    """Steps before and after one that are looked at with it when it is asked in how many steps the
    rule holds: what comes in lumps is no part of every step."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule says of a window: True, False, or None for undecided."""

    rule: Rule
    holds: bool | None
    share: float | None
    evidence: tuple[Evidence, ...]
    missing: tuple[str, ...]


def _part(name: str) -> Callable[[Shares, Window], float | None]:
    return lambda shares, _window: shares[name]


def _pooled(name: str) -> Callable[[Shares, Window], float | None]:
    def read(_shares: Shares, window: Window) -> float | None:
        value: float | None = getattr(window, name)
        return value

    return read


def sync_share(shares: Shares, window: Window) -> float | None:
    """Publishing holds the trainer, and loading the generators: the larger of the two. A pause
    costs a step no more than the trainer waits."""
    both = (shares["weight_sync_s"], _pause_share(shares, window))
    largest = max((share for share in both if share is not None), default=None)
    return None if largest is None else min(1.0, max(0.0, largest))


def _pause_share(shares: Shares, window: Window) -> float | None:
    """Of a step, what the trainer waits for because generators are paused, where that is much."""
    wait, paused = shares["rollout_wait_s"], window.generator_paused_frac
    if wait is None or paused is None:
        return None
    return min(wait, paused) if paused >= PAUSED_FRAC else 0.0


def _generation_share(shares: Shares, window: Window) -> float | None:
    """The trainer's wait, but for what generators were paused of it: that is the sync's."""
    wait = shares["rollout_wait_s"]
    return None if wait is None else wait - (_pause_share(shares, window) or 0.0)


def _wait(compare: Compare, limit: float) -> Condition:
    key = "perf/rollout_wait_s"
    return Condition(key, "share of a step", _part("rollout_wait_s"), compare, limit)


def _waiting(stream: str, compare: Compare) -> Condition:
    read = _pooled(f"{stream}_waiting")
    return Condition(
        f"queue/waiting/{stream}", "mean, against a step's groups", read, compare, None
    )


def _held_back(key: str) -> Condition:
    read = _pooled(key.removeprefix("rollout/"))
    return Condition(key, "seconds in the window", read, ">", 0.0, optional=True)


def _share_of_time(key: str, limit: float) -> Condition:
    read = _pooled(key.partition("/")[2])
    return Condition(key, "share of the time", read, ">=", limit)


_GENERATION = (
    (_wait(">=", 0.10),),
    (_waiting("groups", "<"),),
    (_waiting("samples", "<"),),
    (_share_of_time("rollout/slots_busy_frac", 0.80),),
)
_ENVIRONMENT = Condition(
    "rollout/tool_s + rollout/env_s",
    "share of rollout/duration_s",
    lambda _shares, window: environment_frac(window),
    ">=",
    0.50,
    optional=True,
)

SPREAD = 2
"""A version may come every few steps, and a straggler now and then."""

RULES = (
    Rule("environment-bound", (*_GENERATION, (_ENVIRONMENT,)), _generation_share),
    Rule("generation-bound", _GENERATION, _generation_share),
    Rule(
        "scoring-bound",
        (
            (_wait(">=", 0.10),),
            (_waiting("groups", ">="), _held_back("rollout/score_block_s")),
            (_share_of_time("rollout/scorer_busy_frac", 0.80),),
        ),
        _part("rollout_wait_s"),
    ),
    Rule(
        "straggler-bound",
        (
            (
                Condition(
                    "perf/straggler_wait_s",
                    "share of a step",
                    _part("straggler_wait_s"),
                    ">=",
                    0.10,
                    optional=True,
                ),
            ),
        ),
        _part("straggler_wait_s"),
        spread=SPREAD,
    ),
    Rule(
        "pacing-bound",
        (
            (_wait(">=", 0.10),),
            (_share_of_time("pace/outstanding_frac", 0.95),),
            (_share_of_time("rollout/slots_starved_frac", 0.20),),
        ),
        _part("rollout_wait_s"),
    ),
    Rule(
        "sync-bound",
        (
            (
                Condition(
                    "perf/weight_sync_s", "share of a step", _part("weight_sync_s"), ">=", 0.10
                ),
                _share_of_time("perf/generator_paused_frac", PAUSED_FRAC),
            ),
            (
                Condition(
                    "perf/weight_sync_s", "share of a step", _part("weight_sync_s"), ">=", 0.10
                ),
                _wait(">=", 0.10),
            ),
        ),
        sync_share,
        spread=SPREAD,
    ),
    Rule(
        "training-bound",
        (
            (_wait("<", 0.05),),
            # One that waits for stragglers waits, whatever else it has.
            (
                Condition(
                    "perf/straggler_wait_s",
                    "share of a step, 0 where it is absent",
                    lambda shares, _window: shares["straggler_wait_s"] or 0.0,
                    "<",
                    0.05,
                ),
            ),
            (
                _waiting("samples", ">="),
                _held_back("rollout/backpressure_s"),
                # Where little may be under way, less than a step waits, and generators starve.
                replace(_share_of_time("rollout/slots_starved_frac", 0.20), optional=True),
            ),
        ),
        _part("training_s"),
        needs=TRAINING,
    ),
)
"""The table, in the order in which ties are decided."""


def find(rule: Rule, shares: Shares, window: Window) -> Finding:
    """Look at a window, or with one step's shares at that step in it."""
    looked = [[(each, each.look(shares, window)) for each in clause] for clause in rule.clauses]
    evidence = tuple(found for clause in looked for _, found in clause)
    share = rule.share(shares, window)
    holds: bool | None = True
    missing: list[str] = []
    for clause in looked:
        if any(found.holds for _, found in clause):
            continue
        lacking = [key for condition, found in clause for key in condition.lacks(found)]
        if not lacking:
            return Finding(rule, holds=False, share=share, evidence=evidence, missing=())
        holds, missing = None, missing + lacking
    if share is None:
        holds = None
        missing += [f"perf/{part}" for part in rule.needs if shares[part] is None]
    return Finding(rule, holds, share, evidence, distinct(missing))


def holds(rule: Rule, shares: Shares, window: Window) -> bool:
    """Whether find() says that it holds, without the evidence: cheap enough for every step."""
    return rule.share(shares, window) is not None and all(
        any(condition.look(shares, window).holds for condition in clause) for clause in rule.clauses
    )


def distinct(values: Iterable[T]) -> tuple[T, ...]:
    """Each value once, in order."""
    return tuple(dict.fromkeys(values))
