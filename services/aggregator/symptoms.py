"""Reads from the store what faults rest on: one statement for all that is added up."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import Connection, func, or_, select

from services.aggregator import lineage, overview, schema
from services.aggregator.faults import Symptoms
from services.aggregator.history import Query, history
from services.aggregator.lines import on_line
from services.aggregator.series import RunRow, find_series
from services.aggregator.window import Window
from services.aggregator.windows import StepAxis

GAP_KEY = "policy/logprob_gap_mean/0"
KL_KEY = "kl/0"
DROPPED_KEY = "sample/dropped_tokens_mean"
FORWARDED_KEY = "sample/forwarded_tokens_mean"
REWARD_KEY = "reward"
UNSCORED_KEY = "reward/unscored_total"
ZERO_SIGNAL_KEY = "reward/zero_std_frac"
FAILED_CALLS_KEY = "reward/failed_calls_total"
RECORDER_KEY = "recorder/dropped_total"

COURSE_STEPS, COURSE_POINTS = 256, 16
"""How many steps a course looks back, and into how many points it puts them."""

KEYS = (
    *(GAP_KEY, DROPPED_KEY, FORWARDED_KEY, REWARD_KEY, UNSCORED_KEY),
    *(ZERO_SIGNAL_KEY, FAILED_CALLS_KEY, RECORDER_KEY),
)
"""Metrics that are added up over the window."""

REWARDS, FUNCTION_SECONDS, REJECTED = "rewards/", "reward/function_s/", "ingest/rejected/"
"""Before the names of reward functions, and before the reasons of what was not taken."""


class Total(NamedTuple):
    """All of one key in the window."""

    sum: float
    denominator: float | None
    n: int | None

    @property
    def ratio(self) -> float | None:
        """None without a denominator."""
        return _finite(self.sum / self.denominator) if self.denominator else None

    @property
    def mean(self) -> float | None:
        """None without an observation."""
        return _finite(self.sum / self.n) if self.n else None


NOTHING = Total(0.0, None, None)


def read_symptoms(
    connection: Connection, run: RunRow, window: Window, *, now_s: float, stuck_after_s: float
) -> Symptoms:
    """From the first step of a window on, the open step included; without a known step, over all of
    the run. `now_s` is seconds since 1970."""
    since = min((step.step for step in window.steps), default=0)
    totals = _totals(connection, run, since)
    account = lineage.account(connection, run, now_s=now_s, stuck_after_s=stuck_after_s)
    dropped, forwarded = totals.get(DROPPED_KEY, NOTHING), totals.get(FORWARDED_KEY, NOTHING)
    reward = totals.get(REWARD_KEY, NOTHING)
    return Symptoms(
        gap=totals.get(GAP_KEY, NOTHING).ratio,
        first_gap=_first_gap(connection, run),
        kl_course=_course(connection, run, KL_KEY),
        dropped_samples=dropped.denominator,
        dropped_tokens=dropped.ratio,
        trained_samples=_number(forwarded.n),
        trained_tokens=forwarded.mean,
        reward=reward.mean,
        zero_signal_frac=totals.get(ZERO_SIGNAL_KEY, NOTHING).ratio,
        scored=_number(reward.n),
        unscored=_sum(totals, UNSCORED_KEY),
        rewards_given={
            name: float(totals.get(f"{REWARDS}{name}", NOTHING).n or 0)
            for name in _named(totals, FUNCTION_SECONDS)
        },
        failed_calls=_sum(totals, FAILED_CALLS_KEY),
        rejected={
            reason: _sum(totals, f"{REJECTED}{reason}") or 0.0
            for reason in _named(totals, REJECTED)
        },
        recorder_dropped=_sum(totals, RECORDER_KEY),
        missing_batches=sum(each.missing_batches for each in overview.producers(connection, run)),
        stuck=next(iter(account.stuck), None),
        num_stuck=account.num_stuck,
        stuck_after_s=stuck_after_s,
        generators=window.generators,
        scorers=window.scorers,
    )


def _first_gap(connection: Connection, run: RunRow) -> float | None:
    """Of the first step that has tokens of lag 0."""
    series = find_series(connection, run, GAP_KEY)
    if series is None:
        return None
    extent = StepAxis(connection, series, run.line).extent(None, None)
    if extent is None:
        return None
    query = Query("step", "ratio", since=extent[0], until=extent[0] + 1)
    return next((each.value for each in history(connection, run, series, query).points), None)


def _course(connection: Connection, run: RunRow, key: str) -> tuple[float, ...]:
    """A ratio over the last steps that have it, oldest first; without what is not finite."""
    series = find_series(connection, run, key)
    if series is None:
        return ()
    extent = StepAxis(connection, series, run.line).extent(None, None)
    if extent is None:
        return ()
    since, until = max(extent[0], extent[1] + 1 - COURSE_STEPS), extent[1] + 1
    query = Query("step", "ratio", since=since, until=until, max_points=COURSE_POINTS)
    points = history(connection, run, series, query).points
    return tuple(each for each in points.value if each is not None and math.isfinite(each))


def _totals(connection: Connection, run: RunRow, since: int) -> dict[str, Total]:
    series, table = schema.series, schema.partials
    key = series.c.key
    rows = connection.execute(
        select(
            key, func.sum(table.c.sum_high), func.sum(table.c.denominator_high), func.sum(table.c.n)
        )
        .join(table, table.c.series_id == series.c.id)
        .where(
            series.c.run_id == run.id,
            or_(
                key.in_(KEYS),
                *(
                    key.startswith(prefix, autoescape=True)
                    for prefix in (REWARDS, FUNCTION_SECONDS, REJECTED)
                ),
            ),
            on_line(run.line),
            table.c.step >= since,
        )
        .group_by(key)
        .order_by(key)
    )
    return {
        name: Total(total, under, None if number is None else int(number))
        for name, total, under, number in rows
    }


def _named(totals: Mapping[str, Total], prefix: str) -> list[str]:
    return [key.removeprefix(prefix) for key in totals if key.startswith(prefix)]


def _sum(totals: Mapping[str, Total], key: str) -> float | None:
    return _finite(totals[key].sum) if key in totals else None


def _number(n: int | None) -> float | None:
    return None if n is None else float(n)


def _finite(value: float) -> float | None:
    """A sum that has overflowed is no measurement."""
    return value if math.isfinite(value) else None
