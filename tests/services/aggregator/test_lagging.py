"""Which replica lags, on fleets written by hand and on any."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.aggregator.lagging import Lag, Replica, lagging


def fleet(**of_each: Sequence[float | None]) -> list[Replica]:
    """generator-0, generator-1, … with the values of each."""
    (number,) = {len(values) for values in of_each.values()}
    return [
        Replica(name=f"generator-{n}", **{key: values[n] for key, values in of_each.items()})
        for n in range(number)
    ]


def names(replicas: Sequence[Replica]) -> list[tuple[str, str]]:
    return [(lag.replica, lag.why) for lag in lagging(replicas)]


def test_a_replica_below_half_of_the_others_pace_lags() -> None:
    """30, 12 and 28 tokens a second of a slot: the others of the second have a median of 29."""
    found = lagging(fleet(work=[900.0, 300.0, 840.0], busy_s=[30.0, 25.0, 30.0]))
    assert found == (Lag("generator-1", "pace", 12.0, 29.0, 14.5),)
    assert names(fleet(work=[900.0, 450.0], busy_s=[30.0, 30.0])) == []
    assert names(fleet(work=[900.0, 449.0], busy_s=[30.0, 30.0])) == [("generator-1", "pace")]


def test_a_fleet_that_is_slow_as_a_whole_has_none_that_lags() -> None:
    assert names(fleet(work=[3.0, 3.0, 3.1], busy_s=[30.0, 30.0, 30.0])) == []
    assert names(fleet(work=[3.0], busy_s=[30.0])) == []


def test_a_replica_with_many_conversations_at_a_time_is_not_slow() -> None:
    """10 tokens a second of a slot against 30, but it makes three times as many in all."""
    assert names(fleet(work=[900.0, 2700.0], busy_s=[30.0, 270.0])) == []


def test_a_replica_that_has_just_begun_has_no_pace() -> None:
    assert names(fleet(work=[900.0, 1.0], busy_s=[30.0, 2.9])) == []
    assert names(fleet(work=[900.0, 1.0], busy_s=[30.0, 3.0])) == [("generator-1", "pace")]


def test_a_replica_three_versions_behind_the_newest_lags() -> None:
    found = lagging(fleet(version=[45.0, 42.0, 43.0]))
    assert found == (Lag("generator-1", "version", 42.0, 45.0, 43.0),)


def test_a_replica_that_is_paused_more_than_the_others_lags() -> None:
    found = lagging(fleet(paused_frac=[0.04, 0.02, 0.10]))
    assert found == (Lag("generator-2", "paused", 0.10, 0.03, 0.10),)
    assert names(fleet(paused_frac=[0.2, 0.2, 0.39])) == []
    assert names(fleet(paused_frac=[0.2, 0.2, 0.40])) == [("generator-2", "paused")]


@pytest.mark.parametrize(
    "replicas",
    [
        fleet(work=[900.0, None], busy_s=[30.0, 30.0]),
        fleet(work=[900.0, 1.0], busy_s=[30.0, None]),
        fleet(work=[None, 1.0], busy_s=[None, 30.0]),
        fleet(work=[900.0, 0.0], busy_s=[30.0, 0.0]),
        fleet(version=[45.0, None]),
        fleet(paused_frac=[None, 0.9]),
    ],
)
def test_what_was_not_measured_accuses_nobody(replicas: list[Replica]) -> None:
    assert lagging(replicas) == ()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_replica_holds_measurements_only(wrong: float) -> None:
    with pytest.raises(ValueError, match="generator-0: busy_s"):
        Replica(name="generator-0", busy_s=wrong)


AMOUNTS = st.none() | st.floats(0, 1000)


@given(
    st.lists(
        st.tuples(AMOUNTS, AMOUNTS, st.none() | st.floats(0, 1), st.none() | st.integers(1, 99)),
        max_size=6,
    )
)
def test_of_any_fleet_somebody_keeps_up(found: list[tuple[float | None, ...]]) -> None:
    replicas = [
        Replica(name=str(n), work=work, busy_s=busy_s, paused_frac=paused, version=version)
        for n, (work, busy_s, paused, version) in enumerate(found)
    ]
    for why in ("pace", "version", "paused"):
        late = [lag for lag in lagging(replicas) if lag.why == why]
        assert len(late) < max(1, len(replicas))
        for lag in late:
            beyond = lag.value >= lag.threshold if why == "paused" else lag.value < lag.threshold
            assert beyond
