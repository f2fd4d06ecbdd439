"""What Prometheus calls the keys of the catalogue.

`/` and what else a name cannot hold become `_`, a count ends in `_total`, and a placeholder becomes
a label: `tools/{tool}/call_total` is `headrace_tools_call_total{tool="…"}`. Where that name is
another key's already, the placeholder is named: `kl` is `headrace_kl`, `kl/{lag}`
`headrace_kl_by_lag{lag="…"}`. Keys under `custom/` share two names, with what follows the prefix as
the label `name`: no two of them can ever become one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from services.aggregator.metric import CUSTOM_PREFIX, PLACEHOLDER, Catalogue, Metric
from services.common.instruments import REDUCTIONS, Instrument, Reduction

PREFIX = "headrace_"

OWN_PREFIX = PREFIX + "aggregator_"
"""Names of the aggregator's own health."""

POOLED_PREFIX = PREFIX + "pooled_"
"""Gauges over all producers, from merged partials. Under names of their own, so that no sum over
labels can count them beside the producers' values.
"""

RESERVED = ("__name__", "run", "producer", "job", "instance", "le", "quantile")
"""Labels that a placeholder cannot be called."""

KEYS_REMEMBERED = 10_000
"""A key's declaration is found by trying all patterns; every query asks for all keys of its runs.
"""

Type = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one name."""

    name: str
    type: Type
    help: str
    label: str | None
    """The label that holds the placeholder's value; None without a placeholder."""
    pooled: bool = False
    """Whether its values are over all producers, without the label `producer`."""


@dataclass(frozen=True, slots=True)
class Named:
    """The family of one key, and the labels that the key gives."""

    family: Family
    labels: Mapping[str, str]
    reduction: Reduction
    """What a value is: of a counter the sum so far, of a gauge the metric's default."""


class Names:
    """The names of a catalogue. Raises ValueError where two declarations would share one, or a
    placeholder has the name of a label that Prometheus or Headrace sets.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._ours = [m for m in catalogue.metrics if not m.key.startswith(CUSTOM_PREFIX)]
        self._find = lru_cache(maxsize=KEYS_REMEMBERED)(catalogue.find)
        self._custom = {instrument: _custom(instrument) for instrument in REDUCTIONS}
        taken = {f.name: "keys under custom/" for each in self._custom.values() for f in each}
        self._declared: dict[str, tuple[Family, ...]] = {}
        # Keys without a placeholder first: of two that make one name they keep it.
        for metric in sorted(self._ours, key=lambda metric: "{" in metric.key):
            self._declared[metric.key] = _families(metric, taken)
            for family in self._declared[metric.key]:
                if family.name in taken or family.name.startswith(OWN_PREFIX):
                    holder = taken.get(family.name, "the aggregator itself")
                    raise ValueError(f"{metric.key}: {family.name} is the name of {holder}")
                taken[family.name] = metric.key

    @property
    def families(self) -> tuple[Family, ...]:
        """Every family once, in the catalogue's order; those of custom keys last."""
        declared = [self._declared[metric.key] for metric in self._ours]
        custom = (self._custom["count"], self._custom["observation"])  # ratios are in its gauge
        return tuple(family for families in (*declared, *custom) for family in families)

    def of(self, key: str, *, instrument: Instrument) -> tuple[Named, ...]:
        """The families that a key's values are in: its own and, of a gauge, the pooled one. None
        for a key that is neither declared nor custom, as an earlier release may have left in the
        store.
        """
        found = self._find(key)
        families: tuple[Family, ...]
        value: str | None
        if key.startswith(CUSTOM_PREFIX):
            families, value = self._custom[instrument], key.removeprefix(CUSTOM_PREFIX)
        elif found is not None:
            families, value = self._declared[found.metric.key], found.value
        else:
            return ()
        default = found.metric.default if found is not None else REDUCTIONS[instrument][0]
        return tuple(
            Named(
                family,
                {family.label: value} if family.label is not None and value is not None else {},
                "sum" if family.type == "counter" else default,
            )
            for family in families
        )


def _families(metric: Metric, taken: Mapping[str, str]) -> tuple[Family, ...]:
    """A declaration's own family and, of a gauge, the pooled one."""
    placeholder = PLACEHOLDER.search(metric.key)
    label = placeholder.group(1) if placeholder else None
    if label in RESERVED:
        raise ValueError(f"{metric.key}: {{{label}}} cannot be a label, it has a meaning already")
    parts = PLACEHOLDER.sub("", metric.key).split("/")
    stem = "_".join(re.sub(r"[^a-zA-Z0-9_]", "_", part) for part in parts if part)
    counter = metric.instrument == "count"
    name = _complete(stem, counter=counter)
    if label is not None and PREFIX + name in taken:
        name = _complete(f"{stem.removesuffix('_total')}_by_{label}", counter=counter)
    if counter:
        text = f"{metric.meaning} Total of the run, {metric.unit}."
        return (Family(PREFIX + name, "counter", text, label),)
    return _gauges(name, f"{metric.meaning} ({metric.default}, {metric.unit})", label)


def _complete(stem: str, *, counter: bool) -> str:
    return f"{stem}_total" if counter and not stem.endswith("_total") else stem


def _gauges(name: str, text: str, label: str | None) -> tuple[Family, ...]:
    return (
        Family(PREFIX + name, "gauge", text, label),
        Family(POOLED_PREFIX + name, "gauge", text, label, pooled=True),
    )


def _custom(instrument: Instrument) -> tuple[Family, ...]:
    text = "Keys of the user's own, under custom/."
    if instrument == "count":
        return (Family(PREFIX + "custom_total", "counter", text, "name"),)
    return _gauges("custom", text, "name")
