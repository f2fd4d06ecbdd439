"""The catalogue as a document: Markdown for docs/logged-metrics.md and for the page /docs/metrics.

What each key means comes from its declaration; how keys are read together is in reading.md beside
this module, written by hand.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from services.aggregator.catalogue import GROUPS
from services.aggregator.metric import Group, Metric

TITLE = "Logged metrics"

PLANNED = "Planned: not recorded yet."

CONDITIONAL = "Only when"
"""Begins what has to happen for a key to be there."""

READING = Path(__file__).with_name("reading.md")

INTRODUCTION = """Every metric is measured where it happens, and this is what each of them means.

A *count* adds up. An *observation* is a value each time that something happens; with its number,
sum, extremes and a histogram (at most 1 % error) it has a mean and percentiles over any window. A
*ratio* has its numerators and denominators added up before they are divided. So no rate, mean or
percentile is ever averaged: a window's value is computed from all that was measured in it.

In the tables, the reduction in **bold** is what a query gets when it names none, and the unit is
that of its values (1: a plain number or a share). `{…}` in a key stands for one part of it, as in
`rewards/exact_match`. Old names are those of TRL's asynchronous GRPO trainer; a query for one of
them is answered with the new key. Keys under `custom/` are yours: they need no declaration, and the
recipe's `[metrics]` table gives them a unit, a meaning and a reduction of their own."""

COLUMNS = ("key", "by", "instrument", "unit", "reductions", "meaning")


def markdown(groups: Iterable[Group] = GROUPS) -> str:
    """The whole document, without a line on where it comes from.

    Example: a group's table has the row
    `| `loss` | trainer | observation | 1 | **mean**, min, … | The optimised value … |`.
    """
    groups = tuple(groups)
    reading = "Reading them together"
    contents = [_link(reading), *(_link(group.title) for group in groups)]
    parts = [
        f"# {TITLE}",
        INTRODUCTION,
        "\n".join(f"- {link}" for link in contents),
        f"## {reading}",
        READING.read_text(encoding="utf-8").strip(),
        *(part for group in groups for part in _section(group)),
    ]
    return "\n\n".join(parts) + "\n"


def anchor(title: str) -> str:
    """A heading's name in links, formed as GitHub forms it.

    Example: `anchor("sample/ and group/")` is `sample-and-group`.
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _link(title: str) -> str:
    return f"[{title}](#{anchor(title)})"


def _section(group: Group) -> list[str]:
    table = [_row(COLUMNS), _row("---" for _ in COLUMNS)]
    table += [_row(_cells(metric)) for metric in group.metrics]
    return [f"## {group.title}", group.about, "\n".join(table)]


def _cells(metric: Metric) -> list[str]:
    return [
        f"`{metric.key}`",
        ", ".join(metric.producers),
        metric.instrument,
        metric.unit_of(metric.default),
        ", ".join([f"**{metric.default}**", *metric.reductions[1:]]),
        " ".join(_meaning(metric)),
    ]


def _meaning(metric: Metric) -> list[str]:
    said = [metric.meaning.replace("|", "\\|")]
    if metric.old_names:
        said.append(f"Old name: {', '.join(f'`{name}`' for name in metric.old_names)}.")
    if metric.only_when is not None:
        said.append(f"*{CONDITIONAL} {metric.only_when}.*")
    if metric.since is not None:
        said.append(f"*{PLANNED}*")
    return said


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
