import pytest

from services.trainer.intake import Policy
from services.trainer.line import VersionLine
from services.trainer.pace import LagAtBegin, began_of, last_step, may_sit


def policy(
    version: int = 7, *, step: int | None = None, max_staleness: int = 2, steps: int = 1
) -> Policy:
    """A line of versions 1 to `version`, each of `steps` optimizer steps more than the last."""
    step_of = {number: (number - 1) * steps for number in range(1, version + 1)}
    now = step_of[version] if step is None else step
    return Policy(
        version=version, step=now, step_of=step_of, max_staleness=max_staleness, vocab_size=50
    )


def test_a_group_has_begun_with_the_version_that_its_place_says() -> None:
    places = {
        "0.1.1.0": "requests:trainer:1|7|generator-0-1f:1",
        "0.2.1.0": "groups:generator-0-1f:1|6|scorer-0-2a:1",
        "0.3.1.0": "samples:scorer-0-2a:1|12|",
        "0.4.1.0": "requests:trainer:1||",
        "0.5.1.0": "samples:somebody's||",
    }
    assert began_of(places) == {"0.1.1.0": 7, "0.2.1.0": 6, "0.3.1.0": 12}


@pytest.mark.parametrize(("began", "last"), [(7, 3), (6, 2), (5, 1), (4, 0), (1, -3), (None, 3)])
def test_the_last_step_with_a_version_a_step(began: int | None, last: int) -> None:
    assert last_step(began, policy=policy(), weight_sync_steps=1) == last


def test_without_staleness_the_open_step_is_the_last_one() -> None:
    here = policy(max_staleness=0)
    assert [last_step(began, policy=here, weight_sync_steps=1) for began in (7, 6)] == [1, 0]


@pytest.mark.parametrize(("step", "lasts"), [(18, (9, 6, 3)), (19, (8, 5, 2)), (20, (7, 4, 1))])
def test_the_last_step_with_a_version_every_three(step: int, lasts: tuple[int, ...]) -> None:
    """Version 7 is of step 18. With two steps behind it, this step is the one that publishes."""
    here = policy(step=step, steps=3)
    found = tuple(last_step(began, policy=here, weight_sync_steps=3) for began in (7, 6, 5))
    assert found == lasts


def test_a_step_without_an_update_does_not_put_the_publish_off_for_ever() -> None:
    """More steps behind than a version has: the next step publishes."""
    assert last_step(7, policy=policy(step=9), weight_sync_steps=1) == 3


def test_age_counts_along_the_line_and_not_in_numbers() -> None:
    """Version 10 was published again as 13 by a restart: a group of 9 is one publish old."""
    line = VersionLine()
    for version, same in [(9, False), (10, False), (13, True)]:
        line.add(version, step=version if version < 13 else 10, sha256="", same_weights=same)
    here = Policy(
        version=13,
        step=10,
        step_of=line.step_of,
        publishes_of=line.publishes_of,
        max_staleness=2,
        vocab_size=50,
    )
    assert last_step(9, policy=here, weight_sync_steps=1) == 2
    assert last_step(13, policy=here, weight_sync_steps=1) == 3
    assert last_step(11, policy=here, weight_sync_steps=1) is None


def sits(last: int | None, *others: int, seats: int = 4) -> bool:
    return may_sit(last, others, seats=seats, groups_per_step=4)


def test_seats_are_kept_for_those_that_have_no_later_step() -> None:
    assert sits(3, 1, 1, 1)
    assert not sits(3, 1, 1, 1, 1)
    assert not sits(2, 1, seats=1)
    assert sits(1, 1, 1, 1, 1), "as urgent as they are"
    assert sits(None, 1, 1, 1, 1), "what is dropped needs no seat"
    assert sits(0, 1, 1, 1, 1), "too late already: it is dropped"


def test_seats_are_kept_for_more_than_a_later_step_has() -> None:
    """Seven have this step or the next: four go into the next, three of this one's seats are theirs
    and one is free."""
    assert sits(3, *[2] * 7)
    assert not sits(3, *[2] * 7, seats=3)
    assert not sits(3, *[2] * 8)
    assert sits(3, *[3] * 50), "those of its own last step are as urgent"


def test_more_urgent_groups_than_seats_keep_all_others_out() -> None:
    assert not sits(2, *[1] * 9)
    assert sits(1, *[1] * 9)


def test_a_lag_is_counted_from_the_version_at_dispatch() -> None:
    """Two groups a step, so eight are remembered. Begun with the version before: 1; what waited for
    a generator until later versions came has no lag."""
    lag, outstanding = LagAtBegin(2), {f"0.{number}.1.0" for number in range(11)}
    assert lag.usual == 0
    for number in range(8):
        lag.dispatched(f"0.{number}.1.0", at=policy(7))
    earlier = {f"0.{number}.1.0": 7 for number in range(6)}
    lag.seen(earlier, outstanding=outstanding, at=policy(8))
    lag.seen({"0.6.1.0": 8, "0.7.1.0": 9}, outstanding=outstanding, at=policy(9))
    assert lag.usual == 0
    for number in range(8, 10):
        lag.dispatched(f"0.{number}.1.0", at=policy(9))
    began = {f"0.{number}.1.0": 7 for number in range(8, 10)}
    lag.seen(began, outstanding=outstanding, at=policy(10))
    lag.seen(began, outstanding=outstanding, at=policy(11))
    assert lag.usual == 2, "each counts once: two of eight are more than one of five"
    for number in range(10, 18):
        lag.dispatched(f"0.{number}.1.0", at=policy(9))
    lag.seen({}, outstanding=(), at=policy(11))
    ended = {f"0.{number}.1.0": 1 for number in range(10, 18)}
    lag.seen(ended, outstanding=outstanding, at=policy(11))
    assert lag.usual == 2, "what has ended is forgotten"
