"""The forms of queue.url."""

import pytest

from services.common.errors import UserError
from services.common.queue_servers import open_client
from services.common.queue_url import Place, read_url


def test_one_server() -> None:
    place = read_url("redis://me:p%40ss@h:7000/2")
    expected = {"host": "h", "port": 7000, "db": 2, "username": "me", "password": "p@ss"}
    assert (place.kind, place.tls, place.options) == ("server", False, expected)
    assert read_url("rediss://h?ssl_ca_certs=ca.pem").tls
    assert read_url("unix:///run/queue.sock?db=1").options["path"] == "/run/queue.sock"


def test_sentinels() -> None:
    url = "redis+sentinel://me:p%40ss@a,[::1]:7000/big%20one/3?sentinel_password=q%26&ssl_ciphers=X"
    assert read_url(url.replace("redis", "rediss")) == Place(
        "sentinel",
        {"username": "me", "password": "p@ss", "db": 3, "ssl_ciphers": "X"},
        tls=True,
        seeds=(("a", 26379), ("::1", 7000)),
        name="big one",
        asking={"ssl_ciphers": "X", "password": "q&"},
    )
    assert read_url("redis+sentinel://a/m").options == {"db": 0}


def test_a_cluster_is_asked_with_what_its_nodes_want() -> None:
    options = {"password": "secret", "db": 0}
    assert read_url("redis+cluster://:secret@a:1,b") == Place(
        "cluster", options, seeds=(("a", 1), ("b", 6379)), asking=options
    )


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("localhost:6379", "begins differently"),
        ("http://h", "begins differently"),
        ("sentinel://h/m", "begins differently"),
        ("redis://", "has no host"),
        ("redis://h:", "has no host, or a port"),
        ("redis://h:port", "port that is no number"),
        ("redis://h:70000", "port that is no number"),
        ("redis://h/first", "no number of a database"),
        ("redis://a,b:1", "several hosts"),
        ("redis://h#0", "what does # mean"),
        ("redis://h?socket_timout=1", "unexpected keyword argument 'socket_timout'"),
        ("redis://h?socket_timeout=soon", "Invalid value for 'socket_timeout'"),
        ("redis://[::1", "its host is malformed"),
        ("unix://run/queue.sock", "names no socket"),
        ("redis+sentinel://a,b", "lacks the name"),
        ("redis+sentinel://a,b/", "lacks the name"),
        ("redis+sentinel://a,,b/m", "has no host"),
        ("redis+sentinel://a/m/x", "no number of a database"),
        ("redis+cluster://a/1", "database 0 alone"),
        ("redis+cluster://a?sentinel_password=x", "unexpected keyword argument"),
    ],
)
def test_a_malformed_one_is_a_mistake(url: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        open_client(url, run="r")
    message = str(caught.value)
    assert message.startswith("queue.url: ")
    assert why in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@h",
        "redis://me:secret/1@h:6379",
        "redis://me:secret#1@h",
        "redis://me:secret@[h",
        "redis://me:secret\N{FULLWIDTH SOLIDUS}@h",
        "redis+sentinel://me:secret@h",
        "redis+sentinel://me:x@h?sentinel_password=secret",
        "redis://h/x?password=a@secret",
    ],
)
def test_a_password_is_not_repeated(url: str) -> None:
    with pytest.raises(UserError) as caught:
        read_url(url)
    assert "secret" not in str(caught.value)


def test_what_is_read_shows_no_password() -> None:
    place = read_url("redis+sentinel://me:secret@h/m?sentinel_password=secret")
    assert "secret" not in repr(place)
