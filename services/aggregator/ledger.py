"""The ledger: where every group of a run is, counted exactly, whatever order events come in.

A group's state is the highest that was said of it. Each change of one moves it from one count to
another in the same transaction, so that counts follow from groups by construction; on PostgreSQL
the ledger of a run has one writer at a time. Details are kept of the groups in flight and of those
that finished last; the others are archived (archive.py), where a late event finds them.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from services.aggregator import archive, said, schema, statements
from services.aggregator.archive import Archived
from services.aggregator.batch import GroupEvent
from services.aggregator.group_ids import GroupId, parse
from services.aggregator.said import Said

WRITING = 7_204_304
"""With the run's id, an advisory lock on PostgreSQL: of two writers of a ledger one waits."""

GROUPS_AT_ONCE = 500
"""Of one query."""

PRUNED_AT_ONCE = 1024
"""Groups that one transaction archives: batches wait for it."""

SLACK = 0.01
"""Share of the groups kept by which there may be more of them, so that pruning is seldom."""

ATTEMPT_ENDED = "attempt_ended"
"""Why a group of an earlier attempt is dropped that the trainer did not take over."""

CountKey = tuple[bool, int, str]
"""(evaluation, state, reason); reasons only of dropped and given up."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A group in detail."""

    id: int | None
    """Its row; None before it has one."""
    row_index: int
    history: dict[int, Said]

    def values(self, group: GroupId) -> dict[str, Any]:
        """Its row's columns."""
        state, reason = said.highest(self.history)
        first_s = min(each.first_s for each in self.history.values())
        ended = [each.first_s for n, each in self.history.items() if n >= said.FIRST_TERMINAL]
        # Nobody waits for the end of an evaluation's group: none is said.
        finished_s = first_s if group.is_evaluation else min(ended, default=None)
        return {
            "row_index": self.row_index,
            "state": state,
            "reason": reason,
            "step": said.trained_step(self.history),
            "first_s": first_s,
            "finished_s": finished_s,
            "history": said.encode(self.history),
        }


def write(connection: Connection, run_id: int, events: Iterable[tuple[GroupEvent, float]]) -> None:
    """Add events with their times, in seconds since 1970, in any order and however often."""
    new: defaultdict[str, list[tuple[GroupEvent, float]]] = defaultdict(list)
    for event, at_s in events:
        new[event.group_id].append((event, at_s))
    if not new:
        return
    lock(connection, run_id)
    groups = {name: _parsed(name) for name in sorted(new)}
    kept = _kept(connection, run_id, [*groups])
    archived = archive.find(
        connection, run_id, (group for name, group in groups.items() if name not in kept)
    )
    counts: Counter[CountKey] = Counter()
    rows: list[tuple[str, _Kept, dict[str, Any]]] = []
    raised: dict[GroupId, Archived] = {}
    for name, group in groups.items():
        if group in archived:
            before = archived[group]
            after = _raised(before, new[name])
            if after != before:
                raised[group] = after
                _move(counts, group, (before.state, before.reason), (after.state, after.reason))
            continue
        held = kept.get(name)
        merged = _merged(held, new[name])
        if held != merged:
            highest = None if held is None else said.highest(held.history)
            _move(counts, group, highest, said.highest(merged.history))
            rows.append((name, merged, merged.values(group)))
    _write_rows(connection, run_id, rows)
    if raised:
        archive.put(connection, run_id, raised)
    _add_counts(connection, run_id, counts)


