"""Faults: what is wrong with a run whatever its verdict, as a pure function of what was measured.

A verdict says what a run's time is lost on; a fault says that what it learns, or what is measured
of it, cannot be trusted, or that a part of it stands still. Several may hold at once. What was not
measured makes no fault.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from services.aggregator.lagging import Lag, Replica, lagging
from services.aggregator.lineage import InFlight
from services.aggregator.rules import Evidence
from services.aggregator.wording import lags, percent, seconds

FaultName = Literal[
    "engine-disagrees",
    "engine-drifts",
    "short-samples-favoured",
    "replica-lags",
    "reward-abstains",
    "conversations-unscored",
    "zero-signal",
    "stage-stalled",
    "metrics-lost",
]

GAP_TIMES = 3.0
"""So many times as large as in the first step, the gap at lag 0 is no arithmetic any more."""

GAP_LEAST = 1e-5
"""Nats: a gap below is the rounding of float32, whatever it was at first."""

GAP_MOST = 0.1
"""Nats: a gap above is a fault also where it was there from the first step on. bfloat16 makes some
hundredths."""

DRIFT_TIMES = 2.0
"""So many times as large in the last quarter as in the first, KL at lag 0 has grown."""

DRIFT_TAU = 0.6
"""Of all pairs of points, rising ones less falling ones (Kendall's tau) from which on it grows
steadily: by chance 10 points reach it once in a hundred times."""

DRIFT_POINTS = 10
"""Fewer points show no course."""

KL_LEAST = 1e-7
"""Nats: below is rounding."""

LONGER_TIMES = 1.5
"""Dropped samples that are so many times as long as trained ones are no chance selection."""

DROPPED_FRAC = 0.02
"""Of all samples: fewer that are dropped bias nothing."""

ABSTAINS_FRAC = 0.5
"""Share of the conversations from which on a reward function does not give, but abstains."""

UNSCORED_FRAC = 0.1
"""Share of the conversations that no function scored."""

ZERO_SIGNAL_FRAC = 0.8
"""Share of the groups whose conversations all got the same reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """What faults rest on, of a window of steps; None where it was not measured. Raises ValueError
    for a number that is not finite."""

    gap: float | None = None
    first_gap: float | None = None
    """Nats between trainer and engine at lag 0: in the window, and in the run's first step that has
    any."""
    kl_course: tuple[float, ...] = ()
    """KL between trainer and engine at lag 0 over the last steps, oldest first."""
    dropped_samples: float | None = None
    dropped_tokens: float | None = None
    """Samples that were dropped, and their mean tokens."""
    trained_samples: float | None = None
    trained_tokens: float | None = None
    """Samples that were trained on, and their mean tokens: all of them, as of what was dropped."""
    reward: float | None = None
    """Mean."""
    zero_signal_frac: float | None = None
    scored: float | None = None
    unscored: float | None = None
    """Conversations with a reward, and without."""
    rewards_given: Mapping[str, float] = field(default_factory=dict)
    """By reward function that was called, how many conversations it gave a reward."""
    failed_calls: float | None = None
    """Calls of reward functions that failed."""
    rejected: Mapping[str, float] = field(default_factory=dict)
    """Deltas that the aggregator did not take, by reason."""
    recorder_dropped: float | None = None
    """Partials that services dropped before they could send them."""
    missing_batches: int = 0
    """Batches that have not come although later ones did."""
    stuck: InFlight | None = None
    """The group that has been in flight longest, where that is longer than `stuck_after_s`."""
    num_stuck: int = 0
    stuck_after_s: float | None = None
    generators: tuple[Replica, ...] = ()
    scorers: tuple[Replica, ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            numbers = value if each.name == "kl_course" else (value,)
            for number in numbers:
                if isinstance(number, float) and not math.isfinite(number):
                    raise ValueError(f"{each.name}: {number} is no measurement")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong."""

    name: FaultName
    sentence: str
    knob: str
    """What to look at, or to turn."""
    evidence: tuple[Evidence, ...]
    """What was found, each beyond its threshold."""


def find_faults(symptoms: Symptoms) -> tuple[Fault, ...]:
    """All that is wrong, what spoils learning first.

    Example: a gap of 0.02 nats at lag 0 that was 0.004 in the first step is above three times that:
    engine-disagrees.
    """
    return tuple(fault for find in _FINDERS for fault in find(symptoms))


def _disagreement(found: Symptoms) -> Iterator[Fault]:
    if found.gap is None:
        return
    threshold = GAP_MOST
    if found.first_gap is not None:
        threshold = min(GAP_MOST, max(GAP_LEAST, GAP_TIMES * found.first_gap))
    if found.gap <= threshold:
        return
    first = "" if found.first_gap is None else f"; in the first step it was {found.first_gap:.2g}"
    yield Fault(
        "engine-disagrees",
        "engine and trainer disagree about the log-probabilities of tokens that the trainer's own "
        f"weights sampled: by {found.gap:.2g} nats on average{first}",
        "look for a replica that serves other weights (policy/canary_gap and policy/served_version "
        "of each producer), for another dtype in the engine, and for sampling that reshapes the "
        "distribution; what is trained meanwhile is off-policy without knowing it",
        (_above("policy/logprob_gap_mean/0", "mean of the window, nats", found.gap, threshold),),
    )


def _drift(found: Symptoms) -> Iterator[Fault]:
    course = found.kl_course
    if len(course) < DRIFT_POINTS:
        return
    quarter = len(course) // 4
    first, last = statistics.fmean(course[:quarter]), statistics.fmean(course[-quarter:])
    pairs = [(b > a) - (b < a) for a, b in itertools.combinations(course, 2)]
    tau = sum(pairs) / len(pairs)
    limit = max(KL_LEAST, DRIFT_TIMES * first)
    if last < limit or tau < DRIFT_TAU:
        return
    yield Fault(
        "engine-drifts",
        "with every version the engine is farther from the trainer's own weights: KL at lag 0 has "
        f"grown steadily from {first:.2g} to {last:.2g} nats",
        "look for what a load leaves as it was: a cache that was computed with old weights, a "
        "tensor that is not replaced, a copy in another precision (policy/canary_gap by producer "
        "grows with it); generators that are started again begin anew",
        (
            _at_least(
                "kl/0",
                f"last quarter of the last steps, against {DRIFT_TIMES:g} x the first",
                last,
                limit,
            ),
            _at_least("kl/0", "rising pairs less falling ones, of all", tau, DRIFT_TAU),
        ),
    )


def _short_samples(found: Symptoms) -> Iterator[Fault]:
    dropped, trained = found.dropped_samples, found.trained_samples
    if not dropped or not trained or found.dropped_tokens is None or not found.trained_tokens:
        return
    frac, limit = dropped / (dropped + trained), LONGER_TIMES * found.trained_tokens
    if frac < DROPPED_FRAC or found.dropped_tokens < limit:
        return
    yield Fault(
        "short-samples-favoured",
        f"dropping favours short samples: {percent(frac)} of the samples are dropped, with "
        f"{seconds(found.dropped_tokens)} tokens on average where those trained on have "
        f"{seconds(found.trained_tokens)}",
        "let groups be older (trainer.max_staleness), wait for late ones (trainer.stale), make "
        "rows hold the longest (trainer.token_budget), or shorten the longest conversations "
        "(generation.max_completion_tokens); group/dropped/{reason} says why they are dropped",
        (
            _at_least(
                "sample/dropped_tokens_mean",
                f"tokens, against {LONGER_TIMES:g} x sample/forwarded_tokens_mean",
                found.dropped_tokens,
                limit,
            ),
            _at_least("sample/dropped/{reason}", "share of all samples", frac, DROPPED_FRAC),
        ),
    )


def _lags(found: Symptoms) -> Iterator[Fault]:
    for replicas, pace in (
        (found.generators, ("rollout/generated_tok_s", "tokens a second of a busy slot")),
        (found.scorers, ("rollout/score_s", "groups a second of scoring")),
    ):
        for lag in lagging(replicas):
            yield Fault(
                "replica-lags",
                f"{lag.replica} {lags(lag)}",
                f"look at {lag.replica}: its log, its device and what else works there, its "
                "network; restarting it loses nothing, since its groups are delivered again",
                (_of_lag(lag, pace),),
            )


def _of_lag(lag: Lag, pace: tuple[str, str]) -> Evidence:
    key, measure = {
        "pace": pace,
        "version": ("policy/served_version", "newest served"),
        "paused": ("perf/generator_paused_frac", "share of the time"),
    }[lag.why]
    measure = f"{measure}, by {lag.replica}"
    if lag.why == "paused":
        return _at_least(key, measure, lag.value, lag.threshold)
    return Evidence(key, measure, lag.value, "<", lag.threshold, holds=True)


def _abstentions(found: Symptoms) -> Iterator[Fault]:
    judged = _judged(found)
    if not judged:
        return
    for name, given in found.rewards_given.items():
        # Conversations of one group are recorded at once: more than all is a window's edge.
        frac = max(0.0, 1.0 - given / judged)
        if frac < ABSTAINS_FRAC:
            continue
        failed = ""
        if found.failed_calls:
            failed = f"; {found.failed_calls:,.0f} calls of reward functions failed"
        yield Fault(
            "reward-abstains",
            f"the reward function {name} abstains in {percent(frac)} of the conversations{failed}",
            f"see the scorers' logs for what {name} raises or cannot read (rewards.functions, "
            "rewards.timeout_s); where it is meant for some prompts only, this is as it should be",
            (
                _at_least(
                    f"rewards/{name}", "share of conversations without one", frac, ABSTAINS_FRAC
                ),
            ),
        )


def _unscored(found: Symptoms) -> Iterator[Fault]:
    judged = _judged(found)
    if not judged or found.unscored is None:
        return
    frac = found.unscored / judged
    if frac < UNSCORED_FRAC:
        return
    yield Fault(
        "conversations-unscored",
        f"{percent(frac)} of the conversations have no reward: no function scored them, and "
        "nothing is learnt from them",
        "see rollout/failed/{reason} for conversations that failed, reward/failed_calls_total for "
        'functions that did; with rewards.on_abstain = "sum_present" one function is enough',
        (_at_least("reward/unscored_total", "share of the conversations", frac, UNSCORED_FRAC),),
    )


def _zero_signal(found: Symptoms) -> Iterator[Fault]:
    frac = found.zero_signal_frac
    if frac is None or frac < ZERO_SIGNAL_FRAC:
        return
    mean = "" if found.reward is None else f" (the mean reward is {found.reward:.2g})"
    yield Fault(
        "zero-signal",
        f"{percent(frac)} of the groups teach nothing: all conversations of a group got the same "
        f"reward{mean}",
        "other prompts, neither too easy nor too hard (the recipe's [data]), more conversations in "
        "a group (generation.num_generations), or a reward with finer steps (rewards.functions)",
        (_at_least("reward/zero_std_frac", "share of the groups", frac, ZERO_SIGNAL_FRAC),),
    )


_STALLED: dict[str, tuple[str, str]] = {
    "dispatched": ("generation", "waits for a generator"),
    "generating": ("generation", "is with"),
    "generated": ("scoring", "waits for a scorer"),
    "scoring": ("scoring", "is with"),
    "scored": ("training", "waits for the trainer"),
    "queued": ("training", "is with"),
}
"""By a group's state: the stage that does not go on with it, and how it waits there."""


def _stall(found: Symptoms) -> Iterator[Fault]:
    group = found.stuck
    if group is None or found.stuck_after_s is None:
        return
    stage, waits = _STALLED[group.state]
    where = waits if group.holder is None else f"{waits} {group.holder}"
    others = ""
    if found.num_stuck > 1:
        others = f"; {found.num_stuck:,} groups are in flight for more than "
        others += f"{seconds(found.stuck_after_s)} s"
    yield Fault(
        "stage-stalled",
        f"{stage} stands still: group {group.group_id} (row {group.row_index}) has been in flight "
        f"for {seconds(group.age_s)} s and {where} for {seconds(group.in_state_s)} s{others}",
        _revive(stage, group.holder),
        (
            Evidence(
                "oldest group in flight",
                "seconds, against ledger.stuck_after_s",
                group.age_s,
                ">",
                found.stuck_after_s,
                holds=True,
            ),
        ),
    )


def _revive(stage: str, holder: str | None) -> str:
    """Where to look for the cause of a stall."""
    if holder is None:
        return (
            f"see whether any process of {stage} is ready, and what the end of its log says; "
            "`headrace ledger URL RUN` shows the groups that wait"
        )
    return (
        f"see whether {holder} lives, and what the end of its log says: a worker that falls silent "
        "loses its groups to another, one that hangs keeps them until it is restarted"
    )


def _lost_metrics(found: Symptoms) -> Iterator[Fault]:
    said, evidence = [], []
    rejected = {reason: number for reason, number in sorted(found.rejected.items()) if number > 0}
    if rejected:
        reasons = (f"{n:,.0f} ({reason.replace('_', ' ')})" for reason, n in rejected.items())
        said.append(f"rejected deltas: {', '.join(reasons)}")
        for reason, number in rejected.items():
            evidence.append(_above(f"ingest/rejected/{reason}", "deltas", number, 0.0))
    if found.recorder_dropped:
        said.append(f"partials dropped before they were sent: {found.recorder_dropped:,.0f}")
        evidence.append(_above("recorder/dropped_total", "partials", found.recorder_dropped, 0.0))
    if found.missing_batches > 0:
        said.append(f"batches that have not come, though later ones did: {found.missing_batches:,}")
        evidence.append(_above("ingest/gaps", "batches", float(found.missing_batches), 0.0))
    if not said:
        return
    yield Fault(
        "metrics-lost",
        f"measurements are missing; {'; '.join(said)}",
        "counts and sums of this run may be too low; see the log of the aggregator for what it "
        "rejects, and give services that cannot reach it for long a larger buffer "
        "(recorder.buffer_partials)",
        tuple(evidence),
    )


def _judged(found: Symptoms) -> float:
    """Conversations that scorers looked at."""
    return (found.scored or 0.0) + (found.unscored or 0.0)


def _above(key: str, measure: str, value: float, threshold: float) -> Evidence:
    return Evidence(key, measure, value, ">", threshold, holds=True)


def _at_least(key: str, measure: str, value: float, threshold: float) -> Evidence:
    return Evidence(key, measure, value, ">=", threshold, holds=True)


_FINDERS: tuple[Callable[[Symptoms], Iterator[Fault]], ...] = (
    _disagreement,
    _drift,
    _short_samples,
    _lags,
    _abstentions,
    _unscored,
    _zero_signal,
    _stall,
    _lost_metrics,
)
