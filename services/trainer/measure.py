"""What the trainer records about a step, from plain values; the traps of each key are in the
catalogue."""

import copy
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from services.common.config import Recipe
from services.common.recorder import Recorder
from services.trainer.intake import AdmittedGroup
from services.trainer.load import sum_of_squares
from services.trainer.loss import LAG_KEYS
from services.trainer.planner import Plan
from services.trainer.run_queue import Fill
from services.trainer.step import StepResult
from services.trainer.types import TrainSample

BUDGET = (
    "rollout_wait_s",
    "straggler_wait_s",
    "data_s",
    "fwd_bwd_s",
    "optimizer_s",
    "weight_sync_s",
    "checkpoint_s",
    "eval_s",
)
"""Disjoint parts of a step; what is left is unaccounted_s."""

RECORDED_EACH_STEP = (
    "rollout_wait_s",
    "straggler_wait_s",
    "data_s",
    "fwd_s",
    "fwd_bwd_s",
    "optimizer_s",
    "weight_sync_s",
)
"""Checkpoints and evaluations are recorded when there is one."""


@dataclass
class StepTimes:
    """Seconds of one step by part. An evaluation or a checkpoint between two steps belongs to the
    second of them."""

    rollout_wait_s: float = 0.0
    straggler_wait_s: float = 0.0
    data_s: float = 0.0
    fwd_s: float = 0.0
    """Of fwd_bwd_s."""
    fwd_bwd_s: float = 0.0
    optimizer_s: float = 0.0
    weight_sync_s: float = 0.0
    checkpoint_s: float = 0.0
    eval_s: float = 0.0
    step_s: float | None = None
    """None for the first step: nothing marks its beginning."""

    @property
    def unaccounted_s(self) -> float | None:
        """step_s less the parts."""
        if self.step_s is None:
            return None
        return self.step_s - math.fsum(getattr(self, part) for part in BUDGET)


@dataclass
class Totals:
    """Over the whole run and the surviving line of its attempts, for the report at its end."""

    steps: int = 0
    """Counted by the run itself, as steps end."""
    trained_samples: int = 0
    trained_tokens: int = 0
    forwarded_tokens: int = 0
    max_logprob_gap: float | None = None
    gap_tokens: int = 0
    staleness_max: int = 0
    step_s: list[float] = field(default_factory=list)
    samples_of_step: list[int] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, result: StepResult, times: StepTimes, groups: Sequence[AdmittedGroup]) -> None:
        """Take one step. The gap is over tokens of lag 0: there trainer and engine have the same
        weights.

        Samples are those that the loss was taken over: neither those of groups without signal that
        were skipped nor those beyond the budgets.
        """
        self.trained_samples += result.num_samples
        self.trained_tokens += result.trained_tokens
        self.forwarded_tokens += result.forwarded_tokens
        self.staleness_max = max([self.staleness_max, *(group.staleness for group in groups)])
        same = result.statistics.lags[0]
        if same.tokens:
            self.max_logprob_gap = max(self.max_logprob_gap or 0.0, same.gap_max)
            self.gap_tokens += same.tokens
        if times.step_s is not None:
            self.step_s.append(times.step_s)
            self.samples_of_step.append(result.num_samples)
            for part in (*BUDGET, "unaccounted_s"):
                self.parts[part].append(getattr(times, part) or 0.0)

    def state(self) -> dict[str, Any]:
        """As JSON holds it; `of_state` reads it."""
        return copy.deepcopy(vars(self) | {"parts": dict(self.parts)})

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """The totals of a checkpoint, to go on with."""
        totals = cls(**state)
        totals.parts = defaultdict(list, totals.parts)
        return totals

    def summary(self) -> dict[str, Any]:
        """Medians over the steps after the first; rates over their whole time."""
        timed = sum(self.step_s)
        return {
            "steps": self.steps,
            "trained_samples": self.trained_samples,
            "trained_tokens": self.trained_tokens,
            "forwarded_tokens": self.forwarded_tokens,
            "max_logprob_gap": self.max_logprob_gap,
            "gap_tokens": self.gap_tokens,
            "staleness_max": self.staleness_max,
            "step_s_median": statistics.median(self.step_s) if self.step_s else None,
            "samples_per_s": sum(self.samples_of_step) / timed if timed else None,
            "time_budget": {part: statistics.median(values) for part, values in self.parts.items()},
        }


