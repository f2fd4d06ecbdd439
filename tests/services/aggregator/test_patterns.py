import pytest

from services.aggregator.patterns import MAX_LENGTH, BadPattern, Pattern


def test_searching_and_matching_all() -> None:
    assert Pattern("^perf/").search("perf/step_s")
    assert not Pattern("^perf/").search("x/perf/")
    assert Pattern("a|b").fullmatch("b")
    assert not Pattern("a|b").fullmatch("ab")
    assert Pattern("ä.").search("xäö")


@pytest.mark.parametrize("text", ["(", "a{2000}{2000}", r"(a)\1", "(?=a)", "a" * (MAX_LENGTH + 1)])
def test_what_is_none_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(BadPattern, match="regular expression"):
        Pattern(text)


def test_an_expression_that_blows_up_elsewhere_does_not_here() -> None:
    assert not Pattern("^(a+)+$").search("a" * 5000 + "b")
