"""The recipe's `[alerts]` and `[mirrors]`: what people are told of without looking, and where.

`alerts.webhook` is a secret itself with most services (its path is the key), so it is hidden
wherever a recipe is shown; `alerts.webhook_file` keeps it out of the recipe altogether.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field

from services.common.instruments import Reduction
from services.common.section import Section

Severity = Literal["warning", "error"]

BuiltIn = Literal[
    "stall",
    "disagreement",
    "dropped-groups",
    "stuck-groups",
    "unbalanced-ledger",
    "lost-metrics",
    "not-finite",
]
"""Names of the alerts that every run has; aggregator/alert_rules.py says what each looks at."""

RULE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")


class AlertRule(Section):
    """An alert of your own: a metric that stays on the wrong side of a threshold."""

    name: str
    """Lower-case letters, digits and hyphens; no built-in alert's name."""
    key: Annotated[str, Field(min_length=1)]
    """A metric of docs/logged-metrics.md, or one of your own; placeholders filled in:
    `rewards/exact_match`."""
    reduce: Reduction | None = None
    """How the metric is reduced; its default reduction where nothing is said."""
    compare: Literal["above", "below"] = "above"
    """On which side of the threshold it is wrong."""
    threshold: float
    """In the metric's unit; a value equal to it is not wrong."""
    for_steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    """It fires when the last so many steps that have a value are all wrong, and ends when as many
    are all right."""
    for_s: Annotated[float, Field(ge=10, le=3600)] | None = None
    """In place of for_steps: when all that was measured in the last so many seconds is wrong, or
    right."""
    severity: Severity = "warning"
    """How bad it is; it is told with the alert, and changes nothing else."""
    sentence: str | None = None
    """What people read; by default the metric, its value and the threshold."""


class Alerts(Section):
    """What people are told of while they do not look: rules, and a webhook. The built-in rules are
    in docs/alerts.md."""

    rules: Annotated[tuple[AlertRule, ...], Field(strict=False)] = ()
    """Beside the built-in ones."""
    off: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of built-in alerts that are not wanted."""
    every_s: Annotated[float, Field(ge=1)] = 10.0
    """Seconds between two looks."""
    stall_times: Annotated[float, Field(ge=1)] = 10.0
    """`stall` fires when no step has ended for so many times a usual step,"""
    stall_s: Annotated[float, Field(gt=0)] = 300.0
    """and for so many seconds at least;"""
    stall_first_s: Annotated[float, Field(gt=0)] = 3600.0
    """for so many before a run has made the few steps that tell what is usual."""
    max_gap: Annotated[float, Field(gt=0)] = 0.1
    """`disagreement` fires when trainer and engine differ by more nats a token, on the mean, at the
    same weights."""
    max_drop_frac: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """`dropped-groups` fires when more of the groups that reach the trainer are dropped."""
    webhook: str | None = None
    """An http or https URL that is told of each alert, when it fires and when it ends."""
    webhook_file: str | None = None
    """File with that URL, in place of `webhook`: most such URLs are secrets."""


class Mirrors(Section):
    """Trackers that the aggregator feeds with each step's values; see docs/mirrors.md."""

    tensorboard: bool = False
    """Write TensorBoard event files into `folder/run/tensorboard`."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """A Weights & Biases project, `PROJECT` or `ENTITY/PROJECT`; needs the package `wandb`."""
    trackio: Annotated[str, Field(min_length=1)] | None = None
    """A trackio project; needs the package `trackio`."""
    settle_s: Annotated[float, Field(ge=0)] = 30.0
    """Seconds after a step's end until it is passed on: what services report later than this is in
    the aggregator and not in its mirrors."""


def mistakes(alerts: Alerts) -> Iterator[str]:
    """What is wrong between the keys of `[alerts]`, one line each."""
    for name in alerts.off:
        if name not in get_args(BuiltIn):
            choices = ", ".join(get_args(BuiltIn))
            yield f"alerts.off: there is no built-in alert {name!r}; there are {choices}"
    names: set[str] = set()
    for number, rule in enumerate(alerts.rules):
        where = f"alerts.rules.{number}"
        if not RULE_NAME.fullmatch(rule.name):
            yield (
                f"{where}.name: {rule.name!r}: use lower-case letters, digits and hyphens, at most "
                "52, with a letter or digit at both ends"
            )
        if rule.name in get_args(BuiltIn):
            yield (
                f"{where}.name: {rule.name!r} is a built-in alert; choose another name, and turn "
                "that one off with alerts.off if yours is to take its place"
            )
        if rule.name in names:
            yield f"{where}.name: {rule.name!r} is there twice"
        names.add(rule.name)
        if (rule.for_steps is None) == (rule.for_s is None):
            yield f"{where}: give exactly one of for_steps and for_s"
    if alerts.webhook is not None and alerts.webhook_file is not None:
        yield "alerts.webhook_file: alerts.webhook is given, too; give one of them"
    if alerts.webhook is not None and not is_web_url(alerts.webhook):
        yield "alerts.webhook: it is no http:// or https:// URL"


def is_web_url(url: str) -> bool:
    """Whether this is a URL that can be posted to."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not any(each.isspace() for each in url)
        )
    except ValueError:
        return False


def hidden_url(url: str) -> str:
    """A webhook for people and logs: where it is, and none of what opens it.

    Example: `https://me:pw@hooks.example:8443/services/T0/B0/key` is
    `https://hooks.example:8443/***`.
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}/***"
