"""Rows of an export as CSV or Parquet, written piece by piece: no more than one piece is held."""

import csv
import io
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_ROWS = 50_000
"""Rows of a Parquet row group, at least (but for the last): few enough to hold."""

FORMULA_BEGINS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A spreadsheet may take a cell that begins so for a formula, and run it."""


class Row(NamedTuple):
    """One window of one series. None is an absent value, never NaN."""

    run: str
    key: str
    axis: str
    x: int
    """The first step, or the begin in seconds since 1970."""
    time: datetime | None
    """The begin, where the axis is time."""
    reduce: str
    value: float | None
    low: float | None
    high: float | None
    nan: int
    pos_inf: int
    neg_inf: int
    """How many values of the window are in no sum."""
    producer: str | None
    """None: over all producers."""


SCHEMA = pa.schema(
    [
        pa.field("run", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("axis", pa.string(), nullable=False),
        pa.field("x", pa.int64(), nullable=False),
        pa.field("time", pa.timestamp("us", tz="UTC")),
        pa.field("reduce", pa.string(), nullable=False),
        pa.field("value", pa.float64()),
        pa.field("low", pa.float64()),
        pa.field("high", pa.float64()),
        pa.field("nan", pa.int64(), nullable=False),
        pa.field("pos_inf", pa.int64(), nullable=False),
        pa.field("neg_inf", pa.int64(), nullable=False),
        pa.field("producer", pa.string()),
    ]
)
"""The types of a Row's columns in Parquet."""


def to_csv(pages: Iterable[list[Row]]) -> Iterator[bytes]:
    """A header and one line a row, one piece a page. An absent value is an empty cell; text that a
    spreadsheet would take for a formula gets an apostrophe before it.
    """
    yield _lines([Row._fields])
    for page in pages:
        yield _lines([_cell(value) for value in row] for row in page)


def to_parquet(pages: Iterable[list[Row]]) -> Iterator[bytes]:
    """A Parquet file of SCHEMA, one piece a row group."""
    out = _Pieces()
    with pq.ParquetWriter(out, SCHEMA) as writer:
        held: list[Row] = []
        for page in pages:
            held += page
            if len(held) >= ROW_GROUP_ROWS:
                writer.write_table(_table(held))
                held = []
                yield out.take()
        if held:
            writer.write_table(_table(held))
    yield out.take()


def _lines(rows: Iterable[Iterable[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _cell(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, str) and value.startswith(FORMULA_BEGINS):
        return f"'{value}"
    return value


def _table(rows: list[Row]) -> Any:
    columns = zip(*rows, strict=True)
    return pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)],
        schema=SCHEMA,
    )


class _Pieces(io.RawIOBase):
    """A file that is only written, and given away as it grows."""

    def __init__(self) -> None:
        super().__init__()
        self._held = bytearray()
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._held += data
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position

    def take(self) -> bytes:
        """What was written since the last take."""
        piece = bytes(self._held)
        self._held.clear()
        return piece
