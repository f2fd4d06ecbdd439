"""A short campaign: two pipelines at a time, each kind of fault once. `make chaos` is the long one.

CHAOS_SEED=7 draws other moments, pipelines and orders.
"""

import os
from pathlib import Path

import pytest

from tests.chaos import __main__ as chaos
from tests.chaos import faults, table

PIPELINES = 2


def test_over_all_pipelines_each_kind_comes_equally_often() -> None:
    kinds = faults.FAULTS
    drawn = [kind for number in range(len(kinds)) for kind in _drawn(number)]
    assert {drawn.count(kind) for kind in kinds} == {10}


def _drawn(number: int) -> list[str]:
    return chaos.kinds_of(number, seed=3, num_faults=10)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_nothing_is_lost_and_nothing_trained_twice_whatever_fails(tmp_path: Path) -> None:
    num_faults = -(-len(faults.FAULTS) // PIPELINES)
    lives = await chaos.run(
        list(range(PIPELINES)),
        seed=int(os.environ.get("CHAOS_SEED", "1")),
        num_faults=num_faults,
        at_once=PIPELINES,
        minutes=10,
        folder=tmp_path,
    )
    found = table.figures(lives, seed=0, seconds=0)
    print(table.text(found))
    assert found["problems"] == []
    assert (found["trained_twice"], found["unaccounted"]) == (0, 0)
    assert found["by_fault"].keys() == set(faults.FAULTS)
    assert found["faults"] == PIPELINES * num_faults
