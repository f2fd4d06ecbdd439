from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.aggregator import said
from services.aggregator.said import Said

DISPATCHED, GENERATING, TRAINED, DROPPED, ROLLED_BACK = 1, 2, 7, 8, 10

STATEMENTS = st.lists(
    st.tuples(
        st.sampled_from([*said.STATES]),
        st.builds(
            Said.once,
            st.floats(0, 100),
            st.sampled_from(["a", "b", "ü"]),
            reason=st.sampled_from(["", "stale"]),
            step=st.none() | st.integers(0, 5),
        ),
    ),
    max_size=12,
)


def test_the_first_and_the_last_statement_of_a_state_are_kept() -> None:
    history = said.merge(
        {}, [(GENERATING, Said.once(at_s, worker)) for at_s, worker in ((10, "a"), (7, "b"))]
    )
    assert history == {GENERATING: Said(7, "b", 10, "a")}


def test_the_step_that_trained_a_group_is_known_after_it_was_rolled_back() -> None:
    history = said.merge(
        {}, [(ROLLED_BACK, Said.once(9, "t")), (TRAINED, Said.once(5, "t", step=3))]
    )
    assert said.highest(history) == (ROLLED_BACK, "")
    assert said.trained_step(history) == 3


def test_the_reason_is_that_of_the_last_statement_of_the_highest_state() -> None:
    history = said.merge(
        {DISPATCHED: Said.once(1, "t", reason="never shown")},
        [
            (DROPPED, Said.once(6, "t", reason="lost")),
            (DROPPED, Said.once(5, "t", reason="stale")),
        ],
    )
    assert said.highest(history) == (DROPPED, "lost")


@given(STATEMENTS, st.randoms(use_true_random=False))
def test_order_and_repetition_change_nothing(
    statements: list[tuple[int, Said]], chance: Random
) -> None:
    expected = said.merge({}, statements)
    again = [*statements, *chance.choices(statements, k=5)] if statements else []
    chance.shuffle(again)
    half = len(again) // 2
    one, other = said.merge({}, again[:half]), said.merge({}, again[half:])
    assert said.merge(one, other.items()) == expected
    assert said.merge({}, again) == expected


@given(STATEMENTS)
def test_a_history_comes_back_from_the_store(statements: list[tuple[int, Said]]) -> None:
    history = said.merge({}, statements)
    assert said.decode(said.encode(history)) == history


def test_what_says_nothing_new_is_not_stored() -> None:
    history = {
        DISPATCHED: Said.once(1.5, "trainer-0"),
        TRAINED: Said.once(2.0, "trainer-0", step=4),
    }
    assert said.encode(history) == '[["trainer-0"],[[1,1.5,0],[7,2.0,0,2.0,0,"",4]]]'
