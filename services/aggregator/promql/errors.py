"""Why a query has no answer, in Prometheus' words."""

from typing import Literal

ErrorType = Literal["bad_data", "execution"]

SUPPORTED = (
    "answered are selectors with = != =~ !~ and offset; rate and increase of counters; avg, min, "
    "max, sum, count and last_over_time; sum, avg, min, max and count with by or without; + - * / "
    "% ^ of numbers and vectors whose labels are the same"
)


class QueryError(ValueError):
    """A query that is not answered: `bad_data` when it is no PromQL or asks for what cannot be,
    `execution` when it is beyond this subset or its limits.
    """

    def __init__(self, message: str, *, error_type: ErrorType = "bad_data") -> None:
        super().__init__(message)
        self.error_type: ErrorType = error_type


def unsupported(what: str) -> QueryError:
    """The refusal of PromQL that Prometheus would answer."""
    return QueryError(f"{what} is not supported here: {SUPPORTED}", error_type="execution")
