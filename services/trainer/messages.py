"""Rows and arrays as bytes for the other ranks: safetensors, with JSON for what is no array."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors.numpy import load, save

from services.trainer.adapter_publishing import Kind
from services.trainer.types import Row, TrainSample

ABOUT = "about"
"""Name of the JSON among the arrays."""


def of_row(row: Row) -> bytes:
    """A row as it travels; `to_row` gives it back, NaN and infinities included."""
    arrays: dict[str, Any] = {}
    samples = []
    for index, sample in enumerate(row.samples):
        plain = {}
        for each in fields(sample):
            value = getattr(sample, each.name)
            if isinstance(value, np.ndarray):
                arrays[f"{index}.{each.name}"] = np.ascontiguousarray(value)
            else:
                plain[each.name] = value
        samples.append(plain)
    return _packed(arrays, {"samples": samples, "echo": row.echo})


def to_row(payload: bytes) -> Row:
    """What `of_row` made."""
    arrays, about = _unpacked(payload)
    samples = []
    for index, plain in enumerate(about["samples"]):
        prefix = f"{index}."
        own = {
            name.removeprefix(prefix): array
            for name, array in arrays.items()
            if name.startswith(prefix)
        }
        samples.append(TrainSample(**plain, **own))
    return Row(samples, echo=about["echo"])


def of_rows(rows: "np.ndarray[Any, Any]", *, path: Path | None = None) -> bytes:
    """An array of tokens, and a path that goes with it."""
    return _packed({"rows": np.ascontiguousarray(rows)}, {"path": str(path or "")})


def to_rows(payload: bytes) -> "tuple[np.ndarray[Any, Any], Path]":
    """What `of_rows` made; without a path it is the empty one."""
    arrays, about = _unpacked(payload)
    return arrays["rows"], Path(about["path"])


def to_path(payload: bytes) -> Path:
    """A path that travelled by itself."""
    return Path(payload.decode())


def of_kind(kind: Kind | None) -> bytes:
    """Which of a model's tensors are wanted; None for those that are published."""
    return (kind or "").encode()


def to_kind(payload: bytes) -> Kind | None:
    """What `of_kind` made."""
    return cast(Kind, payload.decode()) if payload else None


def _packed(arrays: dict[str, Any], about: dict[str, Any]) -> bytes:
    text = json.dumps(about, default=_plain).encode()
    payload: bytes = save({**arrays, ABOUT: np.frombuffer(text, np.uint8)})
    return payload


def _plain(value: Any) -> Any:
    """Numpy's scalars as Python's."""
    item: Callable[[], Any] = value.item
    return item()


def _unpacked(payload: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = load(payload)
    about: dict[str, Any] = json.loads(arrays.pop(ABOUT).tobytes())
    return arrays, about
