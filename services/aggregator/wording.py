"""A verdict in words: one sentence, and what to turn next."""

from services.aggregator.lagging import Lag
from services.aggregator.rules import Name
from services.aggregator.verdict import MIN_STEPS, Verdict

KNOBS: dict[Name, str] = {
    "environment-bound": "make {culprit} faster, or keep conversations away from it: more of them "
    "at a time (generator.max_inflight) also hides its waits",
    "generation-bound": "more generators (generator.replicas; on Kubernetes, replicas of its "
    "Deployment), more conversations at a time in each (generator.max_inflight), or shorter "
    "completions (generation.max_completion_tokens)",
    "scoring-bound": "more scorers (scorer.replicas; on Kubernetes, replicas of its Deployment), "
    "more of a scorer's processes (rewards.workers) and groups at a time (scorer.max_groups), or "
    "make {culprit} faster (rewards.functions)",
    "straggler-bound": "shorten the longest conversations (generation.max_completion_tokens, "
    "generation.timeout_s), let groups be older (trainer.max_staleness), or go on without late "
    'ones (trainer.stale = "drop", which trains on shorter conversations than the policy has)',
    "pacing-bound": "let more groups be under way: a larger trainer.max_staleness, or a larger "
    "trainer.groups_per_step",
    "sync-bound": "publish less often (trainer.weight_sync_steps), or give weights a faster way "
    "from the trainer to the generators",
    "training-bound": "fuller rows (trainer.token_budget), or more or faster devices for the "
    "trainer; generators may be fewer (generator.replicas)",
    "balanced": "none: no single stage holds the run back",
    "not enough data": "ask again after some more steps, or for a longer window",
}
"""What to change, with the keys of the recipe."""

FREE: dict[Name, str] = {
    "environment-bound": "with tools and environment for free",
    "generation-bound": "with generation for free",
    "scoring-bound": "with scoring for free",
    "straggler-bound": "without that wait",
    "pacing-bound": "without that wait",
    "sync-bound": "with weight sync for free",
    "training-bound": "with training for free",
}


def sentence(verdict: Verdict) -> str:
    """The verdict in one sentence.

    Example: "generation-bound: the trainer waits 61 % of each step (1.9 of 3.1 s); with generation
    for free a step would take 1.2 s".
    """
    parts = [f"{verdict.name}: {_finding(verdict)}"]
    if verdict.step_s_if_free is not None:
        predicted = seconds(verdict.step_s_if_free)
        parts.append(f"{FREE[verdict.name]} a step would take {predicted} s")
    if verdict.step_s_at_speed_up is not None:
        parts.append(f"{verdict.speed_up:g} times as fast, {seconds(verdict.step_s_at_speed_up)} s")
    return "; ".join(parts)


def knob(verdict: Verdict) -> str:
    """What to turn next."""
    if verdict.name == "not enough data" and verdict.num_steps >= MIN_STEPS:
        return "find out why the missing metrics do not arrive: which service does not report?"
    turn = KNOBS[verdict.name].format(culprit=verdict.culprit)
    if verdict.lag is None:
        return turn
    return f"look at {verdict.lag.replica} first, which {lags(verdict.lag)}; then: {turn}"


def lags(lag: Lag) -> str:
    """In what a replica lags.

    Example: "serves version 40 where another serves 45".
    """
    match lag.why:
        case "version":
            return f"serves version {lag.value:.0f} where another serves {lag.others:.0f}"
        case "paused":
            return f"is paused {percent(lag.value)} of the time, the others {percent(lag.others)}"
        case "pace":
            # Scorers make groups and generators tokens: what both have is the comparison.
            return f"works at {percent(lag.value / lag.others)} of the others' pace"


def seconds(value: float) -> str:
    """Two significant digits below a hundred: 1.94 -> 1.9, 0.0123 -> 0.012, 250.4 -> 250."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}"


def percent(value: float | None) -> str:
    """0.613 -> 61 %; what is not known, —."""
    return "—" if value is None else f"{value * 100:.0f} %"


def _finding(verdict: Verdict) -> str:
    if verdict.name == "not enough data":
        return _lacking(verdict)
    wait_share = _value(verdict, "perf/rollout_wait_s")
    waits = f"the trainer waits {_of_step(verdict, wait_share)}"
    match verdict.name:
        case "environment-bound":
            there = percent(_value(verdict, "rollout/tool_s + rollout/env_s"))
            return (
                f"{waits} for conversations that spend {there} of their time in tools and the "
                "environment"
            )
        case "straggler-bound":
            late = _of_step(verdict, verdict.share)
            return f"the trainer waits {late} for groups that are about to become too old"
        case "pacing-bound":
            return f"{waits} while generators starve: no more groups may be under way"
        case "sync-bound":
            held, paused = (
                _value(verdict, key) for key in ("perf/weight_sync_s", "perf/generator_paused_frac")
            )
            if paused is not None and paused > (held or 0.0):
                return f"generators are paused {percent(verdict.share)} of the time for new weights"
            return f"publishing weights holds the trainer {_of_step(verdict, verdict.share)}"
        case "training-bound":
            works = _of_step(verdict, verdict.share)
            return f"the trainer works {works} and waits {percent(wait_share)}"
        case "balanced":
            return f"no stage alone holds the run back; {waits}"
    return waits


def _of_step(verdict: Verdict, share: float | None) -> str:
    """ "61 % of each step (1.9 of 3.1 s)"."""
    assert verdict.step_s is not None
    text = f"{percent(share)} of each step"
    if share is None:
        return text
    return f"{text} ({seconds(share * verdict.step_s)} of {seconds(verdict.step_s)} s)"


def _lacking(verdict: Verdict) -> str:
    if verdict.num_steps < MIN_STEPS:
        return (
            f"the length of {verdict.num_steps} steps is known (perf/step_s), {MIN_STEPS} are "
            "needed"
        )
    return f"of the last {verdict.num_steps} steps there is no {', '.join(verdict.missing)}"


def _value(verdict: Verdict, key: str) -> float | None:
    """What the evidence says of a metric."""
    return next((each.value for each in verdict.evidence if each.key == key), None)
