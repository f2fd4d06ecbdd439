from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from services.aggregator.catalogue import CATALOGUE
from services.common.config import Data, Recipe
from services.common.config import Recorder as RecorderSettings
from services.common.generation_config import Generator
from services.common.partials import Count, Observation, Partial, Ratio
from services.common.recorder import Recorder
from services.common.training_config import Trainer
from services.trainer.dispatch import REASONS
from services.trainer.intake import AdmittedGroup
from services.trainer.measure import (
    BUDGET,
    StepTimes,
    Totals,
    drop_reasons,
    imbalance,
    record_drop,
    record_dropped_samples,
    record_queue,
    record_step,
)
from services.trainer.packing import pack
from services.trainer.planner import Plan, PlannedRow, plan
from services.trainer.run_queue import GAUGED, Fill
from services.trainer.step import OptimizerStep, StepResult
from services.trainer.types import TrainSample
from tests.services.trainer.numerics import make_model, make_sample

RECIPE = Recipe(
    data=Data(file="x.jsonl", epochs=1.0),
    generator=Generator(max_model_len=600),
    trainer=Trainer(groups_per_step=2, max_staleness=1),
)
INSTRUMENTS = {Count: "count", Observation: "observation", Ratio: "ratio"}


def recorder() -> Recorder:
    return Recorder(
        run="r", producer="t", service="trainer", settings=RecorderSettings(), channel=None
    )


def recorded(record: Recorder, *, step: int = 0) -> dict[str, Partial]:
    """By key; everything must be of this step."""
    found = record.snapshot()
    assert {s for _, _, s in found} <= {step}
    return {key: partial for (key, _, _), partial in found.items()}


def check_declared(record: Recorder) -> set[str]:
    """Every key is declared for the trainer, with the instrument that it was recorded by."""
    found = {key: partial for (key, _, _), partial in record.snapshot().items()}
    for key, partial in found.items():
        declared = CATALOGUE.find(key)
        assert declared is not None, key
        assert "trainer" in declared.metric.producers, key
        assert declared.metric.instrument == INSTRUMENTS[type(partial)], key
    assert "recorder/refused_total" not in found
    return set(found)


def groups_of(*samples: TrainSample, staleness: int = 0) -> list[AdmittedGroup]:
    return [AdmittedGroup("g", samples, zero_signal=False, staleness=staleness)]


def a_step(*samples: TrainSample, one_by_one: bool = False) -> tuple[StepResult, Any]:
    step = OptimizerStep(
        make_model(), optimizer=RECIPE.optimizer, loss=RECIPE.loss, temperature=1.0
    )
    for row in [[each] for each in samples] if one_by_one else [list(samples)]:
        if row:
            step.accumulate(pack(row))
    budget = RECIPE.token_budget
    return step.finish(), plan(samples, token_budget=budget, trained_token_budget=budget)


SAMPLES = (
    make_sample([1, 2, 3, 4], num_prompt=2, advantage=1.0),
    make_sample([1, 2, 5, 6, 7], num_prompt=2, advantage=-1.0, lag=1, rollout_id="g/1"),
    make_sample([1, 2, 5], num_prompt=2, advantage=-1.0, lag=7, rollout_id="g/2"),
)
TIMES = StepTimes(
    rollout_wait_s=1.0,
    data_s=0.25,
    fwd_s=1.5,
    fwd_bwd_s=4.0,
    optimizer_s=0.5,
    weight_sync_s=0.125,
    step_s=6.0,
)


def record(
    *samples: TrainSample, times: StepTimes, step: int = 3, peak_flops: float | None = 1e9
) -> Recorder:
    kept = recorder()
    result, rows = a_step(*samples)
    groups = groups_of(*samples, staleness=2) if samples else []
    record_step(
        kept,
        RECIPE,
        step=step,
        result=result,
        plan=rows,
        samples=samples,
        groups=groups,
        times=times,
        peak_flops=peak_flops,
    )
    return kept


