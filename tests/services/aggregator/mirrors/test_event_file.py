"""Event files, read by protobuf's own parser and against published checksums."""

import pytest

from services.aggregator.mirrors.event_file import (
    crc32c,
    frame,
    masked,
    scalars_event,
    start_event,
    version_event,
)
from tests.services.aggregator.mirrors.reading import events_in, parse


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        # RFC 3720, appendix B.4.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_checksums_are_those_of_the_standard(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum


def test_the_mask_is_that_of_the_format() -> None:
    # The frame's length 24 as TensorFlow's own files begin: 18 00 00 00 00 00 00 00 a3 7f 4b 22.
    assert frame(bytes(24))[:12] == bytes.fromhex("1800000000000000a37f4b22")
    assert masked(0) == 0xA282EAD8


def test_events_are_read_as_they_were_written() -> None:
    version = parse(version_event(at_s=12.5))
    assert (version.wall_time, version.file_version) == (12.5, "brain.Event:2")
    start = parse(start_event(step=1 << 40, at_s=1.0))
    assert (start.step, start.session_log.status) == (1 << 40, 1)
    values = {"perf/step_s": 0.5, "kl/3+": -1e-7, "größe": 3.0, "large": 1e300}
    event = parse(scalars_event(values, step=7, at_s=2.0))
    assert (event.step, event.wall_time) == (7, 2.0)
    read = {each.tag: each.simple_value for each in event.summary.value}
    assert list(read) == list(values)
    assert read["perf/step_s"] == 0.5
    assert read["kl/3+"] == pytest.approx(-1e-7)
    assert read["large"] == float("inf")  # as the format has 32 bits


def test_frames_follow_each_other_and_a_changed_byte_is_noticed() -> None:
    data = frame(version_event(at_s=1.0)) + frame(scalars_event({"loss": 1.0}, step=1, at_s=2.0))
    assert [each.step for each in events_in(data)] == [0, 1]
    with pytest.raises(AssertionError, match="checksum"):
        events_in(data[:20] + bytes([data[20] ^ 1]) + data[21:])
