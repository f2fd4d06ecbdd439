"""Bearer tokens: what a caller sends, and what a server accepts.

`network.token_file` holds one token a line. The first is sent; every one of them is accepted. The
file is read again when it changes, so a token is replaced without an outage: append the new one,
and once all services have it (a mounted Secret takes a minute or two) put it first, and later take
the old one out.
"""

import hmac
import os
from pathlib import Path

import structlog

from services.common.config import Network
from services.common.errors import UserError

KEY = "network.token_file"


class Tokens:
    """Tokens that do not change, the first of which is sent.

    Example: Tokens("new", "old") sends "new", and accepts "new" and "old".
    """

    def __init__(self, *tokens: str) -> None:
        self._tokens = tokens

    @property
    def sent(self) -> str:
        """The token to send now."""
        return self._current()[0]

    def accepts(self, given: str) -> bool:
        """Whether a caller with this token is let in. How long it takes says nothing of how much
        of a token was right."""
        text = given.encode()
        found = [hmac.compare_digest(text, token.encode()) for token in self._current()]
        return any(found)

    def _current(self) -> tuple[str, ...]:
        return self._tokens


class FileTokens(Tokens):
    """The tokens of a file, as it is now. Raises UserError when it is unusable at first; a file
    that becomes unusable later is logged, and what it held before stays."""

    def __init__(self, path: Path, *, key: str = KEY) -> None:
        self._path, self._key = path, key
        self._seen = file_state(path)
        super().__init__(*read(path, key=key))

    def _current(self) -> tuple[str, ...]:
        seen = file_state(self._path)
        if seen != self._seen:
            try:
                self._tokens = read(self._path, key=self._key)
            except UserError as error:
                structlog.get_logger().error("the tokens stay as they were", why=str(error))
            else:
                structlog.get_logger().info("tokens read again", file=str(self._path))
            self._seen = seen
        return self._tokens


def read(path: Path, *, key: str = KEY) -> tuple[str, ...]:
    """The tokens in a file, at least one. Raises UserError, which repeats nothing of it."""
    try:
        lines = path.read_bytes().decode("ascii").splitlines()
    except OSError as error:
        raise UserError(f"{key}: cannot be read: {error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{key}: {path} holds a character that is not ASCII") from None
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise UserError(f"{key}: {path} is empty: write the token into it")
    if any(" " in token or not token.isprintable() for token in found):
        raise UserError(f"{key}: {path} holds a blank or unprintable character inside a token")
    return found


def tokens_of(network: Network) -> Tokens | None:
    """What is configured; None where there is no `network.token_file`. Raises UserError."""
    return None if network.token_file is None else FileTokens(Path(network.token_file))


def file_state(path: Path) -> tuple[int, ...]:
    """What differs once the file is another one, or has been written again."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
