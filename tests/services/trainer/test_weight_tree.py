"""Who fetches from whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.weight_tree import MAX_CHILDREN, ROOT, Sources, WeightTree, address_of


def test_a_tree_is_filled_level_by_level() -> None:
    tree, names = WeightTree(), "abcdef"
    assert [tree.source_of(name, able=names) for name in names] == [ROOT, ROOT, "a", "a", "b", "b"]


def test_who_has_the_file_is_no_child_any_more_and_sends_at_first_hand() -> None:
    tree, names = WeightTree(), "abcdefg"
    for name in "abc":
        tree.source_of(name, able=names)
    for name in "abc":
        tree.has_it(name)
    # Two from the trainer, then two from each of those that have all of it.
    assert [tree.source_of(name, able=names) for name in "defg"] == [ROOT, ROOT, "a", "a"]
    assert tree.source_of("h", able=names) == "b"


def test_who_cannot_send_is_nobodys_source_and_the_trainer_takes_more_than_its_share() -> None:
    tree = WeightTree()
    assert [tree.source_of(name, able=()) for name in "abc"] == [ROOT] * 3
    assert tree.source_of("d", able={"b"}) == "b"


def test_a_source_that_failed_is_not_chosen_again() -> None:
    tree, names = WeightTree(), "abcd"
    for name in names:
        tree.source_of(name, able=names)
    assert tree.source_of("c", able=names, failed={"a"}) == "b"
    assert tree.source_of("c", able=names, failed={"a", "b", "d"}) == ROOT


def test_who_asks_again_is_not_sent_to_those_that_wait_for_it() -> None:
    """b fetches from a; a's own source is gone: b is no help."""
    tree = WeightTree()
    tree.source_of("x", able=())
    tree.source_of("a", able=())
    assert tree.source_of("b", able={"a"}) == "a"
    assert tree.source_of("a", able={"a", "b"}) == ROOT


def test_places_of_those_who_left_are_free() -> None:
    tree, names = WeightTree(), "abc"
    for name in "ab":
        tree.source_of(name, able=names)
    tree.left("a")
    assert tree.source_of("c", able=names) == ROOT


@given(st.lists(st.tuples(st.sampled_from(["ask", "has", "left"]), st.integers(0, 7)), max_size=60))
def test_everybodys_way_leads_to_the_trainer_or_to_a_whole_file(
    events: list[tuple[str, int]],
) -> None:
    """Whatever happens in which order: no circle, and no source but the trainer with more than two
    children."""
    tree, able = WeightTree(), {str(number) for number in range(6)}  # 6 and 7 send nothing
    for kind, number in events:
        name = str(number)
        if kind == "ask":
            source = tree.source_of(name, able=able)
            assert source != name
            for _ in range(9):
                place = tree._places.get(source)
                if place is None or not place.fetching:
                    break
                source = place.parent
            else:
                pytest.fail("a circle")
        elif kind == "has":
            tree.has_it(name)
        else:
            tree.left(name)
        for other in able:
            assert tree._num_children(other) <= MAX_CHILDREN


def test_sources_are_addresses_file_by_file() -> None:
    sources = Sources()
    for number in range(1, 4):
        sources.joined(f"g{number}", address=f"h{number}:1")
    assert [sources.find(f"g{n}", sha256="one", failed=()) for n in (1, 2)] == [ROOT, ROOT]
    assert sources.find("g3", sha256="one", failed=()) == "h1:1"
    assert sources.find("g3", sha256="one", failed=["h1:1"]) == "h2:1"
    assert sources.find("g3", sha256="two", failed=()) == ROOT
    sources.serves("g1", {"two"})
    assert sources.find("g4", sha256="one", failed=()) == ROOT
    sources.left("g2")
    sources.keep_only({"two"})
    assert sources._trees.keys() == {"two"}


@pytest.mark.parametrize(
    ("peer", "port", "address"),
    [
        ("ipv4:10.0.0.7:41234", 50051, "10.0.0.7:50051"),
        ("ipv6:%5B::1%5D:41234", 50051, "[::1]:50051"),
        ("ipv6:[fd00::7]:41234", 50051, "[fd00::7]:50051"),
        ("ipv4:10.0.0.7:41234", 0, ROOT),
        ("unix:/run/socket", 50051, ROOT),
    ],
)
def test_an_address_is_where_a_call_comes_from(peer: str, port: int, address: str) -> None:
    assert address_of(peer, port) == address