def record_step(
    record: Recorder,
    recipe: Recipe,
    *,
    step: int,
    result: StepResult,
    plan: Plan,
    samples: Sequence[TrainSample],
    groups: Sequence[AdmittedGroup],
    times: StepTimes,
    peak_flops: float | None,
) -> None:
    """Record everything about an optimizer step under its own number. `plan` is of `samples`,
    `peak_flops` the FLOP/s that the devices of all ranks can do, where that is known.

    Rows that are echoes are rows of their micro-batch: they take its time, and room that samples
    could have had. What they forward is in no count of rows, samples or tokens.
    """
    _record_times(record, step, result, times)
    if peak_flops is not None:
        _record_utilisation(record, step, result, times, peak_flops)
    _record_samples(record, step, plan, samples, groups)
    _record_rows(record, recipe, step, result, plan, samples)
    record.observe("batch/groups_per_step", len(groups), step=step)
    _record_loss(record, step, result)


def _record_times(record: Recorder, step: int, result: StepResult, times: StepTimes) -> None:
    for part in RECORDED_EACH_STEP:
        record.observe(f"perf/{part}", getattr(times, part), step=step)
    record.observe_many("perf/rank_fwd_bwd_s", result.rank_fwd_bwd_s, step=step)
    if times.fwd_bwd_s:
        record.ratio(
            "perf/forwarded_tok_s_fwd_bwd", result.forwarded_tokens, times.fwd_bwd_s, step=step
        )
    if times.step_s is not None and times.unaccounted_s is not None:
        record.observe("perf/step_s", times.step_s, step=step)
        record.observe("perf/unaccounted_s", times.unaccounted_s, step=step)
        record.ratio(
            "perf/forwarded_tok_s_wall_clock", result.forwarded_tokens, times.step_s, step=step
        )
        record.ratio(
            "perf/trained_tok_s_wall_clock", result.trained_tokens, times.step_s, step=step
        )
    if not result.denominator:
        record.count("perf/empty_step_total", step=step)


def _record_utilisation(
    record: Recorder, step: int, result: StepResult, times: StepTimes, peak_flops: float
) -> None:
    """What the model's arithmetic needs over what the devices could have done meanwhile."""
    for key, seconds in (("fwd_bwd", times.fwd_bwd_s), ("wall_clock", times.step_s)):
        if seconds:
            record.ratio(f"perf/mfu_{key}", result.flops, peak_flops * seconds, step=step)


def _record_samples(
    record: Recorder,
    step: int,
    plan: Plan,
    samples: Sequence[TrainSample],
    groups: Sequence[AdmittedGroup],
) -> None:
    trained = [samples[index] for row in plan.rows if not row.echo for index in row.samples]
    lengths = [sample.token_ids.size for sample in trained]
    lengths_of = ("sample/forwarded_tokens_mean", "sample/forwarded_tokens_max")
    record.observe_many(lengths_of, lengths, step=step)
    record.observe_many("sample/trained_tokens_mean", [s.num_trained for s in trained], step=step)
    staleness = [group.staleness for group in groups for _ in group.samples]
    record.observe_many("sample/staleness_mean", staleness, step=step)
    record.observe_many("sample/staleness_max", [g.staleness for g in groups], step=step)


def _record_rows(
    record: Recorder,
    recipe: Recipe,
    step: int,
    result: StepResult,
    plan: Plan,
    samples: Sequence[TrainSample],
) -> None:
    forwarded, trained = result.forwarded_tokens, result.trained_tokens
    rows = [row for row in plan.rows if not row.echo]
    record.observe_many("batch/samples_per_row", [len(row.samples) for row in rows], step=step)
    row_tokens = [row.tokens for row in rows]
    record.observe_many(("batch/row_tokens_mean", "batch/row_tokens_max"), row_tokens, step=step)
    for microbatch in plan.microbatches:
        loads = [
            sum_of_squares(samples[index].num_context for index in row.samples)
            for row in microbatch
        ]
        record.observe("batch/row_imbalance", imbalance(loads), step=step)
    room = recipe.token_budget * len(plan.rows)
    record.ratio("batch/row_fill_frac", forwarded, room, step=step)
    record.ratio("batch/duplication", forwarded, plan.unique_tokens, step=step)
    record.ratio("batch/packing_ratio", result.raw_tokens, forwarded, step=step)
    # A forwarded token may be context of one sample and trained in another: raw tokens tell them
    # apart.
    record.ratio(
        "batch/masked_token_frac", result.raw_tokens - trained, result.raw_tokens, step=step
    )
    record.observe("batch/microbatches_per_step", len(plan.microbatches), step=step)
    record.observe("batch/samples_per_step", result.num_samples, step=step)
    record.observe("batch/forwarded_tokens_per_step", forwarded, step=step)
    record.observe("batch/trained_tokens_per_step", trained, step=step)


