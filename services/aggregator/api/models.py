"""The answers, as JSON. A value that is absent is null, never 0 and never NaN."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from services.aggregator import history
from services.aggregator.reduce import Instrument, Reduction

MAX_KEEP_DAYS = 36_500
"""A hundred years; what shall be kept longer is kept forever."""


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
    num_producers: int
    """Processes that have sent metrics."""
    missing_batches: int
    """Batches of all producers that have not arrived although later ones did."""
    keep_days: float | Literal["forever"] | None
    """How long it is kept after it was last heard of; null: as long as the aggregator keeps runs
    (`aggregator.keep_runs_days`)."""
    kept_until: datetime | None
    """It is deleted soon after this time, unless it is heard of before; null: never."""


class Runs(Answer):
    """All runs, the one heard of last first."""

    runs: list[Run]


def _kind(given: object) -> str:
    return "word" if isinstance(given, str) else "days"


class Retention(BaseModel):
    """How long a run is kept."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)

    keep_days: (
        Annotated[
            Annotated[float, Field(gt=0, le=MAX_KEEP_DAYS, allow_inf_nan=False), Tag("days")]
            | Annotated[Literal["forever"], Tag("word")],
            Discriminator(_kind),
        ]
        | None
    )
    """Days after it was last heard of, or "forever"; null: as long as the aggregator keeps runs."""


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
    """One window. The envelope is left out where there is none, the counts of what is in no sum
    where they are 0."""

    x: int
    """The window's first step, or its begin in seconds since 1970."""
    value: float | None
    """The reduced value; null where it is absent."""
    low: float | None = None
    """The smallest value of the steps (by time: of the 10 s) that the window pools, each reduced
    as the window is. Left out for a single one, and for reductions that have none."""
    high: float | None = None
    """The largest of them."""
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
            low=point.low,
            high=point.high,
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


class SeriesHistory(Answer):
    """A metric's history in one run, ascending."""

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


class History(SeriesHistory):
    """One page of a metric's history."""

    next_page: str | None
    """What to send as `page` for the points that follow; null after the last."""


class Histories(Answer):
    """Several histories: all runs of the first key, then those of the next."""

    histories: list[SeriesHistory]


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
    """The part of the plan that will record it, as "4 of 8"; null once it is recorded."""
    only_when: str | None
    """What has to happen for it to be recorded, such as "a group was dropped"; null where every run
    has it."""
    old_names: list[str]
    """What earlier trainers called it."""


class CatalogueAnswer(Answer):
    """Every key that is declared."""

    metrics: list[Declared]
    renamed: dict[str, list[str]]
    """Keys of earlier trainers, and what they are called here."""


class Owner(Answer):
    """Steps that belong to one attempt."""

    attempt: int
    first_step: int
    end_step: int | None
    """The first step that is not its own any more; null for the latest attempt."""


class Line(Answer):
    """Event `line` of a stream: which attempt each step belongs to, latest first. Points of
    another attempt are to be forgotten: their steps were made again."""

    run: str
    line: list[Owner]


class NewSeriesPoints(Answer):
    """What is new of one metric: each point replaces the one of the same step."""

    key: str
    attempt: int
    """The attempt that the steps belong to."""
    points: list[Point]


class NewPoints(Answer):
    """Event `points` of a stream."""

    revision: int
    """All changes up to it have been told; send it as `after` to go on from here."""
    series: list[NewSeriesPoints]


class Gone(Answer):
    """Event `gone` of a stream, its last: the run has been deleted."""

    run: str
