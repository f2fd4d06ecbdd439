"""Traces in the store: the newest of a run, within bounds of their number and their bytes.

A trace is named by its rollout: the same again changes nothing, by whichever scorer or aggregator
it comes. Where its group is, and the step that trained it, is asked of the ledger when it is read.
"""

import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.v1 import trace_pb2
from sqlalchemy import Connection, delete, func, select

from services.aggregator import archive, group_ids, lineage, schema
from services.aggregator.said import STATES
from services.aggregator.series import RunRow
from services.aggregator.statements import insert_new
from services.aggregator.traces import END_REASONS, Trace, encode_summary
from services.common.traces_config import Traces

WRITING = 7_204_305
"""With the run's id, an advisory lock on PostgreSQL: bounds hold with several writers."""

COMPRESSION = 1
"""Of zlib: a writer has no time for more, and text by token repeats itself."""

NAMES_AT_ONCE = 500
"""Of one query."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which traces a list is of; None does not restrict."""

    version: int | None = None
    """The oldest version of its group."""
    step: int | None = None
    """The optimizer step that trained its group, also where it was rolled back."""
    function: str | None = None
    """A reward function that did not abstain; the range is then of its reward."""
    reward_min: float | None = None
    reward_max: float | None = None
    """Of the total where no function is named; both ends belong to the range."""
    tool: str | None = None
    """A tool that was called."""
    end: str | None = None
    """Why it ended."""

    def admits(self, summary: dict[str, Any]) -> bool:
        """Whether a trace with this summary has the rewards and tools that are wanted."""
        if self.tool is not None and self.tool not in summary["tools"]:
            return False
        if self.function is None and self.reward_min is None and self.reward_max is None:
            return True
        reward = (
            summary["reward"] if self.function is None else summary["rewards"].get(self.function)
        )
        if reward is None:
            return False
        above = self.reward_min is None or reward >= self.reward_min
        return above and (self.reward_max is None or reward <= self.reward_max)


