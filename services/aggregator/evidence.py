"""Reads the window that a verdict rests on from the store: the last steps of the surviving line."""

from sqlalchemy import Connection, func, select

from services.aggregator import schema
from services.aggregator.fleet_evidence import read_replicas
from services.aggregator.history import Query, history
from services.aggregator.lengths import STEP_KEY
from services.aggregator.lines import on_line
from services.aggregator.reduce import Reduction
from services.aggregator.series import RunRow, find_series
from services.aggregator.window import STEP_PARTS, Step, Window

POOLED: dict[str, tuple[str, Reduction]] = {
    "groups_per_step": ("batch/groups_per_step", "mean"),
    "requests_waiting": ("queue/waiting/requests", "mean"),
    "requests_held": ("queue/held/requests", "mean"),
    "groups_waiting": ("queue/waiting/groups", "mean"),
    "samples_waiting": ("queue/waiting/samples", "mean"),
    "slots_busy_frac": ("rollout/slots_busy_frac", "ratio"),
    "slots_starved_frac": ("rollout/slots_starved_frac", "ratio"),
    "scorer_busy_frac": ("rollout/scorer_busy_frac", "ratio"),
    "scorer_load_frac": ("rollout/scorer_load_frac", "ratio"),
    "score_block_s": ("rollout/score_block_s", "sum"),
    "backpressure_s": ("rollout/backpressure_s", "sum"),
    "outstanding_frac": ("pace/outstanding_frac", "ratio"),
    "generator_paused_frac": ("perf/generator_paused_frac", "ratio"),
    "duration_s": ("rollout/duration_s", "mean"),
    "tool_s": ("rollout/tool_s", "mean"),
    "env_s": ("rollout/env_s", "mean"),
}
"""Fields of a window, each with its metric, reduced over all steps at once."""

COUNTED = {"groups_generated": "rollout/request_wait_s", "groups_scored": "rollout/score_s"}
"""Fields that are the number of observations: generators and scorers record one a group."""

TOOL_LATENCY = ("tools/", "/latency_s")
"""Around a tool's name."""

ENVIRONMENT_SECONDS = ("rollout/env_s/", "")
"""Around an environment's name."""

FUNCTION_SECONDS = ("reward/function_s/", "")
"""Around a reward function's name."""


def read_window(connection: Connection, run: RunRow, *, num_steps: int) -> Window:
    """The last `num_steps` steps whose length is known, and what was measured during them.

    What has no value is absent (None). The first step of an attempt has no length.
    """
    lengths = _last_lengths(connection, run, num_steps)
    if not lengths:
        return Window(steps=())
    since, until = min(lengths), max(lengths) + 1
    generators, scorers = read_replicas(connection, run, since, until)
    parts = {
        part: values(connection, run, f"perf/{part}", "mean", since, until, until - since)
        for part in STEP_PARTS
    }
    return Window(
        steps=tuple(
            Step(
                step=step,
                step_s=lengths[step],
                **{part: found.get(step) for part, found in parts.items()},
            )
            for step in sorted(lengths)
        ),
        tool_latency_s=_seconds_by_name(connection, run, TOOL_LATENCY, since, until),
        environment_s=_seconds_by_name(connection, run, ENVIRONMENT_SECONDS, since, until),
        function_s=_seconds_by_name(connection, run, FUNCTION_SECONDS, since, until),
        generators=generators,
        scorers=scorers,
        **{
            field: next(
                iter(values(connection, run, key, reduction, since, until, 1).values()), None
            )
            for field, (key, reduction) in POOLED.items()
        },
        **{
            field: _observations(connection, run, key, since, until)
            for field, key in COUNTED.items()
        },
    )


def _last_lengths(connection: Connection, run: RunRow, num_steps: int) -> dict[int, float]:
    """Seconds of the last steps that have them, by step."""
    series = find_series(connection, run, STEP_KEY)
    if series is None:
        return {}
    table = schema.partials
    newest: list[int] = []
    for segment in run.line:  # the latest attempt first
        if len(newest) == num_steps:
            break
        newest += connection.scalars(
            select(table.c.step)
            .where(
                table.c.series_id == series.id,
                table.c.attempt == segment.attempt,
                table.c.step >= segment.first,
                *((table.c.step < segment.end,) if segment.end is not None else ()),
                table.c.n > 0,
            )
            .distinct()
            .order_by(table.c.step.desc())
            .limit(num_steps - len(newest))
        ).all()
    if not newest:
        return {}
    since, until = min(newest), max(newest) + 1
    found = values(connection, run, STEP_KEY, "mean", since, until, until - since)
    return {step: seconds for step, seconds in found.items() if seconds > 0}


def values(
    connection: Connection,
    run: RunRow,
    key: str,
    reduction: Reduction,
    since: int,
    until: int,
    max_points: int,
    *,
    width: int | None = None,
) -> dict[int, float]:
    """Values of since <= step < until, by the first step of each of `max_points` windows; of
    windows of `width` steps, which begin at multiples of it, where that is given."""
    series = find_series(connection, run, key)
    if series is None:
        return {}
    query = Query("step", reduction, since=since, until=until, max_points=max_points, width=width)
    points = history(connection, run, series, query).points
    return {x: value for x, value in zip(points.x, points.value, strict=True) if value is not None}


def _observations(
    connection: Connection, run: RunRow, key: str, since: int, until: int
) -> float | None:
    """How many values were observed; None for none."""
    series, table = find_series(connection, run, key), schema.partials
    if series is None:
        return None
    found: int | None = connection.scalar(
        select(func.sum(table.c.n)).where(
            table.c.series_id == series.id,
            on_line(run.line),
            table.c.step >= since,
            table.c.step < until,
        )
    )
    return float(found) if found else None


def _seconds_by_name(
    connection: Connection, run: RunRow, around: tuple[str, str], since: int, until: int
) -> dict[str, float]:
    """Seconds spent in each tool, environment or reward function."""
    before, after = around
    series, table = schema.series, schema.partials
    rows = connection.execute(
        select(series.c.key, func.sum(table.c.sum_high))
        .join(table, table.c.series_id == series.c.id)
        .where(
            series.c.run_id == run.id,
            series.c.key.startswith(before, autoescape=True),
            series.c.key.endswith(after, autoescape=True),
            on_line(run.line),
            table.c.step >= since,
            table.c.step < until,
        )
        .group_by(series.c.key)
        .order_by(series.c.key)
    )
    # The latency of all tools together has no name between the two.
    return {
        key.removeprefix(before).removesuffix(after): seconds
        for key, seconds in rows
        if len(key) > len(before) + len(after)
    }
