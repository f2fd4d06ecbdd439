"""A reader of event files that shares nothing with the writer: protobuf's parser, and a checksum
that is computed another way."""

import struct
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Field = descriptor_pb2.FieldDescriptorProto

MESSAGES: dict[str, list[tuple[str, int, int, str | None, bool]]] = {
    "Value": [
        ("tag", 1, Field.TYPE_STRING, None, False),
        ("simple_value", 2, Field.TYPE_FLOAT, None, False),
    ],
    "Summary": [("value", 1, Field.TYPE_MESSAGE, "Value", True)],
    "SessionLog": [("status", 1, Field.TYPE_INT32, None, False)],
    "Event": [
        ("wall_time", 1, Field.TYPE_DOUBLE, None, False),
        ("step", 2, Field.TYPE_INT64, None, False),
        ("file_version", 3, Field.TYPE_STRING, None, False),
        ("summary", 5, Field.TYPE_MESSAGE, "Summary", False),
        ("session_log", 7, Field.TYPE_MESSAGE, "SessionLog", False),
    ],
}
"""The fields of TensorFlow's event.proto and summary.proto that scalars need."""


def _event_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="events.proto", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of, repeated in fields:
            label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, type=kind, label=label)
            if of is not None:
                added.type_name = f".{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Event"))


EVENT = _event_class()


def parse(data: bytes) -> Any:
    """An Event message."""
    event = EVENT()
    event.ParseFromString(data)
    return event


def checksum(data: bytes) -> int:
    """CRC-32C, masked: bit by bit, by division of polynomials."""
    remainder = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            if (remainder ^ byte >> bit) & 1:
                remainder = remainder >> 1 ^ 0x82F63B78
            else:
                remainder >>= 1
    remainder ^= 0xFFFFFFFF
    return ((remainder >> 15 | remainder << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events_in(data: bytes) -> list[Any]:
    """The events of a file; asserts that all checksums are right and nothing is left over."""
    events = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        (of_length,) = struct.unpack("<I", data[8:12])
        body, rest = data[12 : 12 + length], data[12 + length :]
        (of_body,) = struct.unpack("<I", rest[:4])
        assert checksum(data[:8]) == of_length, "checksum of a length"
        assert checksum(body) == of_body, "checksum of an event"
        events.append(parse(body))
        data = rest[4:]
    return events


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows of a folder, by tag and step: files in the order of their names, and
    what a session's start supersedes forgotten. Asserts that no step comes twice."""
    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir()):
        events = events_in(path.read_bytes())
        assert events[0].file_version == "brain.Event:2"
        for event in events:
            if event.session_log.status == 1:
                for steps in found.values():
                    for step in [each for each in steps if each >= event.step]:
                        del steps[step]
            for value in event.summary.value:
                steps = found.setdefault(value.tag, {})
                assert event.step not in steps, f"{value.tag}: step {event.step} twice"
                assert all(each < event.step for each in steps), "steps ascend"
                steps[event.step] = value.simple_value
    return found
