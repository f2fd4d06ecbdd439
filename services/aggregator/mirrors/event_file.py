"""TensorBoard's event files, byte by byte: protobuf messages `Event` in TFRecord frames.

Written here because the packages that can also bring what nothing else in this service needs. The
fields are those of tensorflow/core/util/event.proto and framework/summary.proto.
"""

import struct
from collections.abc import Mapping

MASK_DELTA = 0xA282EAD8
"""TFRecord stores checksums rotated and moved by this: a checksum of checksums would be weak."""

POLYNOMIAL = 0x82F63B78
"""CRC-32C, reflected (RFC 3720, appendix B.4)."""

FILE_VERSION = "brain.Event:2"
"""The first event of a file says so."""

SESSION_STARTED = 1


def _table() -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        remainder = byte
        for _ in range(8):
            remainder = (remainder >> 1) ^ (POLYNOMIAL if remainder & 1 else 0)
        rows.append(remainder)
    return tuple(rows)


TABLE = _table()


def crc32c(data: bytes) -> int:
    """The CRC-32C of some bytes.

    Example: of b"123456789" it is 0xE3069283.
    """
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder = TABLE[(remainder ^ byte) & 0xFF] ^ (remainder >> 8)
    return remainder ^ 0xFFFFFFFF


def masked(checksum: int) -> int:
    """A checksum as TFRecord stores it."""
    return (((checksum >> 15) | (checksum << 17)) + MASK_DELTA) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """A TFRecord: length, checksum of the length, data, checksum of the data; little-endian."""
    length = struct.pack("<Q", len(data))
    return b"".join(
        (
            length,
            struct.pack("<I", masked(crc32c(length))),
            data,
            struct.pack("<I", masked(crc32c(data))),
        )
    )


def version_event(*, at_s: float) -> bytes:
    """The event that a file begins with."""
    return _double(1, at_s) + _bytes(3, FILE_VERSION.encode())


def start_event(*, step: int, at_s: float) -> bytes:
    """A session starts with this step: readers forget what they have read from it on."""
    log = _number(1, SESSION_STARTED)
    return _double(1, at_s) + _number(2, step) + _bytes(7, log)


def scalars_event(values: Mapping[str, float], *, step: int, at_s: float) -> bytes:
    """Scalars of one step, by tag. They are kept with 32 bits, as the format has it."""
    summary = b"".join(
        _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items()
    )
    return _double(1, at_s) + _number(2, step) + _bytes(5, summary)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + _float32(value)


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # beyond what 32 bits hold
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))
