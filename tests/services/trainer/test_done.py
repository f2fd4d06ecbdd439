import json

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.done import DoneSet


def test_the_frontier_moves_over_what_is_done() -> None:
    done = DoneSet()
    assert [done.add((0, ordinal)) for ordinal in (0, 1, 2, 5)] == [True] * 4
    assert done.state() == {"0": [3, [5]]}
    assert not done.add((0, 5))
    assert not done.add((0, 1))
    done.add((0, 4))
    done.add((0, 3))
    assert done.state() == {"0": [6, []]}
    assert len(done) == 6


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=30), st.integers(0, 21))
def test_it_is_a_set_of_prompts_also_from_a_checkpoint(
    prompts: list[tuple[int, int]], first: int
) -> None:
    done = DoneSet()
    for number, prompt in enumerate(prompts):
        assert done.add(prompt) == (prompt not in prompts[:number])
    again = DoneSet(json.loads(json.dumps(done.state())))
    every = [divmod(number, 7) for number in range(21)]
    for each in (done, again):
        assert len(each) == len(set(prompts))
        assert [prompt for prompt in every if prompt in each] == sorted(set(prompts))
        assert list(each.missing(first=first, num_rows=7)) == [
            prompt for prompt in every[:first] if prompt not in prompts
        ]
