"""The forms of `queue.url`: one server, the primary that Sentinels watch, or a cluster.

    redis://[user:password@]host[:6379][/0]                            rediss:// with TLS
    unix:///path/of/socket
    redis+sentinel://[user:password@]h1[:26379],h2[:26379]/NAME[/0]    rediss+sentinel:// with TLS
    redis+cluster://[user:password@]h1[:6379],h2[:6379]                rediss+cluster:// with TLS

Options of redis-py may follow a question mark (`?ssl_ca_certs=ca.pem`), and for Sentinels that ask
for credentials `sentinel_username` and `sentinel_password`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, unquote, urlsplit

import redis.asyncio
import redis.exceptions
from redis.asyncio.connection import parse_url

from services.common.config import without_passwords
from services.common.errors import UserError

SCHEMES = (
    *("redis://", "rediss://", "unix://"),
    *("redis+sentinel://", "rediss+sentinel://", "redis+cluster://", "rediss+cluster://"),
)
"""How a URL of a queue server begins."""

EXAMPLES = (
    "write redis://host:6379/0, redis+sentinel://host:26379,host:26379/NAME or "
    "redis+cluster://host:6379,host:6379, with rediss in place of redis for TLS, and special "
    "characters of a password percent-encoded"
)

Address = tuple[str, int]


@dataclass(frozen=True)
class Place:
    """What a URL says."""

    kind: Literal["server", "sentinel", "cluster"]
    options: dict[str, Any] = field(repr=False)
    """Of each connection to the server, credentials included; for "server" its address, too."""
    tls: bool = False
    seeds: tuple[Address, ...] = ()
    """Sentinels, or nodes of the cluster: whom to ask."""
    name: str = ""
    """Of the primary, among those that the Sentinels watch."""
    asking: dict[str, Any] = field(default_factory=dict, repr=False)
    """Options of connections to seeds."""


def read_url(url: str) -> Place:
    """What `url` means. Raises UserError for a malformed one; passwords are not shown."""
    if not url.startswith(SCHEMES):
        raise _mistake(url, "it begins differently")
    try:
        parts = urlsplit(url)
    except ValueError:  # which may repeat a password
        raise _mistake(url, "its host is malformed") from None
    try:
        if parts.fragment:
            raise ValueError("what does # mean in it?")
        place = _one_server(parts) if "+" not in parts.scheme else _several(parts)
        # A connection is made, and not connected: it knows which options there are.
        kinds = redis.asyncio.SSLConnection if place.tls else redis.asyncio.Connection
        options = dict(place.options)
        options.pop("connection_class", kinds)(**options)
    except TypeError as error:
        raise _mistake(url, str(error).rpartition("() ")[2]) from None
    except (ValueError, redis.exceptions.RedisError) as error:
        raise _mistake(url, str(error)) from None
    return place


def _one_server(parts: SplitResult) -> Place:
    if parts.scheme == "unix":
        if parts.netloc.rpartition("@")[2] or not parts.path:
            raise ValueError("it names no socket: unix:///path/of/socket")
    else:
        if "," in parts.netloc.rpartition("@")[2]:
            raise ValueError("it has several hosts: are they Sentinels, or a cluster?")
        _address(parts.netloc.rpartition("@")[2], port=6379)
        _database(parts.path)
    options: dict[str, Any] = dict(parse_url(parts.geturl()))
    tls = options.get("connection_class") is redis.asyncio.SSLConnection
    return Place("server", options, tls=tls)


def _several(parts: SplitResult) -> Place:
    base, _, kind = parts.scheme.partition("+")
    user, at, hosts = parts.netloc.rpartition("@")
    port = 26379 if kind == "sentinel" else 6379
    seeds = tuple(_address(host, port=port) for host in hosts.split(","))
    name, path = "", parts.path
    if kind == "sentinel":
        name, _, number = path.removeprefix("/").partition("/")
        name = unquote(name)
        if not name:
            raise ValueError("it lacks the name that the Sentinels know the primary by")
        path = f"/{number}"
    database = _database(path)
    if kind == "cluster" and database:
        raise ValueError("a cluster has database 0 alone")
    # redis-py reads the rest: credentials, and options behind the question mark.
    plain = parts._replace(scheme=base, netloc=f"{user}{at}any", path=f"/{database}")
    options: dict[str, Any] = dict(parse_url(plain.geturl()))
    del options["host"]
    tls = options.pop("connection_class", None) is redis.asyncio.SSLConnection
    sentinels = {
        key: options.pop(f"sentinel_{key}")
        for key in ("username", "password")
        if f"sentinel_{key}" in options and kind == "sentinel"
    }
    if kind == "cluster":
        return Place("cluster", options, tls, seeds, asking=options)
    asking = {key: value for key, value in options.items() if key.startswith("ssl_")} | sentinels
    return Place("sentinel", options, tls, seeds, name=name, asking=asking)


def _address(text: str, *, port: int) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        host, number = parts.hostname, parts.port
    except ValueError:
        host = number = None
    # What is wrong is not repeated: it may be a part of a password.
    if not host or text.endswith(":"):
        raise ValueError("it has no host, or a port that is no number")
    return host, port if number is None else number


def _database(path: str) -> int:
    text = path.strip("/")
    if text and not text.isdecimal():
        raise ValueError("behind the host stands what is no number of a database")
    return int(text or "0")


def _mistake(url: str, why: str) -> UserError:
    shown = without_passwords(url)
    return UserError(f"queue.url: {shown!r} is not a Redis URL ({why}); {EXAMPLES}")
