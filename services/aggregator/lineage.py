"""Reading the ledger: what became of the groups of a run, and the way of one of them.

From a step to its groups and their rows, and from a row to its groups and their steps: both also
for groups whose details were pruned.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from sqlalchemy import ColumnElement, Connection, func, select

from services.aggregator import archive, overview, said, schema
from services.aggregator.archive import Archived
from services.aggregator.group_ids import EVALUATION, GroupId, parse
from services.aggregator.said import STATES, Said
from services.aggregator.series import RunRow

MAX_OLDEST = 20
"""Groups in flight that an account lists, oldest first."""

MAX_NAMED = 100
"""Groups that an account names: of those stuck, and of those given up."""

MAX_LISTED = 10_000
"""Groups of one step or row that an answer lists; their number is exact."""

HELD = ("generating", "scoring", "queued")
"""States in which somebody holds a group; in the others it waits in a stream."""

STAGES = (
    ("wait_for_generator_s", "dispatched", ("generating",)),
    ("generation_s", "generating", ("generated",)),
    ("wait_for_scorer_s", "generated", ("scoring",)),
    ("scoring_s", "scoring", ("scored",)),
    ("wait_for_trainer_s", "scored", said.TERMINAL),
)
"""Each stage of a group's way, by the states between which it is."""

NUMBERS = {name: number for number, name in STATES.items()}


@dataclass(frozen=True, slots=True)
class InFlight:
    """A group that has not ended."""

    group_id: str
    row_index: int
    state: str
    age_s: float
    """Since it was dispatched, or first heard of."""
    in_state_s: float
    """Since it came to this state."""
    holder: str | None
    """Who works on it; None while it waits in a stream."""


@dataclass(frozen=True, slots=True)
class Account:
    """All groups of a run; the numbers are exact, the lists are bounded."""

    counts: overview.GroupCounts
    in_detail: int
    archived: int
    """Groups with all that was said of them, and those whose details were pruned: counted one by
    one, apart from their states, and without those of evaluations."""
    given_up: tuple[str, ...]
    """The last MAX_NAMED."""
    oldest: tuple[InFlight, ...]
    stuck: tuple[InFlight, ...]
    num_stuck: int

    @property
    def dispatched(self) -> int:
        """Groups that were heard of."""
        return self.in_detail + self.archived

    @property
    def balanced(self) -> bool:
        """dispatched = trained + rolled back + dropped + given up + in flight."""
        return self.dispatched == self.counts.total


@dataclass(frozen=True, slots=True)
class Listed:
    """A group in a list."""

    group: GroupId
    row_index: int
    state: str
    reason: str
    step: int | None
    """The optimizer step that trained it."""
    in_detail: bool
    """False: its details were pruned."""


@dataclass(frozen=True, slots=True)
class Detail:
    """All that is known of a group."""

    listed: Listed
    history: Mapping[int, Said]
    stages: Mapping[str, float | None]
    """By name, seconds; None where an end of the stage was not said."""
    total_s: float | None
    """From dispatch to its end; None while it is in flight."""


def account(connection: Connection, run: RunRow, *, now_s: float, stuck_after_s: float) -> Account:
    """What became of the groups of a run."""
    table = schema.ledger_groups
    in_flight = (table.c.run_id == run.id) & table.c.finished_s.is_(None)
    overdue = in_flight & (table.c.first_s < now_s - stuck_after_s)
    evaluation = table.c.group_id.startswith(f"{EVALUATION}.", autoescape=True)
    in_detail = connection.scalar(
        select(func.count()).select_from(table).where(table.c.run_id == run.id, ~evaluation)
    )
    num_stuck = connection.scalar(select(func.count()).select_from(table).where(overdue))
    stuck = _in_flight(connection, overdue, now_s=now_s, limit=MAX_NAMED)
    return Account(
        counts=overview.group_counts(connection, run),
        in_detail=in_detail or 0,
        archived=archive.num_groups(connection, run.id),
        given_up=tuple(islice(_given_up(connection, run), MAX_NAMED)),
        oldest=_in_flight(connection, in_flight, now_s=now_s, limit=MAX_OLDEST),
        stuck=stuck,
        num_stuck=num_stuck or 0,
    )


