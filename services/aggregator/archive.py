"""The done set: of every group whose details were pruned, what became of it, in a few bytes.

Groups of one epoch and attempt whose ordinals are neighbours share a row: their columns, one behind
the other, as differences where they rise, split by the significance of their bytes (so that zeros
stand together) and deflated. A group in it is never brought back by a late event.
"""

import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, func, select, tuple_

from services.aggregator import said, schema, statements
from services.aggregator.group_ids import GroupId

ORDINALS = 1024
"""Neighbours that share a row."""

BLOCKS_AT_ONCE = 256
"""Of one query."""

HEAD = struct.Struct("<II")
"""Number of groups, and bytes of the reasons, which follow as JSON."""

NO_STEP = -1

Block = tuple[int, int, int]
"""(epoch, attempt, ordinal // ORDINALS)."""

OF_A_GROUP = ("ordinal", "try", "state", "reason", "step", "row")
RISING = ("ordinal", "step")
"""Columns, and those that are stored as differences from one group to the next."""


@dataclass(frozen=True, slots=True)
class Archived:
    """What became of a group whose details were pruned."""

    state: int
    reason: str
    step: int | None
    """The optimizer step that trained it."""
    row_index: int


def block_of(group: GroupId) -> Block:
    """Where a group belongs."""
    return (group.epoch, group.attempt, group.ordinal // ORDINALS)


def pack(groups: Mapping[GroupId, Archived]) -> bytes:
    """Groups of one block as they are stored."""
    reasons = sorted({each.reason for each in groups.values()})
    index = {reason: number for number, reason in enumerate(reasons)}
    rows = [
        (
            group.ordinal,
            group.try_number,
            found.state,
            index[found.reason],
            NO_STEP if found.step is None else found.step,
            found.row_index,
        )
        for group, found in sorted(groups.items())
    ]
    columns = np.array(rows, "<i8").reshape(-1, len(OF_A_GROUP)).T
    said_why = json.dumps(reasons, ensure_ascii=False).encode()
    parts = [HEAD.pack(len(rows), len(said_why)), said_why]
    for name, column in zip(OF_A_GROUP, columns, strict=True):
        stored = np.diff(column, prepend=np.int64(0)) if name in RISING else column
        planes = np.ascontiguousarray(stored, "<i8").view(np.uint8).reshape(-1, 8).T
        parts.append(planes.tobytes())
    return zlib.compress(b"".join(parts))


def unpack(block: Block, packed: bytes) -> dict[GroupId, Archived]:
    """The groups of a block that pack() stored."""
    columns, reasons = _columns(packed)
    epoch, attempt, _ = block
    return {
        GroupId(epoch, ordinal, attempt, number): Archived(
            state, reasons[why], None if step == NO_STEP else step, row
        )
        for ordinal, number, state, why, step, row in zip(
            *(columns[name].tolist() for name in OF_A_GROUP), strict=True
        )
    }


def _columns(packed: bytes) -> tuple[dict[str, NDArray[np.int64]], list[str]]:
    plain = zlib.decompress(packed)
    number, length = HEAD.unpack_from(plain)
    begin = HEAD.size + length
    reasons: list[str] = json.loads(plain[HEAD.size : begin])
    planes = np.frombuffer(plain, np.uint8, offset=begin).reshape(len(OF_A_GROUP), 8, number)
    columns = {}
    for name, own in zip(OF_A_GROUP, planes, strict=True):
        column = np.ascontiguousarray(own.T).view("<i8").ravel()
        columns[name] = np.cumsum(column) if name in RISING else column
    return columns, reasons


def find(connection: Connection, run_id: int, groups: Iterable[GroupId]) -> dict[GroupId, Archived]:
    """Those of some groups whose details were pruned."""
    wanted: defaultdict[Block, list[GroupId]] = defaultdict(list)
    for group in groups:
        wanted[block_of(group)].append(group)
    found = {}
    for block, held in _blocks(connection, run_id, wanted):
        found.update({group: held[group] for group in wanted[block] if group in held})
    return found


def put(connection: Connection, run_id: int, groups: Mapping[GroupId, Archived]) -> None:
    """Add groups, or put these in the place of those that are there."""
    new: defaultdict[Block, dict[GroupId, Archived]] = defaultdict(dict)
    for group, found in groups.items():
        new[block_of(group)][group] = found
    known = dict(_blocks(connection, run_id, new))
    rows = []
    for block, added in sorted(new.items()):
        held = known.get(block, {}) | added
        steps = [each.step for each in held.values() if each.step is not None]
        rows.append(
            (
                *(run_id, *block, len(held)),
                sum(each.state == said.GIVEN_UP for each in held.values()),
                min(steps, default=None),
                max(steps, default=None),
                pack(held),
            )
        )
    table = schema.ledger_archive
    names = [column.name for column in table.columns if not column.primary_key]
    statements.replace(connection, table, rows, names=names)


def num_groups(connection: Connection, run_id: int) -> int:
    """How many groups were archived, those of evaluations apart."""
    table = schema.ledger_archive
    training = (table.c.run_id == run_id) & (table.c.epoch >= 0)
    total = connection.scalar(select(func.sum(table.c.num_groups)).where(training))
    return int(total or 0)


def everything(connection: Connection, run_id: int) -> Iterator[tuple[GroupId, Archived]]:
    """Every group that was archived."""
    return _scan(connection, run_id, schema.ledger_archive.c.num_groups > 0)


def trained_from(
    connection: Connection, run_id: int, first_step: int, *, end_step: int | None = None
) -> Iterator[tuple[GroupId, Archived]]:
    """Groups that a step from `first_step` on (and before `end_step`) trained."""
    table = schema.ledger_archive
    where = table.c.last_step >= first_step
    if end_step is not None:
        where &= table.c.first_step < end_step
    for group, found in _scan(connection, run_id, where):
        if found.step is None or found.step < first_step:
            continue
        if end_step is None or found.step < end_step:
            yield group, found


def given_up(connection: Connection, run_id: int) -> Iterator[tuple[GroupId, Archived]]:
    """Groups that were given up, latest block first."""
    for group, found in _scan(connection, run_id, schema.ledger_archive.c.num_given_up > 0):
        if found.state == said.GIVEN_UP:
            yield group, found


def of_row(
    connection: Connection, run_id: int, row_index: int
) -> Iterator[tuple[GroupId, Archived]]:
    """Groups of one row of the dataset. Reads the whole archive: about 0.1 s for a million."""
    table = schema.ledger_archive
    for block, packed in _stored(connection, run_id, table.c.num_groups > 0):
        columns, _ = _columns(packed)
        if (columns["row"] == row_index).any():
            for group, found in unpack(block, packed).items():
                if found.row_index == row_index:
                    yield group, found


def raised(found: Archived, *, state: int, reason: str, step: int | None, row: int) -> Archived:
    """What becomes of a group of which more was said: the higher state wins."""
    if state > found.state:
        found = replace(found, state=state, reason=reason)
    if step is not None and found.step is None:
        found = replace(found, step=step)
    return replace(found, row_index=max(found.row_index, row))


def _blocks(
    connection: Connection, run_id: int, wanted: Collection[Block]
) -> Iterator[tuple[Block, dict[GroupId, Archived]]]:
    table = schema.ledger_archive
    keys = sorted(wanted)
    for start in range(0, len(keys), BLOCKS_AT_ONCE):
        key = tuple_(table.c.epoch, table.c.attempt, table.c.block)
        some = keys[start : start + BLOCKS_AT_ONCE]
        for block, packed in _stored(connection, run_id, key.in_(some)):
            yield block, unpack(block, packed)


def _scan(
    connection: Connection, run_id: int, where: ColumnElement[bool]
) -> Iterator[tuple[GroupId, Archived]]:
    for block, packed in _stored(connection, run_id, where):
        yield from unpack(block, packed).items()


def _stored(
    connection: Connection, run_id: int, where: ColumnElement[bool]
) -> Iterator[tuple[Block, Any]]:
    """Rows of the archive, latest first."""
    table = schema.ledger_archive
    key = (table.c.epoch, table.c.attempt, table.c.block)
    rows = connection.execute(
        select(*key, table.c.groups)
        .where(table.c.run_id == run_id, where)
        .order_by(*(column.desc() for column in key))
    )
    for epoch, attempt, block, packed in rows:
        yield (epoch, attempt, block), packed