def test_the_parts_of_a_step_add_up_to_it() -> None:
    assert TIMES.unaccounted_s == pytest.approx(6.0 - (1.0 + 0.25 + 4.0 + 0.5 + 0.125))
    found = recorded(record(*SAMPLES, times=TIMES), step=3)
    seconds = {key.removeprefix("perf/"): p for key, p in found.items() if key.startswith("perf/")}
    parts = [seconds[part] for part in (*BUDGET, "unaccounted_s") if part in seconds]
    total = sum(part.total.value for part in parts if isinstance(part, Observation))
    assert isinstance(seconds["step_s"], Observation)
    assert total == pytest.approx(seconds["step_s"].total.value)
    assert seconds["step_s"].total.value == 6.0


def test_the_first_step_has_no_length() -> None:
    first = StepTimes(fwd_bwd_s=1.0)
    assert first.unaccounted_s is None
    found = recorded(record(*SAMPLES, times=first), step=3)
    assert {"perf/step_s", "perf/unaccounted_s", "perf/trained_tok_s_wall_clock"} & set(found) == (
        set()
    )
    assert "perf/fwd_bwd_s" in found


def test_every_key_is_declared_in_the_catalogue() -> None:
    kept = record(*SAMPLES, times=TIMES)
    for reason in sorted(REASONS):
        record_drop(kept, reason, SAMPLES, given_up=False)
    record_drop(kept, "stale", (), given_up=True)
    fill = Fill(waiting=3, held=2, oldest_wait_s=0.5)
    record_queue(kept, RECIPE, dict.fromkeys(GAUGED, fill), outstanding=4, bound=4)
    keys = check_declared(kept)
    assert {"loss", "entropy", "kl/3+", "policy/logprob_gap_max/0", "group/given_up_total"} <= keys
    assert {"queue/fill_frac/samples", "pace/outstanding_frac", "group/dropped/lost"} <= keys


def test_keys_of_a_step_without_a_denominator_are_declared_and_say_so() -> None:
    kept = record(times=TIMES)
    keys = check_declared(kept)
    assert "perf/empty_step_total" in keys
    assert not {"loss", "grad_norm", "ratio", "batch/packing_ratio"} & keys


def test_values_of_a_step() -> None:
    found = recorded(record(*SAMPLES, times=TIMES), step=3)

    def mean(key: str) -> float:
        partial = found[key]
        assert isinstance(partial, Observation)
        return partial.total.value / partial.n

    def ratio(key: str) -> float:
        partial = found[key]
        assert isinstance(partial, Ratio)
        return partial.over.value / partial.under.value

    # 4 + 5 + 3 tokens, 2 + 3 + 1 of them trained; forwarded: 1 2, then 3 | 5 6 (last ones are
    # targets only).
    assert mean("sample/forwarded_tokens_mean") == 4
    assert mean("sample/trained_tokens_mean") == 2
    assert mean("sample/staleness_mean") == 2
    assert ratio("batch/masked_token_frac") == 6 / 12
    assert ratio("batch/packing_ratio") == 12 / 5
    assert ratio("batch/row_fill_frac") == 5 / 600
    assert ratio("batch/duplication") == 1
    assert ratio("perf/trained_tok_s_wall_clock") == 6 / 6.0
    assert ratio("perf/forwarded_tok_s_fwd_bwd") == 5 / 4.0
    assert ratio("policy/signal_token_frac") == 1
    assert ratio("perf/mfu_fwd_bwd") == pytest.approx(1.5 * ratio("perf/mfu_wall_clock"))
    assert 0 < ratio("perf/mfu_fwd_bwd") < 1e-3  # a model of some thousand numbers at 1 GFLOP/s
    assert mean("batch/row_imbalance") == 1
    tokens = {key: p.under.value for key, p in found.items() if isinstance(p, Ratio)}
    assert [tokens.get(f"kl/{lag}") for lag in ("0", "1", "2", "3+")] == [2, 3, None, 1]


def test_there_is_no_utilisation_of_a_device_whose_peak_is_not_known() -> None:
    found = recorded(record(*SAMPLES, times=TIMES, peak_flops=None), step=3)
    assert not [key for key in found if key.startswith("perf/mfu")]


