"""The rules of alerts: pure functions of what was measured.

A rule says that something is wrong, that it is right, or neither: then an alert stays as it is.
Between wrong and right there is always some room, so that what hovers at a threshold neither fires
again and again nor ends again and again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.aggregator.metric import Catalogue, Metric
from services.aggregator.reduce import REDUCTIONS
from services.aggregator.wording import percent, seconds
from services.common.alerts_config import AlertRule, Alerts, BuiltIn, Severity
from services.common.errors import UserError
from services.common.instruments import Reduction

LAST_STEPS = 20
"""Steps over which groups and values that are not finite are counted."""

LAST_S = 600.0
"""Seconds within which metrics that were lost are counted."""

CALM_DROP = 0.5
"""Of the share that fires, below which `dropped-groups` ends."""

MIN_STEPS = 3
"""Steps of known length that tell what is usual."""

GAP_STEPS = 5
"""Steps that `disagreement` looks at."""

FRESH_S = 300.0
"""For so long a measured value stands for what follows it; without a newer one nothing is known."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a rule says of a run now."""

    wrong: bool | None
    """None: neither, or not known."""
    value: float | None = None
    """What was compared."""
    sentence: str = ""
    """In words, with the numbers that it rests on; where it is wrong."""


UNKNOWN = Judgement(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the built-in alerts look at, of one moment. Counts are 0 where nothing was counted."""

    usual_step_s: float | None = None
    """The median of the last steps; None before MIN_STEPS of them."""
    quiet_s: float = 0.0
    """Since a step ended, or the latest start of the trainer was first heard of."""
    num_stuck: int = 0
    oldest_stuck: str | None = None
    stuck_after_s: float = 0.0
    dispatched: int = 0
    counted: int = 0
    """Groups counted one by one, and as many as their states say."""
    dropped_groups: float = 0.0
    taken_groups: float = 0.0
    """Of the last LAST_STEPS steps: dropped, and of the steps themselves."""
    not_finite: float = 0.0
    """Of the last LAST_STEPS steps."""
    lost_partials: float = 0.0
    """Within LAST_S: dropped by a recorder, or rejected here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """A rule about one metric."""

    rule: AlertRule
    metric: Metric
    reduction: Reduction

    def judge_steps(self, values: Sequence[float]) -> Judgement:
        """By the values of the last steps that have one, the newest last.

        Example: above 0.1 for 3 steps: (0.0, 0.2, 0.2, 0.3) is wrong, (0.2, 0.2, 0.1) neither and
        (0.2, 0.1, 0.0, 0.0) right.
        """
        wanted = self.rule.for_steps or 1
        last = values[-wanted:]
        return self._judge(last, f"in the last {wanted} steps") if len(last) == wanted else UNKNOWN

    def judge_time(self, samples: Sequence[tuple[float, float]], *, now_s: float) -> Judgement:
        """By (time, value) in ascending order; a value stands until the next one, FRESH_S at most.

        Example: for 60 s, at 1,000 s: values of 930 s, 950 s and 990 s count. Without the first of
        them nothing is known of 940 s, and so nothing is said.
        """
        begin_s = now_s - (self.rule.for_s or 0.0)
        before = [value for at_s, value in samples if begin_s - FRESH_S <= at_s <= begin_s]
        within = [value for at_s, value in samples if begin_s < at_s]
        newest_s = max((at_s for at_s, _ in samples), default=-FRESH_S)
        if not before or newest_s < now_s - FRESH_S:
            return UNKNOWN
        return self._judge([before[-1], *within], f"for {self.rule.for_s:g} s")

    def _judge(self, values: Sequence[float], when: str) -> Judgement:
        rule = self.rule
        above = rule.compare == "above"
        wrong = [value > rule.threshold if above else value < rule.threshold for value in values]
        if all(wrong):
            found = self.rule.sentence or (
                f"{rule.key} ({self.reduction}) was {rule.compare} {rule.threshold:g} "
                f"{self._unit}{when}; now {values[-1]:.4g}."
            )
            return Judgement(True, values[-1], found)
        return Judgement(None if any(wrong) else False, values[-1])

    @property
    def _unit(self) -> str:
        unit = self.metric.unit_of(self.reduction)
        return f"{unit} " if unit not in ("", "1") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One alert that may fire: by facts, or by a metric."""

    name: str
    severity: Severity
    by: KeyRule | Callable[[Facts], Judgement] = field(repr=False)


Change = Literal["fire", "end"]


def change(judgement: Judgement, *, firing: bool) -> Change | None:
    """What becomes of an alert; None: it stays as it is."""
    if judgement.wrong and not firing:
        return "fire"
    if judgement.wrong is False and firing:
        return "end"
    return None


def compile_rules(alerts: Alerts, catalogue: Catalogue) -> tuple[Rule, ...]:
    """All rules of a recipe, built-in ones first.

    Raises UserError for a metric that is not declared, or a reduction that it has not.
    """
    built_in = (rule for rule in _built_in(alerts, catalogue) if rule.name not in alerts.off)
    own = (
        Rule(
            name=each.name,
            severity=each.severity,
            by=_by_key(each, catalogue, where=f"alerts.rules.{number}"),
        )
        for number, each in enumerate(alerts.rules)
    )
    return (*built_in, *own)


def _by_key(rule: AlertRule, catalogue: Catalogue, *, where: str) -> KeyRule:
    found = catalogue.find(rule.key)
    if found is None:
        hint = catalogue.renamed.get(rule.key)
        told = f"it is called {' or '.join(hint)} here" if hint else "docs/logged-metrics.md lists"
        told += "" if hint else " them; declare one of your own under [metrics]"
        raise UserError(f"{where}.key: there is no metric {rule.key!r}: {told}")
    metric = found.metric
    reduction = rule.reduce or metric.default
    if reduction not in REDUCTIONS[metric.instrument]:
        choices = ", ".join(metric.reductions)
        raise UserError(f"{where}.reduce: {rule.key} has no {reduction}; choose one of {choices}")
    return KeyRule(rule=rule, metric=metric, reduction=reduction)


def _built_in(alerts: Alerts, catalogue: Catalogue) -> Iterator[Rule]:
    disagreement = AlertRule(
        name="disagreement",
        key="policy/logprob_gap_mean/0",
        threshold=alerts.max_gap,
        for_steps=GAP_STEPS,
        sentence=(
            "Trainer and engine disagree about tokens of the same weights: by more than "
            f"{alerts.max_gap:g} nats a token in the last {GAP_STEPS} steps. Look for old weights "
            "in an engine, another dtype, or a setting that reshapes the distribution."
        ),
    )
    parts: tuple[tuple[BuiltIn, Severity, KeyRule | Callable[[Facts], Judgement]], ...] = (
        ("stall", "error", lambda facts: stalled(facts, alerts)),
        ("disagreement", "error", _by_key(disagreement, catalogue, where="disagreement")),
        ("dropped-groups", "warning", lambda facts: drops(facts, alerts)),
        ("stuck-groups", "warning", stuck),
        ("unbalanced-ledger", "error", unbalanced),
        ("lost-metrics", "warning", lost),
        ("not-finite", "warning", not_finite),
    )
    for name, severity, by in parts:
        yield Rule(name=name, severity=severity, by=by)


def stalled(facts: Facts, alerts: Alerts) -> Judgement:
    """No step for long. A step that ends makes it right at once.

    Example: steps of 20 s, 10 times and 300 s: after 300 s without one; steps of 60 s: after 600 s.
    """
    if facts.usual_step_s is None:
        limit_s, usual = alerts.stall_first_s, "none has been made yet that tells what is usual"
    else:
        limit_s = max(alerts.stall_s, alerts.stall_times * facts.usual_step_s)
        usual = f"usual are {seconds(facts.usual_step_s)} s"
    if facts.quiet_s <= limit_s:
        return Judgement(False, facts.quiet_s)
    said = f"No step has ended for {facts.quiet_s:.0f} s; {usual}."
    return Judgement(True, facts.quiet_s, said)


def drops(facts: Facts, alerts: Alerts) -> Judgement:
    """Too large a share of groups is dropped.

    Example: 30 dropped and 70 trained are 0.3: above 0.2 it is wrong, below 0.1 right again.
    """
    total = facts.dropped_groups + facts.taken_groups
    if total <= 0:
        return UNKNOWN
    share = facts.dropped_groups / total
    if share > alerts.max_drop_frac:
        said = (
            f"Of the groups that reached the trainer in the last {LAST_STEPS} steps "
            f"{percent(share)} were dropped: work of the generators that nothing is learnt from."
        )
        return Judgement(True, share, said)
    return Judgement(None if share > CALM_DROP * alerts.max_drop_frac else False, share)


def stuck(facts: Facts) -> Judgement:
    """Groups that are in flight for too long."""
    if not facts.num_stuck:
        return Judgement(False, 0.0)
    said = (
        f"{facts.num_stuck} groups have been in flight for more than "
        f"{facts.stuck_after_s:g} s; the oldest is {facts.oldest_stuck}."
    )
    return Judgement(True, float(facts.num_stuck), said)


def unbalanced(facts: Facts) -> Judgement:
    """Groups, counted one by one, are not as many as their states say."""
    difference = facts.counted - facts.dispatched
    if not difference:
        return Judgement(False, 0.0)
    said = (
        f"The ledger is out of balance: {facts.counted} groups by their states, "
        f"{facts.dispatched} counted one by one."
    )
    return Judgement(True, float(difference), said)


def lost(facts: Facts) -> Judgement:
    """Metrics that were not taken, or never sent."""
    if facts.lost_partials <= 0:
        return Judgement(False, 0.0)
    said = (
        f"{facts.lost_partials:.0f} measurements of the last {LAST_S:.0f} s were rejected or "
        "dropped: other numbers may be too small. See ingest/rejected and recorder/dropped_total."
    )
    return Judgement(True, facts.lost_partials, said)


def not_finite(facts: Facts) -> Judgement:
    """Values of the loss or the gradient that are NaN or infinite."""
    if facts.not_finite <= 0:
        return Judgement(False, 0.0)
    said = (
        f"{facts.not_finite:.0f} values of the last {LAST_STEPS} steps were NaN or infinite and "
        "were guarded against; nonfinite_total says where."
    )
    return Judgement(True, facts.not_finite, said)
