"""A name server on the loopback that knows one name, whose addresses can be changed: as the name of
a headless Service is answered in a cluster."""

import asyncio
import socket
import struct
from typing import Self

A, IN, TTL_S = 1, 1, 5
HEADER_BYTES = 12


class NameServer(asyncio.DatagramProtocol):
    """Answers every A question with `addresses`, and others with nothing."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked = 0
        self.port = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        self.port = self._transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()

    def target(self, port: int) -> str:
        """What a channel is opened to, as `dns:///scorer:50051` in a cluster."""
        return f"dns://127.0.0.1:{self.port}/scorer.test:{port}"

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        """RFC 1035, section 4.1."""
        number, flags, *_ = struct.unpack("!6H", data[:HEADER_BYTES])
        end = data.index(b"\0", HEADER_BYTES) + 1
        kind, _class = struct.unpack("!2H", data[end : end + 4])
        question = data[HEADER_BYTES : end + 4]
        found = self.addresses if kind == A else []
        self.asked += kind == A
        # A response, authoritative, with the recursion that was desired.
        answer = struct.pack("!6H", number, 0x8400 | (flags & 0x0100), 1, len(found), 0, 0)
        answer += question
        for each in found:
            pointer = 0xC000 | HEADER_BYTES
            answer += struct.pack("!3HIH", pointer, A, IN, TTL_S, 4) + socket.inet_aton(each)
        self._transport.sendto(answer, address)
