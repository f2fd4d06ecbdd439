import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.loss import GUARDS, LAG_KEYS, LagStatistics, LossStatistics
from services.trainer.ranks import Group
from services.trainer.tally import Tally, gather

COUNT = st.integers(0, 2**40)
NUMBER = st.floats(allow_nan=False)


class Twice(Group):
    """Two ranks that count the same."""

    def gather(self, values: Any) -> list[list[float]]:
        [own] = super().gather(values)
        return [own, own]


@st.composite
def tallies(draw: st.DrawFn) -> Tally:
    lags = tuple(LagStatistics(draw(COUNT), draw(NUMBER)) for _ in LAG_KEYS)
    statistics = LossStatistics(
        tokens=draw(COUNT),
        loss_sum=draw(NUMBER),
        clip_low_min=draw(NUMBER),
        lags=lags,
        guarded={place: draw(COUNT) for place in GUARDS},
    )
    return Tally(statistics, num_rows=draw(COUNT), fwd_s=draw(NUMBER))


@given(tallies(), NUMBER)
def test_what_is_gathered_is_what_each_rank_counted(own: Tally, also: float) -> None:
    found, numbers = gather(own, Twice(), also)
    assert found == [own, own]
    assert numbers == [[also], [also]]


def test_kinds_of_numbers_stay() -> None:
    [found], _ = gather(Tally(num_rows=3), Group())
    assert isinstance(found.num_rows, int)
    assert isinstance(found.statistics.guarded["logprobs"], int)
    assert isinstance(found.statistics.lags[0].tokens, int)
    assert found.statistics.clip_low_min == math.inf


def test_ranks_add_up() -> None:
    both = Tally(num_rows=1, fwd_s=0.5).merge(Tally(num_rows=2, raw_tokens=7, fwd_s=1.0))
    assert (both.num_rows, both.raw_tokens, both.fwd_s) == (3, 7, 1.5)
