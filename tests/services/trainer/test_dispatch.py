import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.dispatch import (
    FAILED_REASONS,
    FINAL_REASONS,
    FREE_REASONS,
    STALE_REASONS,
    Dispatcher,
    Ticket,
)


def dispatcher(
    *,
    num_rows: int = 7,
    epochs: float | None = 1.0,
    max_groups: int | None = None,
    max_tries: int = 3,
    max_stale_tries: int = 8,
) -> Dispatcher:
    return Dispatcher(
        order=lambda epoch: list(range(num_rows)) if epoch == 0 else list(range(num_rows))[::-1],
        num_rows=num_rows,
        attempt=4,
        epochs=epochs,
        max_groups=max_groups,
        max_tries=max_tries,
        max_stale_tries=max_stale_tries,
    )


def all_tickets(book: Dispatcher) -> list[Ticket]:
    tickets = []
    while ticket := book.next_ticket():
        tickets.append(ticket)
    return tickets


def next_ticket(book: Dispatcher) -> Ticket:
    ticket = book.next_ticket()
    assert ticket is not None
    return ticket


def test_seven_prompts_and_one_and_a_half_epochs_are_eleven_groups() -> None:
    book = dispatcher(epochs=1.5)
    tickets = all_tickets(book)
    assert len(tickets) == 11
    assert [t.prompt for t in tickets[:7]] == [(0, n) for n in range(7)]
    assert [t.prompt for t in tickets[7:]] == [(1, n) for n in range(4)]
    assert book.remaining == 11
    for ticket in tickets:
        book.train(ticket.group_id)
    assert (book.remaining, book.trained, book.trained_twice) == (0, 11, 0)
    assert book.next_ticket() is None


def test_the_same_prompt_in_the_second_pass_is_a_new_group() -> None:
    book = dispatcher(epochs=2)
    tickets = all_tickets(book)
    assert [t.row for t in tickets] == [0, 1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1, 0]
    first, last = tickets[0], tickets[-1]
    assert first.row == last.row == 0
    assert (first.group_id, last.group_id) == ("0.0.4.0", "1.6.4.0")


@pytest.mark.parametrize(
    ("epochs", "num_rows", "prompts"), [(1.1, 10, 11), (0.01, 7, 1), (0.3, 10, 3), (2.05, 10, 21)]
)
def test_fractions_of_epochs_are_rounded_up_in_prompts(
    epochs: float, num_rows: int, prompts: int
) -> None:
    assert len(all_tickets(dispatcher(num_rows=num_rows, epochs=epochs))) == prompts


def test_the_limit_that_comes_first_wins() -> None:
    assert len(all_tickets(dispatcher(epochs=10, max_groups=3))) == 3
    assert len(all_tickets(dispatcher(epochs=1, max_groups=300))) == 7
    assert len(all_tickets(dispatcher(epochs=None, max_groups=30))) == 30


def test_a_dropped_prompt_is_due_again_before_new_ones_and_in_order() -> None:
    book = dispatcher()
    first, second, third = (next_ticket(book) for _ in range(3))
    book.drop(third.group_id, "lost")
    book.drop(first.group_id, "failed")
    assert [next_ticket(book).group_id for _ in range(3)] == ["0.2.4.1", "0.0.4.1", "0.3.4.0"]
    assert second.group_id in book.outstanding


@pytest.mark.parametrize(
    ("reasons", "tries"), [(sorted(FAILED_REASONS), 3), (sorted(STALE_REASONS), 8)]
)
def test_tries_are_limited_by_kind_of_reason(reasons: list[str], tries: int) -> None:
    book = dispatcher(num_rows=1)
    for number in range(tries):
        ticket = next_ticket(book)
        assert ticket.group_id == f"0.0.4.{number}"
        # Whatever failed, it is a try of this prompt.
        given_up = book.drop(ticket.group_id, reasons[number % len(reasons)])
        assert given_up == (number == tries - 1)
    assert (book.given_up, book.dropped.total(), book.remaining) == (1, tries - 1, 0)
    assert book.next_ticket() is None
    assert book.balances()


def test_stale_and_failed_tries_are_counted_apart() -> None:
    book = dispatcher(num_rows=1, max_tries=2, max_stale_tries=2)
    for reason in ("stale", "failed"):
        assert not book.drop(next_ticket(book).group_id, reason)
    assert book.drop(next_ticket(book).group_id, "unscored")


@pytest.mark.parametrize("reason", sorted(FREE_REASONS))
def test_what_is_nobodys_fault_never_gives_a_prompt_up(reason: str) -> None:
    book = dispatcher(num_rows=1, max_tries=1, max_stale_tries=1)
    for _ in range(20):
        assert not book.drop(next_ticket(book).group_id, reason)
    assert book.dropped == {reason: 20}


@pytest.mark.parametrize("reason", sorted(FINAL_REASONS))
def test_some_drops_leave_the_prompt_alone(reason: str) -> None:
    book = dispatcher(num_rows=1)
    assert not book.drop(next_ticket(book).group_id, reason)
    assert book.next_ticket() is None


def test_a_reason_that_is_none_is_a_mistake_of_the_caller() -> None:
    book = dispatcher()
    with pytest.raises(AssertionError, match="bad luck"):
        book.drop(next_ticket(book).group_id, "bad luck")


def test_max_groups_replaces_prompts_that_were_given_up() -> None:
    book = dispatcher(epochs=None, max_groups=2, max_tries=1)
    assert book.drop(next_ticket(book).group_id, "failed")
    for ticket in all_tickets(book):
        book.train(ticket.group_id)
    assert (book.trained, book.given_up, book.remaining, book.dispatched) == (2, 1, 0, 3)


@given(
    num_rows=st.integers(1, 5),
    epochs=st.sampled_from([None, 0.5, 1.0, 1.7, 3.0]),
    max_groups=st.sampled_from([None, 1, 4, 9]),
    bound=st.integers(1, 6),
    data=st.data(),
)
def test_whatever_happens_counts_balance_and_each_prompt_is_trained_once_or_given_up(
    num_rows: int, epochs: float | None, max_groups: int | None, bound: int, data: st.DataObject
) -> None:
    if epochs is None and max_groups is None:
        max_groups = 5
    book = dispatcher(
        num_rows=num_rows, epochs=epochs, max_groups=max_groups, max_tries=2, max_stale_tries=3
    )
    reasons = sorted(STALE_REASONS | FAILED_REASONS | FREE_REASONS)
    trained, given_up = [], []
    for number in range(400):
        while len(book.outstanding) < bound and (ticket := book.next_ticket()):
            assert ticket.group_id not in trained
        assert book.balances()
        assert book.remaining is not None
        assert len(book.outstanding) <= book.remaining
        if not book.outstanding:
            break
        chosen = data.draw(st.sampled_from(sorted(book.outstanding)))
        prompt = book.outstanding[chosen].prompt
        # In the end everything is trained: the run must come to its end.
        if number > 60 or data.draw(st.booleans()):
            book.train(chosen)
            trained.append(prompt)
        elif book.drop(chosen, data.draw(st.sampled_from(reasons))):
            given_up.append(prompt)
    assert book.remaining == 0
    assert book.trained_twice == 0
    assert len(set(trained)) == len(trained) == book.trained
    assert len(given_up) == book.given_up
    assert not set(trained) & set(given_up)
    if max_groups is None:
        assert epochs is not None
        assert len(trained) + len(given_up) == -int(-epochs * num_rows // 1)