def lock(connection: Connection, run_id: int) -> None:
    """Be the only writer of a run's ledger until the transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(WRITING, run_id)))


def to_prune(connection: Connection, *, keep_groups: int) -> int | None:
    """A run with more than `keep_groups` (and SLACK) finished groups in detail; None without."""
    run_ids: list[int] = list(connection.scalars(select(schema.runs.c.id)))
    for run_id in run_ids:
        if _num_finished(connection, run_id) > keep_groups * (1 + SLACK):
            return run_id
    return None


def prune(connection: Connection, run_id: int, *, keep_groups: int) -> int:
    """Archive the groups that finished first, PRUNED_AT_ONCE at most, until `keep_groups` are left
    beside those in flight; how many were. Counts stay as they are.
    """
    lock(connection, run_id)
    excess = _num_finished(connection, run_id) - keep_groups
    if excess <= 0:
        return 0
    table = schema.ledger_groups
    columns = (table.c.group_id, table.c.state, table.c.reason, table.c.step, table.c.row_index)
    rows = connection.execute(
        select(table.c.id, *columns)
        .where(table.c.run_id == run_id, table.c.finished_s.is_not(None))
        .order_by(table.c.finished_s, table.c.first_s, table.c.id)
        .limit(min(excess, PRUNED_AT_ONCE))
    ).all()
    archive.put(
        connection,
        run_id,
        {
            _parsed(row.group_id): Archived(row.state, row.reason, row.step, row.row_index)
            for row in rows
        },
    )
    pruned = [{"pruned": row.id} for row in rows]
    connection.execute(delete(table).where(table.c.id == bindparam("pruned")), pruned)
    return len(rows)


def end_attempts(
    connection: Connection,
    run_id: int,
    *,
    attempt: int,
    first_step: int,
    adopted: Collection[str],
    at_s: float,
    worker: str,
) -> None:
    """What a start of the trainer means for the groups of earlier attempts: those in flight that
    it did not adopt are dropped (attempt_ended), those trained in a step that it makes again, from
    `first_step` on, are rolled back. Call it before events of that attempt are added.
    """
    lock(connection, run_id)
    keep = set(adopted)
    ended = [
        _event(name, said.DROPPED, worker=worker, at_s=at_s, reason=ATTEMPT_ENDED)
        for name in _in_flight(connection, run_id)
        if _parsed(name).attempt < attempt and name not in keep
    ]
    undone = [
        _event(name, said.ROLLED_BACK, worker=worker, at_s=at_s, step=step)
        for name, step in _trained(connection, run_id, first_step)
        if _parsed(name).attempt < attempt and name not in keep
    ]
    write(connection, run_id, ((event, at_s) for event in (*ended, *undone)))


def recount(connection: Connection, run_id: int) -> Counter[CountKey]:
    """The counts, from the groups themselves; what schema.ledger_counts must say."""
    counts: Counter[CountKey] = Counter()
    table = schema.ledger_groups
    for name, state, reason in connection.execute(
        select(table.c.group_id, table.c.state, table.c.reason).where(table.c.run_id == run_id)
    ):
        counts[_count_key(_parsed(name), state, reason)] += 1
    for group, found in archive.everything(connection, run_id):
        counts[_count_key(group, found.state, found.reason)] += 1
    return counts


def _parsed(name: str) -> GroupId:
    group = parse(name)
    assert group is not None, f"{name} was taken for a group's name"
    return group


def _event(
    name: str, state: int, *, worker: str, at_s: float, reason: str = "", step: int | None = None
) -> GroupEvent:
    return GroupEvent(
        group_id=name,
        row_index=0,
        state=state,
        reason=reason,
        step=step,
        worker=worker,
        at_s=at_s,
    )


def _kept(connection: Connection, run_id: int, names: list[str]) -> dict[str, _Kept]:
    table = schema.ledger_groups
    kept = {}
    for start in range(0, len(names), GROUPS_AT_ONCE):
        some = names[start : start + GROUPS_AT_ONCE]
        for row_id, name, row_index, history in connection.execute(
            select(table.c.id, table.c.group_id, table.c.row_index, table.c.history).where(
                table.c.run_id == run_id, table.c.group_id.in_(some)
            )
        ):
            kept[name] = _Kept(row_id, row_index, said.decode(history))
    return kept


def _merged(held: _Kept | None, events: Iterable[tuple[GroupEvent, float]]) -> _Kept:
    held = held or _Kept(None, 0, {})
    row_index, said_now = held.row_index, []
    for event, at_s in events:
        # Who does not know the row says 0.
        row_index = max(row_index, event.row_index)
        one = Said.once(at_s, event.worker, reason=event.reason, step=event.step)
        said_now.append((event.state, one))
    return _Kept(held.id, row_index, said.merge(held.history, said_now))


def _raised(found: Archived, events: Iterable[tuple[GroupEvent, float]]) -> Archived:
    for event, _ in events:
        found = archive.raised(
            found, state=event.state, reason=event.reason, step=event.step, row=event.row_index
        )
    return found


def _move(
    counts: Counter[CountKey],
    group: GroupId,
    before: tuple[int, str] | None,
    after: tuple[int, str],
) -> None:
    if before is not None:
        counts[_count_key(group, *before)] -= 1
    counts[_count_key(group, *after)] += 1


def _count_key(group: GroupId, state: int, reason: str) -> CountKey:
    tells = state in (said.DROPPED, said.GIVEN_UP)
    return (group.is_evaluation, state, reason if tells else "")


def _write_rows(
    connection: Connection, run_id: int, rows: Iterable[tuple[str, _Kept, dict[str, Any]]]
) -> None:
    table = schema.ledger_groups
    new, changed = [], []
    for name, kept, values in rows:
        if kept.id is None:
            new.append({"run_id": run_id, "group_id": name, **values})
        else:
            changed.append({"row_id": kept.id, **values})
    if new:
        connection.execute(insert(table), new)
    if changed:
        names = [name for name in changed[0] if name != "row_id"]
        statement = update(table).where(table.c.id == bindparam("row_id"))
        connection.execute(statement.values({n: bindparam(n) for n in names}), changed)


def _add_counts(connection: Connection, run_id: int, counts: Mapping[CountKey, int]) -> None:
    rows = [
        {
            "run_id": run_id,
            "evaluation": evaluation,
            "state": state,
            "reason": reason,
            "num_groups": number,
        }
        for (evaluation, state, reason), number in sorted(counts.items())
        if number
    ]
    statements.add_up(connection, schema.ledger_counts, rows, column="num_groups")


def _num_finished(connection: Connection, run_id: int) -> int:
    table = schema.ledger_groups
    finished = (table.c.run_id == run_id) & table.c.finished_s.is_not(None)
    return connection.scalar(select(func.count()).select_from(table).where(finished)) or 0


def _in_flight(connection: Connection, run_id: int) -> list[str]:
    table = schema.ledger_groups
    return list(
        connection.scalars(
            select(table.c.group_id).where(table.c.run_id == run_id, table.c.finished_s.is_(None))
        )
    )


def _trained(
    connection: Connection, run_id: int, first_step: int
) -> Iterator[tuple[str, int | None]]:
    table = schema.ledger_groups
    rows = connection.execute(
        select(table.c.group_id, table.c.step).where(
            table.c.run_id == run_id, table.c.step >= first_step, table.c.state == said.TRAINED
        )
    )
    yield from ((name, step) for name, step in rows.all())
    for group, found in archive.trained_from(connection, run_id, first_step):
        if found.state == said.TRAINED:
            yield str(group), found.step