def test_echoes_are_rows_of_a_micro_batch_and_nothing_else() -> None:
    """Two samples on three ranks: the third rank forwards one of them again."""
    rows = [
        PlannedRow([0], tokens=3),
        PlannedRow([1], tokens=4),
        PlannedRow([1], tokens=4, echo=True),
    ]
    result, _ = a_step(*SAMPLES[:2], one_by_one=True)
    kept = recorder()
    record_step(
        kept,
        RECIPE,
        step=3,
        result=result,
        plan=Plan([rows], oversize=[], unique_tokens=5),
        samples=SAMPLES[:2],
        groups=groups_of(*SAMPLES[:2]),
        times=TIMES,
        peak_flops=None,
    )
    found = recorded(kept, step=3)
    values: dict[str, Any] = {}
    for key, partial in found.items():
        if isinstance(partial, Observation):
            values[key] = (partial.n, partial.total.value)
        elif isinstance(partial, Ratio):
            values[key] = (partial.over.value, partial.under.value)
    assert values["batch/samples_per_row"] == (2, 2)
    assert values["batch/row_tokens_mean"] == (2, 7)
    assert values["sample/forwarded_tokens_mean"] == (2, 9)
    assert values["batch/microbatches_per_step"] == (1, 1)
    assert values["batch/samples_per_step"] == (1, 2)
    assert values["batch/duplication"] == (7, 5)
    # Room that the ranks had, used by samples or not.
    assert values["batch/row_fill_frac"] == (7, 3 * 600)
    # 3 x 3, 4 x 4 and again 4 x 4 squared tokens: the ranks waited for 16.
    assert values["batch/row_imbalance"] == (1, pytest.approx(16 / (41 / 3)))


def test_imbalance_is_the_largest_load_over_the_mean() -> None:
    assert imbalance([4, 4, 10]) == pytest.approx(10 / 6)
    assert imbalance([7]) == imbalance([5, 5]) == 1
    assert imbalance([0, 0]) == 1  # samples without context


def test_what_a_reference_and_routers_say_is_recorded_where_there_are_any() -> None:
    result, rows = a_step(*SAMPLES)
    seen = replace(
        result.statistics,
        kl_ref_tokens=6,
        kl_ref_sum=1.5,
        aux_loss_sum=0.5,
        aux_loss_weight=2.0,
    )
    assert not {"kl_ref", "aux_loss"} & set(recorded(record(*SAMPLES, times=TIMES), step=3))
    kept = recorder()
    record_step(
        kept,
        RECIPE,
        step=3,
        result=replace(result, statistics=seen),
        plan=rows,
        samples=SAMPLES,
        groups=groups_of(*SAMPLES),
        times=TIMES,
        peak_flops=None,
    )
    check_declared(kept)
    found = recorded(kept, step=3)
    kl_ref, aux_loss = found["kl_ref"], found["aux_loss"]
    assert isinstance(kl_ref, Ratio)
    assert isinstance(aux_loss, Observation)
    assert (kl_ref.numerator, kl_ref.denominator) == (1.5, 6)
    assert (aux_loss.n, aux_loss.total.value) == (1, 0.25)


def test_token_weighted_metrics_are_pooled_over_micro_batches() -> None:
    """2, 3 and 1 trained tokens in one row or in three: the same 6 tokens. A mean of the rows'
    means would be another number."""
    whole, _ = a_step(*SAMPLES)
    pooled, _ = a_step(*SAMPLES, one_by_one=True)
    assert (whole.num_rows, pooled.num_rows) == (1, 3)
    assert whole.statistics.tokens == pooled.statistics.tokens == 6
    for name in ("entropy_sum", "ratio_sum", "loss_sum"):
        assert getattr(pooled.statistics, name) == pytest.approx(
            getattr(whole.statistics, name), rel=1e-4
        )
    for mine, theirs in zip(whole.statistics.lags, pooled.statistics.lags, strict=True):
        assert theirs.tokens == mine.tokens
        assert theirs.gap_sum == pytest.approx(mine.gap_sum, rel=1e-4)
    alone = [a_step(sample)[0].statistics for sample in SAMPLES]
    mean_of_means = sum(each.ratio_sum / each.tokens for each in alone) / 3
    found = recorded(record(*SAMPLES, times=TIMES), step=3)["ratio"]
    assert isinstance(found, Ratio)
    assert found.denominator == 6
    assert found.numerator == pytest.approx(sum(each.ratio_sum for each in alone), rel=1e-4)
    assert abs(found.numerator / 6 - mean_of_means) > 1e-3


