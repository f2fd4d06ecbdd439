"""The answers, as JSON. A value that is absent is null, never 0 and never NaN."""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from services.aggregator import history
from services.aggregator.reduce import Instrument, Reduction


class Answer(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(use_attribute_docstrings=True)


def moment(seconds: float) -> datetime:
    """A time of the store as JSON shows it: UTC."""
    return datetime.fromtimestamp(seconds, UTC)


class Run(Answer):
    """A run at a glance."""

    run: str
    """Its name."""
    attempt: int | None
    """The latest start of its trainer; null before the first metric."""
    latest_step: int | None
    """The step that is open, as far as the metrics tell."""
    first_seen: datetime
    """Begin of the first thing measured."""
    last_seen: datetime
    """End of the last thing measured."""


class Runs(Answer):
    """All runs, the one heard of last first."""

    runs: list[Run]


class Attempt(Answer):
    """One start of the trainer. Steps that a later attempt made again belong to that one."""

    attempt: int
    first_step: int
    last_step: int
    first_seen: datetime
    last_seen: datetime


class Producer(Answer):
    """A process that has sent metrics."""

    producer: str
    """`service-replica`."""
    service: str
    first_seen: datetime
    last_seen: datetime
    missing_batches: int
    """Batches that have not arrived although later ones did."""


class RunDetail(Run):
    """A run with its attempts and producers."""

    attempts: list[Attempt]
    producers: list[Producer]


class Point(Answer):
    """One window. The counts of what is in no sum are left out where they are 0."""

    x: int
    """The window's first step, or its begin in seconds since 1970."""
    value: float | None
    """The reduced value; null where it is absent."""
    nan: int = 0
    """NaNs observed."""
    pos_inf: int = 0
    """Positive infinities observed."""
    neg_inf: int = 0
    """Negative infinities observed."""

    @classmethod
    def of(cls, point: history.Point) -> "Point":
        """From the store's point."""
        return cls(
            x=point.x,
            value=point.value,
            nan=point.num_nan,
            pos_inf=point.num_pos_inf,
            neg_inf=point.num_neg_inf,
        )


class Latest(Answer):
    """A metric that the run has, and its newest value."""

    key: str
    instrument: Instrument
    unit: str
    reduce: Reduction
    """How `value` was reduced: the metric's default."""
    value: float | None
    """Of the highest step that has one; null where it is absent."""
    step: int | None
    """That step."""
    nan: int = 0
    """NaNs observed in it."""
    pos_inf: int = 0
    """Positive infinities observed in it."""
    neg_inf: int = 0
    """Negative infinities observed in it."""


class Metrics(Answer):
    """The metrics of a run."""

    run: str
    metrics: list[Latest]


class History(Answer):
    """A metric's history, ascending."""

    run: str
    key: str
    instrument: Instrument
    unit: str
    """Of the values, as reduced."""
    axis: history.Axis
    reduce: Reduction
    width: Annotated[int, Field(ge=1)]
    """Steps, or seconds, that a point covers."""
    points: list[Point]
    """Over all producers."""
    by_producer: dict[str, list[Point]] | None = None
    """Of each producer alone; only with group_by=producer."""


class GroupCounts(Answer):
    """How many groups are in each state."""

    run: str
    total: int
    """Groups dispatched: the sum of all states."""
    in_flight: int
    """Groups in no terminal state."""
    states: dict[str, int]
    """By the highest state that was said of a group."""
    reasons: dict[str, dict[str, int]]
    """Of `dropped` and `given_up`, by reason."""
    evaluation: dict[str, int]
    """States of evaluation groups; they are in none of the other numbers."""


class Declared(Answer):
    """A declaration of the catalogue."""

    key: str
    """`{…}` stands for any one part of a key."""
    instrument: Instrument
    unit: str
    """Of a value; of a count's sum."""
    reductions: list[Reduction]
    """What a query may ask for; the first is the default."""
    producers: list[str]
    """Services that record it."""
    meaning: str
    since: str | None
    """The part of the plan that will record it, as "3 of 8"; null once it is recorded."""
    old_names: list[str]
    """What earlier trainers called it."""


class CatalogueAnswer(Answer):
    """Every key that is declared."""

    metrics: list[Declared]
    renamed: dict[str, list[str]]
    """Keys of earlier trainers, and what they are called here."""
