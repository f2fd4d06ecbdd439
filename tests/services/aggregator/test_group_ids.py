import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.aggregator.group_ids import GroupId, parse

NUMBERS = st.integers(0, 10**18 - 1)


def test_a_name_of_training_and_one_of_an_evaluation() -> None:
    assert parse("2.17.3.1") == GroupId(2, 17, 3, 1)
    assert parse("eval.4.1.17") == GroupId(-5, 17, 1, 0)
    assert str(GroupId(-5, 17, 1, 0)) == "eval.4.1.17"


@given(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS))
def test_a_name_comes_back(numbers: tuple[int, int, int, int]) -> None:
    name = ".".join(map(str, numbers))
    group = parse(name)
    assert group is not None
    assert (str(group), group.is_evaluation) == (name, False)
    evaluation = "eval." + ".".join(map(str, numbers[:3]))
    group = parse(evaluation)
    assert group is not None
    assert (str(group), group.is_evaluation) == (evaluation, True)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "0.1.1",
            "0.1.1.1.1",
            "0.01.1.1",
            "0.1.1.-1",
            "0.1.1.1\n",
            " 0.1.1.1",
            "0.1.1.\u0663",
        ),
        *("0.1.1.1000000000000000000", "a.b.c.d", "counts", "eval.1.1", "eval.0.1.1.1"),
    ],
)
def test_what_is_no_name(name: str) -> None:
    assert parse(name) is None