@dataclass(frozen=True, slots=True)
class Kept:
    """A trace as it is stored, without its body."""

    id: int
    """Rising with the time at which it came."""
    rollout_id: str
    group_id: str
    row_index: int
    version: int
    end: str
    at_s: float
    """When it was scored, in seconds since 1970."""
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where the group of a trace is, as the ledger knows."""

    state: str
    step: int | None
    """The step that trained it."""
    reason: str


def write(
    connection: Connection,
    run_id: int,
    traces: Collection[tuple[Trace, float]],
    *,
    settings: Traces,
) -> None:
    """Add traces with their times, in seconds since 1970, as many of each version as they say at
    most; then delete the oldest of the run beyond `settings.keep` and `settings.keep_bytes`.
    """
    if not traces:
        return
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(WRITING, run_id)))
    table, ordered = schema.traces, sorted(traces, key=lambda pair: (pair[1], pair[0].rollout_id))
    known = _known(connection, run_id, {trace.rollout_id for trace, _ in ordered})
    held = _held(connection, run_id, {trace.version for trace, _ in ordered})
    rows = []
    for trace, at_s in ordered:
        if trace.rollout_id in known or held[trace.version] >= trace.per_version:
            continue
        known.add(trace.rollout_id)
        held[trace.version] += 1
        body, summary = zlib.compress(trace.body, COMPRESSION), encode_summary(trace)
        rows.append(
            {
                "run_id": run_id,
                "rollout_id": trace.rollout_id,
                "group_id": trace.group_id,
                "row_index": trace.row_index,
                "version": trace.version,
                "end_reason": trace.end_reason,
                "at_s": at_s,
                "num_bytes": len(body) + len(summary),
                "summary": summary,
                "body": body,
            }
        )
    insert_new(connection, table, rows)
    _prune(connection, run_id, settings)


def find(
    connection: Connection, run: RunRow, rollout_id: str
) -> tuple[Kept, trace_pb2.RolloutTrace] | None:
    """A trace and all that was said; None where it is not kept."""
    table = schema.traces
    row = connection.execute(
        select(table).where(table.c.run_id == run.id, table.c.rollout_id == rollout_id)
    ).first()
    if row is None:
        return None
    return _kept(row), trace_pb2.RolloutTrace.FromString(zlib.decompress(row.body))


def newest(
    connection: Connection, run: RunRow, wanted: Wanted, *, before: int | None, limit: int
) -> list[Kept]:
    """At most `limit` traces, the newest first, of those whose id is below `before`."""
    table = schema.traces
    columns = [column for column in table.columns if column.name != "body"]
    query = select(*columns).where(table.c.run_id == run.id)
    if before is not None:
        query = query.where(table.c.id < before)
    if wanted.version is not None:
        query = query.where(table.c.version == wanted.version)
    if wanted.end is not None:
        numbers = [number for number, name in END_REASONS.items() if name == wanted.end]
        query = query.where(table.c.end_reason.in_(numbers))
    groups = None
    if wanted.step is not None:
        listed, _ = lineage.of_step(connection, run, wanted.step)
        groups = {str(each.group) for each in listed}
    found: list[Kept] = []
    for row in connection.execute(query.order_by(table.c.id.desc())):
        if groups is not None and row.group_id not in groups:
            continue
        kept = _kept(row)
        if wanted.admits(kept.summary):
            found.append(kept)
        if len(found) >= limit:
            break
    return found


def outcomes(connection: Connection, run: RunRow, names: Iterable[str]) -> dict[str, Outcome]:
    """What the ledger knows of some groups, by name; those that it never heard of are left out."""
    found: dict[str, Outcome] = {}
    table = schema.ledger_groups
    for part in _parts(sorted(set(names))):
        for row in connection.execute(
            select(table.c.group_id, table.c.state, table.c.step, table.c.reason).where(
                table.c.run_id == run.id, table.c.group_id.in_(part)
            )
        ):
            found[row.group_id] = Outcome(STATES[row.state], row.step, row.reason)
        missing = [group_ids.parse(name) for name in part if name not in found]
        old = archive.find(connection, run.id, [group for group in missing if group is not None])
        for group, each in old.items():
            found[str(group)] = Outcome(STATES[each.state], each.step, each.reason)
    return found


def _kept(row: Any) -> Kept:
    return Kept(
        id=row.id,
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        row_index=row.row_index,
        version=row.version,
        end=END_REASONS[row.end_reason],
        at_s=row.at_s,
        summary=json.loads(row.summary),
    )


def _known(connection: Connection, run_id: int, rollout_ids: set[str]) -> set[str]:
    table = schema.traces
    found: set[str] = set()
    for part in _parts(sorted(rollout_ids)):
        found.update(
            connection.scalars(
                select(table.c.rollout_id).where(
                    table.c.run_id == run_id, table.c.rollout_id.in_(part)
                )
            )
        )
    return found


def _held(connection: Connection, run_id: int, versions: set[int]) -> Counter[int]:
    """How many of each version are kept."""
    table = schema.traces
    found: Counter[int] = Counter()
    for part in _parts(sorted(versions)):
        for version, number in connection.execute(
            select(table.c.version, func.count())
            .where(table.c.run_id == run_id, table.c.version.in_(part))
            .group_by(table.c.version)
        ):
            found[version] = number
    return found


def _prune(connection: Connection, run_id: int, settings: Traces) -> None:
    table = schema.traces
    of_run = table.c.run_id == run_id
    num_bytes = 0
    for position, row in enumerate(
        connection.execute(
            select(table.c.id, table.c.num_bytes).where(of_run).order_by(table.c.id.desc())
        )
    ):
        num_bytes += row.num_bytes
        if position >= settings.keep or num_bytes > settings.keep_bytes:
            break
    else:
        return
    connection.execute(delete(table).where(of_run, table.c.id <= row.id))


def _parts(values: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(values), NAMES_AT_ONCE):
        yield values[start : start + NAMES_AT_ONCE]
