"""Label matchers. Regular expressions match whole values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from services.aggregator.patterns import BadPattern, Pattern
from services.aggregator.promql.errors import QueryError

Operator = Literal["=", "!=", "=~", "!~"]

NAME = "__name__"
"""The label that holds a series' name."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """A condition on one label; a label that a series has not is the empty text.

    Raises QueryError for a regular expression that is none, or too large.
    """

    label: str
    operator: Operator
    value: str
    _pattern: Pattern | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            pattern = Pattern(self.value) if self.operator in ("=~", "!~") else None
        except BadPattern as error:
            raise QueryError(str(error)) from None
        object.__setattr__(self, "_pattern", pattern)

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether a series with these labels is selected."""
        value = labels.get(self.label, "")
        found = value == self.value if self._pattern is None else self._pattern.fullmatch(value)
        return found == (self.operator in ("=", "=~"))


def all_hold(matchers: Iterable[Matcher], labels: Mapping[str, str]) -> bool:
    """Whether a series with these labels is selected by all matchers."""
    return all(matcher.holds(labels) for matcher in matchers)
