"""What a declaration of the catalogue is, and how a key is matched with the one that it fits."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from services.common.custom_metrics import CUSTOM_PREFIX as CUSTOM_PREFIX
from services.common.instruments import REDUCTIONS, Instrument, Reduction

Service = Literal["generator", "scorer", "trainer", "aggregator"]
Services = tuple[Service, ...]

MAX_PLACEHOLDER_VALUES = 200
"""Different values of one placeholder (and different custom keys) in one run; what comes later is
kept under `other`.
"""

OTHER = "other"
"""The placeholder's value for what comes after that."""

PLACEHOLDER = re.compile(r"\{(\w+)\}")
PLACEHOLDER_VALUE = r"[^/\s{}]{1,100}"

ALL: Services = ("generator", "scorer", "trainer", "aggregator")


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of one key, or of all keys that fit its placeholder."""

    key: str
    instrument: Instrument
    unit: str
    """Of a value; of a count's sum."""
    default: Reduction
    """The reduction where a query names none."""
    producers: Services
    meaning: str
    since: str | None = None
    """The part of the plan that will record it, as "4 of 8"; None once it is recorded. It is taken
    all the same when somebody records it before.
    """
    only_when: str | None = None
    """What has to happen for it to be recorded ("a group was dropped"); None where every run has
    it.
    """
    old_names: tuple[str, ...] = ()
    """What earlier trainers (TRL's async GRPO) called it; one old key may have become several."""

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """What a query may ask for; the default is the first."""
        others = tuple(r for r in REDUCTIONS[self.instrument] if r != self.default)
        return (self.default, *others)

    def unit_of(self, reduction: Reduction) -> str:
        """The unit of a reduced value: a count of tokens has a rate in tokens/s."""
        return f"{self.unit}/s" if reduction == "rate" else self.unit

    @property
    def pattern(self) -> str:
        """A regular expression for the keys that this declares; its group is the placeholder's
        value.
        """
        parts = PLACEHOLDER.split(self.key)
        literal = [re.escape(part) for part in parts[::2]]
        return f"({PLACEHOLDER_VALUE})".join(literal)

    def key_for(self, value: str) -> str:
        """The key with the placeholder filled in: `kl/{lag}` for "0" is `kl/0`."""
        return PLACEHOLDER.sub(lambda _: value, self.key)


@dataclass(frozen=True, slots=True)
class Group:
    """Declarations that are read together."""

    title: str
    about: str
    """One sentence on what they have in common."""
    metrics: tuple[Metric, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A declaration that a key fits."""

    metric: Metric
    value: str | None
    """The placeholder's value; None for a key without one."""


class Catalogue:
    """Declarations, found by key. Raises ValueError when two declare the same key."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = tuple(metrics)
        self._exact: dict[str, Metric] = {}
        self._patterns: list[tuple[re.Pattern[str], Metric]] = []
        for metric in self.metrics:
            if metric.key in self._exact:
                raise ValueError(f"{metric.key} is declared twice")
            self._exact[metric.key] = metric
            if "{" in metric.key:
                self._patterns.append((re.compile(metric.pattern), metric))

    @property
    def renamed(self) -> dict[str, tuple[str, ...]]:
        """Old keys, and what they are called here; a query for one is answered with the new ones.

        Example: `{"step_time": ("perf/fwd_bwd_s",)}` where that metric has this old name.
        """
        found: dict[str, tuple[str, ...]] = {}
        for metric in self.metrics:
            for old in metric.old_names:
                found[old] = (*found.get(old, ()), metric.key)
        return found

    def find(self, key: str) -> Found | None:
        """The declaration of a key, exact ones first; None for an unknown or a custom key."""
        metric = self._exact.get(key)
        if metric is not None and "{" not in key:
            return Found(metric, None)
        for pattern, declared in self._patterns:
            fits = pattern.fullmatch(key)
            if fits is not None:
                return Found(declared, fits.group(1))
        return None

    def metric(self, key: str, *, instrument: Instrument) -> Metric:
        """The declaration of a key that is in use. Where none fits (a custom key, or one that was
        declared when it was recorded), the one that its instrument implies.
        """
        found = self.find(key)
        if found is not None and found.metric.instrument == instrument:
            return found.metric
        default = REDUCTIONS[instrument][0]
        return Metric(key, instrument, "", default, ALL, "Not declared.")
