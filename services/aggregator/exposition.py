"""Prometheus' text format, version 0.0.4."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family; `suffix` is `_sum` or `_count` in a summary."""

    labels: Mapping[str, str]
    value: float
    suffix: Literal["", "_sum", "_count"] = ""


@dataclass(frozen=True, slots=True)
class Exposed:
    """A family and its samples, which must differ in their labels."""

    name: str
    type: Literal["counter", "gauge", "summary"]
    help: str
    samples: tuple[Sample, ...]


def render(families: Iterable[Exposed]) -> str:
    r"""The text. Families without a sample are left out.

    Example: one gauge `a` with b="c\d" and the value 2.5 is

        # HELP a What it means.
        # TYPE a gauge
        a{b="c\\d"} 2.5
    """
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.type}")
        for sample in family.samples:
            pairs = ",".join(
                f'{label}="{_quoted(value)}"' for label, value in sorted(sample.labels.items())
            )
            labels = f"{{{pairs}}}" if pairs else ""
            lines.append(f"{family.name}{sample.suffix}{labels} {number(sample.value)}")
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """A value as Prometheus writes and reads it: no more digits than it has."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    whole = value == int(value) and abs(value) < 2**53
    return str(int(value)) if whole else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
