"""Tokens of a file, and a new one in mid-run."""

from pathlib import Path

import pytest

from services.common.config import Network
from services.common.errors import UserError
from services.common.tokens import FileTokens, Tokens, tokens_of


def test_the_first_is_sent_and_all_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("new\n\n  old \n")
    tokens = FileTokens(file)
    assert tokens.sent == "new"
    assert [tokens.accepts(each) for each in ("new", "old", "", "ne", "new old", "né")] == (
        [True, True, False, False, False, False]
    )


def test_a_token_is_replaced_without_a_moment_in_which_callers_are_refused(tmp_path: Path) -> None:
    server, client = tmp_path / "server", tmp_path / "client"
    for file in (server, client):
        file.write_text("old")
    theirs, ours = FileTokens(server), FileTokens(client)
    for text in ("old\nnew", "new\nold", "new"):
        for file in (server, client):
            file.write_text(text)
            assert theirs.accepts(ours.sent), text
    assert ours.sent == "new"
    assert not theirs.accepts("old")


def test_a_file_that_is_spoilt_later_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret")
    tokens = FileTokens(file)
    file.write_text("")
    assert tokens.accepts("s3cret")
    file.unlink()
    assert tokens.accepts("s3cret")
    file.write_text("other")
    assert tokens.accepts("other")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"network\.token_file: cannot be read"),
        (b" \n", "is empty"),
        ("s3crét".encode(), "no.*ASCII|not ASCII"),
        (b"s3 cret", "blank"),
        (b"s3\x01cret", "unprintable"),
    ],
)
def test_an_unusable_file_is_a_users_mistake(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=says) as refused:
        tokens_of(Network(token_file=str(file)))
    assert "s3" not in str(refused.value)


def test_without_a_file_there_are_none() -> None:
    assert tokens_of(Network()) is None
    assert Tokens("a").sent == "a"
