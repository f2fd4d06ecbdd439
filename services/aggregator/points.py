"""Points of a history: many are kept column by column, and each is made when it is asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload


@dataclass(frozen=True, slots=True)
class Point:
    """One window's value."""

    x: int
    """Its first step, or its begin in seconds since 1970; not before the query's `since`."""
    value: float | None
    low: float | None = None
    high: float | None = None
    """The envelope: smallest and largest value of the steps (by time: 10 s) in the window, each
    reduced as the window is. None in a window of one step, and where a reduction has none.
    """
    num_nan: int = 0
    num_pos_inf: int = 0
    num_neg_inf: int = 0
    """Values that are in no sum: they tell "NaN" and "infinite" from "absent"."""


@dataclass(frozen=True, slots=True, eq=False)
class Points(Sequence[Point]):
    """Points in ascending order, column by column; each is made when it is asked for."""

    x: list[int]
    value: list[float | None]
    low: list[float | None]
    high: list[float | None]
    num_nan: list[int]
    num_pos_inf: list[int]
    num_neg_inf: list[int]

    def columns(self) -> tuple[list[Any], ...]:
        """In the order of a Point's fields."""
        return (
            self.x,
            self.value,
            self.low,
            self.high,
            self.num_nan,
            self.num_pos_inf,
            self.num_neg_inf,
        )

    def __len__(self) -> int:
        return len(self.x)

    def __iter__(self) -> Iterator[Point]:
        return map(Point, *self.columns())

    @overload
    def __getitem__(self, index: int) -> Point: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Point, ...]: ...

    def __getitem__(self, index: int | slice) -> Point | tuple[Point, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return Point(*(column[index] for column in self.columns()))

    def __eq__(self, other: object) -> bool:
        """Also to a tuple of the same points."""
        if isinstance(other, Points):
            return self.columns() == other.columns()
        return tuple(self) == other

    __hash__ = None  # type: ignore[assignment]  # as its lists


NO_POINTS = Points([], [], [], [], [], [], [])
