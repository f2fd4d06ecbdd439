import dataclasses
import datetime
import math
import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from services.generator.tool_text import as_text


@dataclasses.dataclass
class Point:
    x: int


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("verbatim \n", "verbatim \n"),
        ("", ""),
        (Text("sub"), "sub"),
        (b"a\xff\xc3\xa9", "a\ufffdé"),
        (bytearray(b"x"), "x"),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (0.1, "0.1"),
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
        ({"é": (1, 2)}, '{"é": [1, 2]}'),
        ([1, "a", None], '[1, "a", null]'),
        (np.float32(0.5), "0.5"),
        (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
        ({"n": np.int64(7)}, '{"n": 7}'),
        (Decimal("1.10"), "1.10"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        ({1}, "{1}"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (Point(1), "Point(x=1)"),
    ],
)
def test_a_result_becomes_text_in_a_stated_way(value: Any, text: str) -> None:
    made = as_text(value)
    assert made == text
    assert type(made) is str


def test_what_refers_to_itself_becomes_text() -> None:
    value: list[Any] = []
    value.append(value)
    assert as_text(value) == "[[...]]"


def test_a_worker_imports_little() -> None:
    code = (
        "import sys, services.generator.tool_worker\n"
        "print(sorted({'asyncio', 'numpy', 'torch', 'vllm', 'pydantic', 'google'}"
        " & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
