"""Runs as a whole: who was seen when, how far each attempt came, and where the groups are."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from services.aggregator import schema
from services.aggregator.said import DROPPED, GIVEN_UP, STATES, TERMINAL
from services.aggregator.series import RunRow


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the trainer, as its numbers tell."""

    attempt: int
    first_step: int
    last_step: int
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class Producer:
    """One process that has sent metrics."""

    name: str
    service: str
    first_s: float
    last_s: float
    missing_batches: int
    """Sequences that were never received although later ones were."""


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """How many groups are in each state; the highest state that was said of a group wins."""

    states: dict[str, int]
    reasons: dict[str, dict[str, int]]
    """Of dropped and given up."""
    evaluation: dict[str, int]
    """States of evaluation groups."""

    @property
    def total(self) -> int:
        """Groups dispatched."""
        return sum(self.states.values())

    @property
    def in_flight(self) -> int:
        """Groups in no terminal state."""
        return sum(n for state, n in self.states.items() if state not in TERMINAL)


def run_names(connection: Connection) -> list[str]:
    """All runs, the one that was heard of last first."""
    runs = schema.runs
    return list(connection.scalars(select(runs.c.name).order_by(runs.c.last_s.desc())))


def attempts(connection: Connection, run: RunRow) -> list[Attempt]:
    """The attempts of a run, in order. What services send before they have heard of a trainer is of
    attempt 0, which is none."""
    table = schema.attempts
    rows = connection.execute(
        select(
            table.c.attempt, table.c.first_step, table.c.last_step, table.c.first_s, table.c.last_s
        )
        .where(table.c.run_id == run.id, table.c.attempt > 0)
        .order_by(table.c.attempt)
    )
    return [Attempt(*row) for row in rows]


def producers(connection: Connection, run: RunRow) -> list[Producer]:
    """Who has sent metrics, by name."""
    table, boots, batches = schema.producers, schema.boots, schema.batches
    above = select(func.count()).where(batches.c.boot == boots.c.id).scalar_subquery()
    missing = func.coalesce(func.sum(boots.c.highest - boots.c.floor - above), 0)
    rows = connection.execute(
        select(table.c.name, table.c.service, table.c.first_s, table.c.last_s, missing)
        .join(boots, boots.c.producer_id == table.c.id, isouter=True)
        .where(table.c.run_id == run.id)
        .group_by(table.c.id, table.c.name, table.c.service, table.c.first_s, table.c.last_s)
        .order_by(table.c.name)
    )
    return [Producer(*row) for row in rows]


def group_counts(connection: Connection, run: RunRow) -> GroupCounts:
    """Where the groups of a run are."""
    table = schema.ledger_counts
    states, evaluation = Counter(dict.fromkeys(STATES.values(), 0)), Counter[str]()
    reasons: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for is_evaluation, number, reason, groups in connection.execute(
        select(table.c.evaluation, table.c.state, table.c.reason, table.c.num_groups)
        .where(table.c.run_id == run.id, table.c.num_groups != 0)
        .order_by(table.c.reason)
    ):
        state = STATES[number]
        if is_evaluation:
            evaluation[state] += groups
            continue
        states[state] += groups
        if number in (DROPPED, GIVEN_UP):
            reasons[state][reason] = groups
    return GroupCounts(dict(states), dict(reasons), dict(evaluation))