def imbalance(loads: Sequence[float]) -> float:
    """The largest load of a micro-batch's rows over their mean: the ranks wait for that row.

    Example: rows of 4, 4 and 10: 10 / 6 = 1.67, and 1 / 1.67 of the ranks' time is used.
    """
    mean = math.fsum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0


def _record_loss(record: Recorder, step: int, result: StepResult) -> None:
    seen = result.statistics
    record.observe("learning_rate", result.learning_rate, step=step)
    for where, number in result.nonfinite.items():
        if number:
            record.count(f"nonfinite_total/{where}", number, step=step)
    if result.loss is not None:
        record.observe("loss", result.loss, step=step)
    if result.grad_norm is not None:
        record.observe("grad_norm", result.grad_norm, step=step)
    tokens = seen.tokens
    if not tokens:
        return
    clipped = seen.clip_low_tokens + seen.clip_high_tokens
    for key, numerator in {
        "entropy": seen.entropy_sum,
        "ratio": seen.ratio_sum,
        "clip_ratio/low_mean": seen.clip_low_tokens,
        "clip_ratio/high_mean": seen.clip_high_tokens,
        "clip_ratio/region_mean": clipped,
        "policy/signal_token_frac": seen.signal_tokens,
        "kl": sum(lag.kl_sum for lag in seen.lags),
    }.items():
        record.ratio(key, numerator, tokens, step=step)
    if seen.kl_ref_tokens:
        record.ratio("kl_ref", seen.kl_ref_sum, seen.kl_ref_tokens, step=step)
    if seen.aux_loss is not None:
        record.observe("aux_loss", seen.aux_loss, step=step)
    if np.isfinite(seen.clip_low_min):
        record.observe("clip_ratio/low_min", seen.clip_low_min, step=step)
        record.observe("clip_ratio/high_max", seen.clip_high_max, step=step)
    for name, lag in zip(LAG_KEYS, seen.lags, strict=True):
        if lag.tokens:
            record.ratio(f"policy/logprob_gap_mean/{name}", lag.gap_sum, lag.tokens, step=step)
            record.observe(f"policy/logprob_gap_max/{name}", lag.gap_max, step=step)
            record.ratio(f"kl/{name}", lag.kl_sum, lag.tokens, step=step)


def record_drop(
    record: Recorder, reason: str, samples: Sequence[TrainSample], *, given_up: bool
) -> None:
    """Record one dropped group, or one given up with its prompt."""
    record.count("group/given_up_total" if given_up else f"group/dropped/{reason}")
    record_dropped_samples(record, reason, samples)


def record_dropped_samples(record: Recorder, reason: str, samples: Sequence[TrainSample]) -> None:
    """Record samples not used; whether dropping favours short ones shows in the tokens."""
    if samples:
        record.count(f"sample/dropped/{reason}", len(samples))
        if reason == "stale":
            record.count("sample/dropped_stale_total", len(samples))
        record.ratio(
            "sample/dropped_tokens_mean", sum(s.token_ids.size for s in samples), len(samples)
        )


def record_queue(
    record: Recorder, recipe: Recipe, fills: Mapping[str, Fill], *, outstanding: int, bound: int
) -> None:
    """Record how full the streams are, and how much of what pacing allows is under way."""
    capacity = {"groups": recipe.queue.groups_capacity, "samples": recipe.samples_capacity}
    for name, fill in fills.items():
        record.observe(f"queue/waiting/{name}", fill.waiting)
        record.observe(f"queue/held/{name}", fill.held)
        if fill.oldest_wait_s is not None:
            record.observe(f"queue/oldest_wait_s/{name}", max(0.0, fill.oldest_wait_s))
        if name in capacity:
            record.ratio(f"queue/fill_frac/{name}", fill.waiting, capacity[name])
    record.observe("sample/rollout_queue_size", fills["samples"].waiting)
    record.observe("rollout/score_queue_size", fills["groups"].waiting)
    record.ratio("pace/outstanding_frac", outstanding, bound)


def drop_reasons(counter: Counter[str]) -> dict[str, int]:
    """For the report: reasons that occurred."""
    return {reason: number for reason, number in sorted(counter.items()) if number}
