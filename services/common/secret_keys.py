"""What of a recipe keeps secrets out of it: files with passwords, keys and tokens, and how they go
together with the URLs that they belong to."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

from services.common.errors import UserError

if TYPE_CHECKING:
    from services.common.config import Aggregator, Queue, Recipe

TLS = ("tls_cert_file", "tls_key_file", "tls_ca_file")


def mistakes(recipe: "Recipe") -> Iterator[str]:
    """What is wrong between these keys, one line each."""
    given = [name for name in TLS if getattr(recipe.network, name) is not None]
    if given and len(given) < len(TLS):
        missing = ", ".join(f"network.{name}" for name in TLS if name not in given)
        yield (
            f"network.{given[0]}: TLS needs certificate, key and authorities: give {missing}, too, "
            "or none of them"
        )
    for file_key, url_key, file, url in (
        ("queue.password_file", "queue.url", recipe.queue.password_file, recipe.queue.url),
        (
            *("aggregator.database_password_file", "aggregator.database"),
            *(recipe.aggregator.database_password_file, recipe.aggregator.database),
        ),
    ):
        if file is None:
            continue
        if url is None:
            yield f"{file_key}: it is the password of {url_key}'s user, and there is no {url_key}"
        elif _holds_password(url):
            yield f"{file_key}: {url_key} has a password already; take it out of the URL"


def _holds_password(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.password) or "password" in parse_qs(parts.query)
    except ValueError:  # no URL: whoever opens it says so
        return False


def read_password(file: str, *, key: str) -> str:
    """The password in a file, without the blanks around it. Raises UserError."""
    try:
        password = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        # The text of a UnicodeDecodeError repeats what was read.
        cause = error if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"{key}: {file} cannot be read: {cause}") from None
    if not password:
        raise UserError(f"{key}: {file} is empty: write the password into it")
    return password


def queue_url(settings: "Queue") -> str | None:
    """`queue.url` with the password of `queue.password_file`, where there is one; to connect with,
    and never to be shown or written. Raises UserError.

    Example: redis://me@host:6379/0 and a file with `p@ss` are redis://me:p%40ss@host:6379/0.
    """
    url = settings.url
    if url is None or settings.password_file is None:
        return url
    password = read_password(settings.password_file, key="queue.password_file")
    try:
        parts = urlsplit(url)
    except ValueError:  # no URL: whoever opens it says so
        return url
    user, _, host = parts.netloc.rpartition("@")
    netloc = f"{user.removesuffix(':')}:{quote(password, safe='')}@{host}"
    return parts._replace(netloc=netloc).geturl()


def database_password(settings: "Aggregator") -> str | None:
    """What `aggregator.database_password_file` holds; None without one. Raises UserError."""
    file = settings.database_password_file
    if file is None:
        return None
    return read_password(file, key="aggregator.database_password_file")