def detail(connection: Connection, run: RunRow, group: GroupId) -> Detail | Listed | None:
    """All that is known of a group; only what became of it where its details were pruned, None
    where it was never heard of.
    """
    table = schema.ledger_groups
    row = connection.execute(
        select(table).where(table.c.run_id == run.id, table.c.group_id == str(group))
    ).first()
    if row is None:
        found = archive.find(connection, run.id, [group]).get(group)
        return None if found is None else _archived(group, found)
    history = said.decode(row.history)
    listed = Listed(group, row.row_index, STATES[row.state], row.reason, row.step, in_detail=True)
    took_s = None if row.finished_s is None else row.finished_s - row.first_s
    total_s = None if took_s is None else round(took_s, said.TIME_DIGITS)
    return Detail(listed, history, stages(history), total_s)


def stages(history: Mapping[int, Said]) -> dict[str, float | None]:
    """Seconds of each stage, between the first statements of its ends; None where one was not said,
    or where the clocks of two hosts would make it negative.

    Example: dispatched at 10 s, generating at 12 s, scored at 30 s: wait_for_generator_s is 2, the
    others are None.
    """
    found: dict[str, float | None] = {}
    for name, begin, ends in STAGES:
        begun = history.get(NUMBERS[begin])
        ended = [history[NUMBERS[end]].first_s for end in ends if NUMBERS[end] in history]
        took_s = min(ended) - begun.first_s if begun is not None and ended else None
        found[name] = None if took_s is None or took_s < 0 else round(took_s, said.TIME_DIGITS)
    return found


def of_row(connection: Connection, run: RunRow, row_index: int) -> tuple[list[Listed], int]:
    """The latest MAX_LISTED groups of a row of the dataset in order, and how many there are."""
    archived = archive.of_row(connection, run.id, row_index)
    return _listed(connection, run, schema.ledger_groups.c.row_index == row_index, archived)


def of_step(connection: Connection, run: RunRow, step: int) -> tuple[list[Listed], int]:
    """The groups that an optimizer step trained, those rolled back included; as of_row()."""
    archived = archive.trained_from(connection, run.id, step, end_step=step + 1)
    return _listed(connection, run, schema.ledger_groups.c.step == step, archived)


def latest_step(connection: Connection, run: RunRow) -> int | None:
    """The highest step that is known to have trained a group."""
    found = [
        connection.scalar(select(func.max(column)).where(table.c.run_id == run.id))
        for table, column in (
            (schema.ledger_groups, schema.ledger_groups.c.step),
            (schema.ledger_archive, schema.ledger_archive.c.last_step),
        )
    ]
    return max((step for step in found if step is not None), default=None)


def _listed(
    connection: Connection,
    run: RunRow,
    where: ColumnElement[bool],
    archived: Iterator[tuple[GroupId, Archived]],
) -> tuple[list[Listed], int]:
    table = schema.ledger_groups
    columns = (table.c.group_id, table.c.row_index, table.c.state, table.c.reason, table.c.step)
    groups = [_archived(group, found) for group, found in archived if not group.is_evaluation]
    for row in connection.execute(select(*columns).where(table.c.run_id == run.id, where)):
        group = parse(row.group_id)
        if group is not None and not group.is_evaluation:
            state = STATES[row.state]
            groups.append(Listed(group, row.row_index, state, row.reason, row.step, in_detail=True))
    groups.sort(key=lambda each: each.group)
    return groups[-MAX_LISTED:], len(groups)


def _archived(group: GroupId, found: Archived) -> Listed:
    state = STATES[found.state]
    return Listed(group, found.row_index, state, found.reason, found.step, in_detail=False)


def _in_flight(
    connection: Connection, where: ColumnElement[bool], *, now_s: float, limit: int
) -> tuple[InFlight, ...]:
    table = schema.ledger_groups
    found = []
    for row in connection.execute(
        select(table).where(where).order_by(table.c.first_s).limit(limit)
    ):
        state, last = STATES[row.state], said.decode(row.history)[row.state]
        found.append(
            InFlight(
                group_id=row.group_id,
                row_index=row.row_index,
                state=state,
                age_s=max(0.0, now_s - row.first_s),
                in_state_s=max(0.0, now_s - last.first_s),
                # After a takeover the last one who said so: the first is gone.
                holder=last.last_worker if state in HELD else None,
            )
        )
    return tuple(found)


def _given_up(connection: Connection, run: RunRow) -> Iterator[str]:
    """The groups that were given up, latest first."""
    table = schema.ledger_groups
    yield from connection.scalars(
        select(table.c.group_id)
        .where(table.c.run_id == run.id, schema.GIVEN_UP_ONLY)
        .order_by(table.c.finished_s.desc())
        .limit(MAX_NAMED)
    )
    for group, _ in archive.given_up(connection, run.id):
        yield str(group)