def test_the_gap_of_a_run_is_over_tokens_of_lag_0() -> None:
    totals = Totals()
    far_off = make_sample([1, 2, 3, 4], num_prompt=2, lag=1, old_logprob=-40.0)
    result, _ = a_step(far_off)
    totals.add(result, StepTimes(), groups_of(far_off, staleness=1))
    assert totals.max_logprob_gap is None
    near = make_sample([1, 2, 3, 4], num_prompt=2, old_logprob=-3.0)
    result, _ = a_step(near, far_off)
    totals.add(result, StepTimes(), groups_of(near, far_off, staleness=3))
    assert totals.gap_tokens == 2
    assert totals.max_logprob_gap == result.statistics.lags[0].gap_max
    assert totals.max_logprob_gap < result.statistics.lags[1].gap_max
    assert (totals.staleness_max, totals.trained_samples, totals.trained_tokens) == (3, 3, 6)


def test_a_summary_leaves_the_first_step_out_of_times_and_not_out_of_counts() -> None:
    totals = Totals()
    result, _ = a_step(*SAMPLES)
    for seconds in (None, 2.0, 4.0, 9.0):
        totals.steps += 1
        totals.add(result, StepTimes(fwd_bwd_s=1.0, step_s=seconds), groups_of(*SAMPLES))
    found = totals.summary()
    assert (found["steps"], found["trained_samples"], found["step_s_median"]) == (4, 12, 4.0)
    assert found["samples_per_s"] == pytest.approx(9 / 15)
    assert found["time_budget"]["fwd_bwd_s"] == 1.0
    assert found["time_budget"]["unaccounted_s"] == 3.0
    assert set(found["time_budget"]) == {*BUDGET, "unaccounted_s"}


def test_a_summary_of_nothing_has_no_numbers_that_were_not_measured() -> None:
    found = Totals().summary()
    for key in ("max_logprob_gap", "step_s_median", "samples_per_s"):
        assert found[key] is None
    assert found["time_budget"] == {}


def test_a_dropped_group_counts_in_groups_and_in_samples() -> None:
    kept = recorder()
    record_drop(kept, "stale", SAMPLES, given_up=False)
    record_drop(kept, "failed", (), given_up=False)
    found = recorded(kept)
    counts = {key: p.total.value for key, p in found.items() if isinstance(p, Count)}
    assert counts == {
        "group/dropped/stale": 1,
        "group/dropped/failed": 1,
        "sample/dropped/stale": 3,
        "sample/dropped_stale_total": 3,
    }
    tokens = found["sample/dropped_tokens_mean"]
    assert isinstance(tokens, Ratio)
    assert (tokens.over.value, tokens.under.value) == (12, 3)


def test_a_group_given_up_is_not_counted_as_dropped_too() -> None:
    """dispatched = trained + dropped + given up + in flight, also by the metrics."""
    kept = recorder()
    record_drop(kept, "stale", SAMPLES, given_up=True)
    assert not [key for key in recorded(kept) if key.startswith("group/dropped/")]
    assert "group/given_up_total" in recorded(kept)


def test_samples_may_be_dropped_from_a_group_that_is_used() -> None:
    kept = recorder()
    record_dropped_samples(kept, "oversize", SAMPLES[:1])
    record_dropped_samples(kept, "oversize", [])
    assert set(recorded(kept)) == {"sample/dropped/oversize", "sample/dropped_tokens_mean"}


def test_the_queue_s_fill_is_said_of_each_stream() -> None:
    kept = recorder()
    fills = {
        "requests": Fill(waiting=1, held=2, oldest_wait_s=None),
        "groups": Fill(waiting=16, held=0, oldest_wait_s=3.0),
        "samples": Fill(waiting=4, held=0, oldest_wait_s=0.0),
    }
    record_queue(kept, RECIPE, fills, outstanding=3, bound=4)
    found = recorded(kept)
    ratios = {key: p.over.value / p.under.value for key, p in found.items() if isinstance(p, Ratio)}
    assert ratios == {
        "queue/fill_frac/groups": 16 / 64,
        "queue/fill_frac/samples": 4 / 8,
        "pace/outstanding_frac": 3 / 4,
    }
    assert "queue/oldest_wait_s/requests" not in found
    assert {"sample/rollout_queue_size", "rollout/score_queue_size"} <= set(found)


def test_the_report_names_the_reasons_that_occurred() -> None:
    assert drop_reasons(Counter({"stale": 2, "failed": 0, "lost": 1})) == {"lost": 1, "stale": 2}
