"""How what a tool returns becomes the text that the model reads. Imports little: it is used inside
worker processes, too."""

import json
from typing import Any

from services.common.worker_process import plain


def as_text(value: Any) -> str:
    """Text as it is; bytes as UTF-8, what is none replaced by U+FFFD; anything else as JSON (values
    of numpy and torch by `tolist()`), and what JSON cannot hold as `str()` gives it.

    Example: None -> "null", {"é": (1, 2)} -> '{"é": [1, 2]}', b"a\\xff" -> "a\ufffd",
    float("nan") -> "NaN", {1} -> "{1}".
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    try:
        return json.dumps(value, ensure_ascii=False, default=plain)
    except (TypeError, ValueError, RecursionError):
        return str(value)
