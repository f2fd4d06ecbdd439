"""Reads from the store what each live replica did in a window, for the verdict to name one."""

from collections.abc import Sequence

from sqlalchemy import Connection, func, select

from services.aggregator import overview, schema
from services.aggregator.lagging import Replica
from services.aggregator.lines import on_line
from services.aggregator.series import RunRow

LIVE_S = 60.0
"""A replica that was not heard of for so long, beside the newest word of the run, is not live."""

VERSION_STEPS = 512
"""How far back a replica's version is looked for: it is recorded when it is loaded."""

TOKENS_KEY = "rollout/generated_tok_s"
SLOTS_KEY = "rollout/slots_busy_frac"
PAUSED_KEY = "perf/generator_paused_frac"
VERSION_KEY = "policy/served_version"
SCORING_KEY = "rollout/score_s"

Totals = dict[str, dict[str, tuple[float, float | None, int | None, float | None]]]
"""By key and replica: sum, denominator, number and largest of all that was recorded."""


def read_replicas(
    connection: Connection, run: RunRow, since: int, until: int
) -> tuple[tuple[Replica, ...], tuple[Replica, ...]]:
    """The live generators and scorers, by name, with what they did in since <= step < until."""
    work = _totals(connection, run, (TOKENS_KEY, SLOTS_KEY, PAUSED_KEY, SCORING_KEY), since, until)
    versions = _totals(connection, run, (VERSION_KEY,), min(since, until - VERSION_STEPS), until)
    generators, scorers = [], []
    for each in overview.producers(connection, run):
        if each.last_s < run.last_s - LIVE_S:
            continue
        if each.service == "generator":
            generators.append(_generator(each.name, {**work, **versions}))
        elif each.service == "scorer":
            scorers.append(_scorer(each.name, work))
    return tuple(generators), tuple(scorers)


def _generator(name: str, totals: Totals) -> Replica:
    tokens, slots = totals[TOKENS_KEY].get(name), totals[SLOTS_KEY].get(name)
    paused, version = totals[PAUSED_KEY].get(name), totals[VERSION_KEY].get(name)
    return Replica(
        name=name,
        work=None if tokens is None else tokens[0],
        busy_s=None if slots is None else slots[0],
        paused_frac=None if paused is None or not paused[1] else paused[0] / paused[1],
        version=None if version is None else version[3],
    )


def _scorer(name: str, totals: Totals) -> Replica:
    scored = totals[SCORING_KEY].get(name)
    if scored is None:
        return Replica(name=name)
    return Replica(name=name, work=float(scored[2] or 0), busy_s=scored[0])


def _totals(
    connection: Connection, run: RunRow, keys: Sequence[str], since: int, until: int
) -> Totals:
    series, table = schema.series, schema.partials
    sources, producers = schema.sources, schema.producers
    rows = connection.execute(
        select(
            series.c.key,
            producers.c.name,
            func.sum(table.c.sum_high),
            func.sum(table.c.denominator_high),
            func.sum(table.c.n),
            func.max(table.c.maximum),
        )
        .join(table, table.c.series_id == series.c.id)
        .join(sources, sources.c.id == table.c.source_id)
        .join(producers, producers.c.id == sources.c.producer_id)
        .where(
            series.c.run_id == run.id,
            series.c.key.in_(keys),
            on_line(run.line),
            table.c.step >= since,
            table.c.step < until,
        )
        .group_by(series.c.key, producers.c.name)
    )
    found: Totals = {key: {} for key in keys}
    for key, name, total, under, number, largest in rows:
        found[key][name] = (total, under, None if number is None else int(number), largest)
    return found
