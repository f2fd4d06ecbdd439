"""What a step counted, on one rank or on all: it adds up over rows, micro-batches and ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from services.trainer.loss import LossStatistics
from services.trainer.packing import PackedRow
from services.trainer.ranks import Group


@dataclass(frozen=True)
class Tally:
    """Counts of rows that are no echoes, and times."""

    statistics: LossStatistics = field(default_factory=LossStatistics)
    num_rows: int = 0
    num_samples: int = 0
    trained_tokens: int = 0
    forwarded_tokens: int = 0
    raw_tokens: int = 0
    flops: float = 0.0
    """Of the model, forward and backward (flops.py)."""
    fwd_s: float = 0.0
    """Of this rank, echoes included, as is what follows."""
    fwd_bwd_s: float = 0.0

    @classmethod
    def of_row(cls, row: PackedRow, statistics: LossStatistics, *, flops: float) -> "Tally":
        """One row, without times."""
        return cls(
            statistics=statistics,
            num_rows=1,
            num_samples=row.num_samples,
            trained_tokens=row.num_trained,
            forwarded_tokens=row.num_forwarded,
            raw_tokens=row.raw_tokens,
            flops=flops,
        )

    def merge(self, other: "Tally") -> "Tally":
        """Both together."""
        names = [each.name for each in fields(self) if each.name != "statistics"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Tally(statistics=self.statistics.merge(other.statistics), **sums)


def gather(own: Tally, group: Group, *also: float) -> tuple[list[Tally], list[list[float]]]:
    """The tallies of all ranks, in the order of ranks, on every rank, and of each what came with
    it. One exchange, in float64: counts below 2^53 stay exact."""
    numbers = list(_numbers(own))
    found = group.gather([*numbers, *also])
    tallies = [_rebuilt(own, iter(each[: len(numbers)])) for each in found]
    return tallies, [each[len(numbers) :] for each in found]


def _numbers(value: Any) -> Iterator[float]:
    """All numbers in dataclasses, tuples and dicts, in a fixed order."""
    if is_dataclass(value):
        for each in fields(value):
            yield from _numbers(getattr(value, each.name))
    elif isinstance(value, dict):
        for key in sorted(value):
            yield from _numbers(value[key])
    elif isinstance(value, Sequence):
        for each in value:
            yield from _numbers(each)
    else:
        yield value


def _rebuilt(like: Any, numbers: Iterator[float]) -> Any:
    """The same kinds with other numbers."""
    if is_dataclass(like):
        parts = {each.name: _rebuilt(getattr(like, each.name), numbers) for each in fields(like)}
        kind: Any = type(like)
        return kind(**parts)
    if isinstance(like, dict):
        return {key: _rebuilt(like[key], numbers) for key in sorted(like)}
    if isinstance(like, Sequence):
        return tuple(_rebuilt(each, numbers) for each in like)
    return type(like)(next(numbers))
