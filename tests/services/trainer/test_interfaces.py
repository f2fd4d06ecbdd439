from collections.abc import Iterator

import pytest

from services.common.errors import UserError
from services.trainer import interfaces
from services.trainer.interfaces import interface_towards, loopback_interface, own_address


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_the_interface_is_that_of_the_route() -> None:
    assert own_address("127.0.0.2") == "127.0.0.1"
    assert interface_towards("127.0.0.2") == loopback_interface()
    assert interface_towards("localhost") == loopback_interface()


def test_what_the_environment_says_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert interface_towards("no.such.host.invalid") == "ib0"


def test_a_name_that_nobody_knows_may_be_known_later() -> None:
    with pytest.raises(OSError, match=r"\S"):
        own_address("no.such.host.invalid")


def test_an_address_of_no_interface_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def others() -> Iterator[tuple[str, str]]:
        yield "eth0", "10.0.0.1"
        yield "eth0", "fe80::1"

    monkeypatch.setattr(interfaces, "_addresses", others)
    with pytest.raises(UserError, match=r"^network\.ranks: 127\.0\.0\.2 is reached from 127"):
        interface_towards("127.0.0.2")
