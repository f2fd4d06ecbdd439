"""Metrics that users declare for themselves, in the recipe's `[metrics]` table.

They live under `custom/`, so that none is ever one of ours, of this release or the next.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from services.common.instruments import REDUCTIONS, Instrument, Reduction
from services.common.section import Section

CUSTOM_PREFIX = "custom/"
"""Keys of users begin with it."""

RESERVED = "custom/other"
"""Where undeclared custom keys go when a run has too many of them."""

KEY = re.compile(r"custom(/[A-Za-z0-9_.:+-]{1,100})+")
"""A key that may be declared."""


class CustomMetric(Section):
    """A metric of your own, by its key: `[metrics."custom/answer_chars"]`. Other keys under
    `custom/` are taken as they come."""

    instrument: Instrument
    """What is sent: it adds up (count), it is a value at a time (observation), or two sums
    (ratio)."""
    unit: Annotated[str, Field(min_length=1)] = "1"
    """Of its values; of a count's sum. 1 for plain numbers and shares."""
    reduce: Reduction | None = None
    """What a query gets that names no reduction; by default the sum, the mean or the ratio."""
    meaning: Annotated[str, Field(min_length=1)]
    """One sentence, for the list of metrics."""

    @field_validator("reduce")
    @classmethod
    def _allowed(cls, value: Reduction | None, info: ValidationInfo) -> Reduction | None:
        allowed = REDUCTIONS.get(info.data.get("instrument", ""), ())
        if value is not None and allowed and value not in allowed:
            choices = ", ".join(allowed)
            raise ValueError(f"not for {info.data['instrument']}; choose one of {choices}")
        return value

    @property
    def default(self) -> Reduction:
        """The reduction where a query names none."""
        return self.reduce or REDUCTIONS[self.instrument][0]


def mistakes(keys: Iterable[str]) -> Iterator[str]:
    """What is wrong with keys that a recipe declares, one line each."""
    for key in keys:
        if not KEY.fullmatch(key):
            yield (
                f'metrics."{key}": a key of your own begins with {CUSTOM_PREFIX}, and goes on with '
                "letters, digits and . _ : + - between slashes"
            )
        elif key == RESERVED:
            yield f'metrics."{key}": this one is kept for what comes after too many custom keys'
