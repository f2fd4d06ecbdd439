"""Which of a machine's network interfaces reaches another machine, for gloo and NCCL, which ask for
one by its name. Linux; elsewhere GLOO_SOCKET_IFNAME says it."""

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from services.common.errors import UserError

LOOPBACK = "127.0.0.1"

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface (netdevice(7))."""

IPV6_ADDRESSES = Path("/proc/net/if_inet6")

ANY_PORT = 9
"""A port has to be named; nothing is sent to it."""


def loopback_interface() -> str:
    """The name of the loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


def own_address(peer: str) -> str:
    """The IP address that this machine has for `peer`, by its routes. Raises OSError for a name or
    an address that cannot be reached.

    Example: `own_address("127.0.0.2")` is "127.0.0.1".
    """
    family, _, _, _, address = socket.getaddrinfo(peer, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # of a datagram socket: it only looks for a route
        own: str = probe.getsockname()[0]
        return own.partition("%")[0]


def interface_towards(peer: str) -> str:
    """The interface that reaches `peer`, or what the environment's GLOO_SOCKET_IFNAME says.

    Raises OSError as `own_address` does, and UserError when no interface has that address.
    """
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        return chosen
    own = own_address(peer)
    for name, address in _addresses():
        if ipaddress.ip_address(address) == ipaddress.ip_address(own):
            return name
    raise UserError(
        f"network.ranks: {peer} is reached from {own}, which is the first address of no network "
        "interface; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface's name"
    )


def _addresses() -> Iterator[tuple[str, str]]:
    """Interfaces and their addresses; of IPv4 the first of each."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            yield name, socket.inet_ntop(socket.AF_INET, answer[20:24])
    if IPV6_ADDRESSES.exists():
        for line in IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, str(ipaddress.IPv6Address(int(digits, 16)))
