"""What a row costs the rank that forwards it: the number that rows of a micro-batch are balanced
by, since ranks wait for the slowest of them. Pure functions, torch-free.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Load:
    """Load of a row, in any unit: the planner only compares. Raises ValueError for a negative part
    and for a load that is always 0.

    A row that forwards T unique tokens costs `per_token` x T + `per_pair` x P, where P counts
    (token, token it attends to) pairs: a token at depth d of the trie attends to d + 1 tokens, so a
    shared prefix is paid once, and a path of L tokens has L x (L + 1) / 2 pairs. With the FLOPs of
    a model's forward for these (Kaplan et al. 2020, arXiv:2001.08361, table 1) the linear part is
    the larger one for short rows of wide models, the quadratic one for long rows. The backward is
    twice the forward, so the proportion holds for both together.

    Example: Load(per_token=10, per_pair=1), two samples that share 3 tokens and go on with 2
    and 1 of their own: 6 tokens and (1 + 2 + 3) + (4 + 5) + 4 = 19 pairs cost 10 x 6 + 19 = 79.
    """

    per_token: float
    """Of a unique token."""
    per_pair: float = 0.0
    """Of a unique token and one that it attends to."""
    per_trained: float = 0.0
    """Of each sample's trained token: its logits."""
    per_square: float = 0.0
    """Of the square of each sample's tokens, as if no prefix were shared: for comparisons with
    planners that count so."""

    def __post_init__(self) -> None:
        parts = astuple(self)
        if min(parts) < 0 or max(parts) == 0:
            raise ValueError(f"{self}: give costs of 0 or more, and one above 0")


def sum_of_squares(lengths: Iterable[int]) -> int:
    """Attention's load of samples as if no prefix were shared, the usual reading of balance between
    ranks: sum of L x L.

    Example: samples of 3 and 5 tokens: 9 + 25 = 34.
    """
    return sum(int(length) ** 2 for length in lengths)
