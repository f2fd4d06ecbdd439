from hypothesis import given
from hypothesis import strategies as st

from services.aggregator import archive, said, schema
from services.aggregator.archive import Archived
from services.aggregator.group_ids import GroupId
from services.aggregator.registry import run_of
from services.aggregator.store import Store

ENDS = st.sampled_from([said.TRAINED, said.DROPPED, said.GIVEN_UP, said.ROLLED_BACK])
OUTCOMES = st.builds(
    Archived,
    ENDS,
    st.sampled_from(["", "stale", "no signal", "ü"]),
    st.none() | st.integers(0, 2**62),
    st.integers(0, 2**62),
)


@given(
    st.dictionaries(
        st.tuples(st.integers(5 * 1024, 6 * 1024 - 1), st.integers(0, 10**18 - 1)), OUTCOMES
    )
)
def test_a_block_comes_back(block: dict[tuple[int, int], Archived]) -> None:
    groups = {GroupId(3, ordinal, 2, number): found for (ordinal, number), found in block.items()}
    assert archive.unpack((3, 2, 5), archive.pack(groups)) == groups


def trained(step: int, row: int) -> Archived:
    return Archived(said.TRAINED, "", step, row)


def test_groups_are_found_by_name_row_step_and_end(store: Store) -> None:
    groups = {GroupId(0, n, 1, 1): trained(n // 32, (7 * n) % 3000) for n in range(3000)}
    lost = Archived(said.GIVEN_UP, "failed", None, 17)
    groups |= {GroupId(1, 2000, 2, 3): lost, GroupId(-1, 17, 1, 0): Archived(5, "", None, 17)}
    with store.write() as writing:
        connection, run_id = writing.connection, run_of(writing.connection, "demo", now_s=0.0).id
        archive.put(connection, run_id, groups)
        wanted = [GroupId(0, 2999, 1, 1), GroupId(0, 2999, 1, 2), GroupId(9, 9, 9, 9)]
        found = archive.find(connection, run_id, wanted)
        assert found == {GroupId(0, 2999, 1, 1): trained(93, 20993 % 3000)}
        assert dict(archive.given_up(connection, run_id)) == {GroupId(1, 2000, 2, 3): lost}
        in_step = {group.ordinal for group, _ in archive.trained_from(connection, run_id, 40)}
        assert in_step == set(range(40 * 32, 3000))
        in_step = {
            group.ordinal for group, _ in archive.trained_from(connection, run_id, 40, end_step=41)
        }
        assert in_step == set(range(40 * 32, 41 * 32))
        of_row = {group.ordinal for group, _ in archive.of_row(connection, run_id, 17)}
        assert of_row == {17, 2000, *(n for n in range(3000) if 7 * n % 3000 == 17)}
        assert archive.num_groups(connection, run_id) == 3001
        assert dict(archive.everything(connection, run_id)) == groups


def test_groups_are_added_to_a_block_and_changed_in_it(store: Store) -> None:
    one, other = GroupId(0, 1, 1, 1), GroupId(0, 2, 1, 1)
    with store.write() as writing:
        connection, run_id = writing.connection, run_of(writing.connection, "demo", now_s=0.0).id
        archive.put(connection, run_id, {one: trained(3, 5)})
        archive.put(connection, run_id, {other: trained(1, 6)})
        undone = archive.raised(trained(3, 5), state=said.ROLLED_BACK, reason="", step=None, row=0)
        assert undone == Archived(said.ROLLED_BACK, "", 3, 5)
        archive.put(connection, run_id, {one: undone})
        assert archive.find(connection, run_id, [one, other]) == {one: undone, other: trained(1, 6)}
        table = schema.ledger_archive
        (row,) = connection.execute(table.select())
        assert (row.num_groups, row.first_step, row.last_step, row.num_given_up) == (2, 1, 3, 0)
