"""Names of groups: `epoch.ordinal.attempt.try`, and `eval.N.attempt.row` of evaluations."""

import re
from typing import NamedTuple

EVALUATION = "eval"
"""Instead of an epoch, in the names of an evaluation's groups."""

NUMBER = "(0|[1-9][0-9]{0,17})"
"""Below 10^18, and without leading zeros: 0.07.1.1 and 0.7.1.1 must not be two groups."""

TRAINING_NAME = re.compile(rf"{NUMBER}\.{NUMBER}\.{NUMBER}\.{NUMBER}")
EVALUATION_NAME = re.compile(rf"{EVALUATION}\.{NUMBER}\.{NUMBER}\.{NUMBER}")


class GroupId(NamedTuple):
    """A group's name, in numbers.

    Those of evaluation N have epoch -1 - N, and their row as ordinal: eval.4.1.17 is
    GroupId(-5, 17, 1, 0).
    """

    epoch: int
    ordinal: int
    attempt: int
    try_number: int

    @property
    def is_evaluation(self) -> bool:
        """Whether an evaluation asked for it: such groups are never trained on."""
        return self.epoch < 0

    def __str__(self) -> str:
        if self.is_evaluation:
            return f"{EVALUATION}.{-1 - self.epoch}.{self.attempt}.{self.ordinal}"
        return f"{self.epoch}.{self.ordinal}.{self.attempt}.{self.try_number}"


def parse(name: str) -> GroupId | None:
    """The group of this name, such as 0.17.1.1; None for a text that is no name of a group."""
    found = TRAINING_NAME.fullmatch(name)
    if found is not None:
        return GroupId(*map(int, found.groups()))
    found = EVALUATION_NAME.fullmatch(name)
    if found is None:
        return None
    number, attempt, row = map(int, found.groups())
    return GroupId(-1 - number, row, attempt, 0)
