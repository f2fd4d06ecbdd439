"""Where a mirror goes on when attempts come."""

from services.aggregator.lines import surviving
from services.aggregator.mirrors.position import Position, following


def at(attempt: int, began: int, step: int) -> Position:
    return Position(attempt=attempt, began=began, step=step)


def test_it_begins_with_the_first_step_there_is() -> None:
    assert following(None, surviving({1: 0})) == at(1, 1, 0)
    assert following(None, surviving({1: 5, 2: 40})) == at(2, 2, 5)
    assert following(None, ()) is None
    # What services send before they have heard of a trainer is of no attempt.
    assert following(None, surviving({0: 0})) is None
    assert following(None, surviving({0: 0, 1: 3})) == at(1, 1, 3)


def test_it_goes_back_to_what_is_made_again() -> None:
    kept = at(1, 1, 50)
    assert following(kept, surviving({1: 0})) == kept
    assert following(kept, surviving({1: 0, 2: 40})) == at(2, 2, 40)
    # Of two attempts that it has not seen, the one that went back further counts.
    assert following(kept, surviving({1: 0, 2: 30, 3: 40})) == at(3, 3, 30)
    assert following(kept, surviving({1: 0, 2: 40, 3: 30})) == at(3, 3, 30)


def test_it_goes_on_where_nothing_was_written_twice() -> None:
    assert following(at(1, 1, 50), surviving({1: 0, 2: 50})) == at(2, 1, 50)
    assert following(at(1, 1, 30), surviving({1: 0, 2: 40})) == at(2, 1, 30)
    assert following(at(3, 2, 45), surviving({1: 0, 2: 40, 3: 44})) == at(3, 2, 45)
