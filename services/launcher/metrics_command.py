"""`headrace metrics`: the latest values of a run, or the history of some keys as sparklines."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.common.errors import UserError
from services.launcher.asking import Access, Aggregator, Answer, asking, run_path
from services.launcher.figures import ABSENT, ago, number, sparkline
from services.launcher.tables import COLUMN_GAP, pass_on, plain_table, say, show_table

MAX_POINTS = 10_000
"""Windows of a history: each is one step up to so many steps."""

PIPED_SPARKLINE_COLUMNS, MIN_SPARKLINE_COLUMNS, MAX_SPARKLINE_COLUMNS = 40, 8, 100

ALL_PRODUCERS = "all"
"""Names the line over all producers, beside those of each."""

NOT_NUMBERS = {"nan": "NaN", "pos_inf": "inf", "neg_inf": "-inf"}
"""Counts in an answer of what is in no value."""


@dataclass(frozen=True)
class Span:
    """Which part of the histories is asked for, and how it is reduced; None: as the aggregator
    does by default.
    """

    axis: str | None = None
    reduce: str | None = None
    since: str | None = None
    until: str | None = None
    last: int | None = None
    """The last so many steps of the run, or seconds by time."""
    attempt: int | None = None
    by_producer: bool = False

    def given(self) -> list[str]:
        """The options that ask for something."""
        named = {f"--{name.replace('_', '-')}": value for name, value in vars(self).items()}
        return [name for name, value in named.items() if value not in (None, False)]


def show(
    url: str,
    *,
    run: str,
    keys: Sequence[str],
    match: str | None,
    span: Span,
    as_json: bool,
    access: Access,
    console: Console,
) -> None:
    """Print the latest value of every metric (whose key `match` finds), or the histories of keys.

    Raises UserError for an address, token, run, key or option that is not right, RunFailed when the
    aggregator cannot answer.
    """
    path = run_path(run, "metrics")
    if keys and match is not None:
        raise UserError("--match: finds keys in the list of all metrics; leave it out or the KEYs")
    if not keys and span.given():
        raise UserError(f"{span.given()[0]}: is about the history of a KEY; name one or more")
    with asking(url, access=access) as aggregator:
        if not keys:
            answers = [aggregator.get(path, match=match)]
        else:
            asked = _parameters(aggregator, run, span)
            # All are asked for before one is printed: a key that is wrong is the only thing seen.
            answers = [aggregator.get(f"{path}/{quote(key)}", **asked) for key in keys]
        if as_json:
            for answer in answers:
                pass_on(answer.text)
        elif keys:
            for number_of, answer in enumerate(answers):
                if number_of:
                    say(console, "")
                _show_history(answer, console)
        else:
            _show_latest(answers[0].body["metrics"], console)


def _parameters(aggregator: Aggregator, run: str, span: Span) -> dict[str, object]:
    """The query of a history."""
    since: str | int | None = span.since
    if span.last is not None:
        if span.since is not None or span.until is not None:
            raise UserError("--last: is itself a range; leave out --since and --until")
        if span.last < 1:
            raise UserError("--last: give a number of steps (by time: of seconds), 1 or more")
        since = _begin(aggregator.get(run_path(run)).body, span.last, by_time=span.axis == "time")
    return {
        "axis": span.axis,
        "reduce": span.reduce,
        "since": since,
        "until": span.until,
        "attempt": span.attempt,
        "group_by": "producer" if span.by_producer else None,
        "max_points": MAX_POINTS,
        "limit": MAX_POINTS,
    }


def _begin(run: Mapping[str, Any], last: int, *, by_time: bool) -> int | None:
    """Where the last so many steps, or seconds, of a run begin."""
    if by_time:
        return int(datetime.fromisoformat(run["last_seen"]).timestamp()) - last
    latest_step: int | None = run["latest_step"]
    return None if latest_step is None else latest_step - last + 1


def _show_latest(metrics: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = plain_table("metric", ">value", "unit", ">step", "reduction")
    for number_of, block in enumerate(_blocks(metrics)):
        if number_of:
            table.add_row()
        for metric in block:
            step = ABSENT if metric["step"] is None else str(metric["step"])
            row = (metric["key"], _value(metric), _unit(metric), step, metric["reduce"])
            table.add_row(*map(Text, row))
    if table.rows:
        show_table(console, table)
    else:
        say(console, "no metrics")


def _blocks(metrics: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Metrics by family, which is what precedes the first "/"; first those without relatives."""
    families: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for metric in metrics:
        families[metric["key"].partition("/")[0]].append(metric)
    alone = [family[0] for family in families.values() if len(family) == 1]
    return [block for block in (alone, *(f for f in families.values() if len(f) > 1)) if block]


def _value(metric: Mapping[str, Any]) -> str:
    """The value; one that is absent since all that was observed is NaN or infinite says so."""
    if metric["value"] is not None:
        return number(metric["value"])
    return "/".join(name for count, name in NOT_NUMBERS.items() if metric.get(count)) or ABSENT


def _unit(answer: Mapping[str, Any]) -> str:
    return "" if answer["unit"] == "1" else str(answer["unit"])


def _show_history(answer: Answer, console: Console) -> None:
    """A title, then a line over all producers, and one of each where they were asked for."""
    body = answer.body
    by_time, width = body["axis"] == "time", body["width"]
    pooled = body["points"]
    title = Text(body["key"], style="bold")
    title.append(f"  {', '.join(filter(None, (body['reduce'], _unit(body))))}", style="none")

    def place(x: int) -> str:
        return ago(answer.age_s(x)) if by_time else str(x)

    if not pooled:
        title.append("  no points", style="none")
        say(console, title)
        return
    reach = f"{place(pooled[0]['x'])} to {place(pooled[-1]['x'])}"
    title.append(f"  {reach if by_time else f'steps {reach}'}", style="none")
    if width > 1:
        title.append(f", a point is {width} {'s' if by_time else 'steps'}", style="none")
    say(console, title)
    lines = {"": pooled}
    if body.get("by_producer") is not None:
        lines = {ALL_PRODUCERS: pooled, **body["by_producer"]}
    first, last = pooled[0]["x"] // width, pooled[-1]["x"] // width
    show_table(
        console,
        _lines(
            {
                name: (
                    _slots(points, first=first, last=last, width=width),
                    [*_summary(points), place(points[-1]["x"])],
                )
                for name, points in lines.items()
            },
            at="last seen" if by_time else "last step",
            console=console,
        ),
    )


def _slots(
    points: Sequence[Mapping[str, Any]], *, first: int, last: int, width: int
) -> list[float | None]:
    """A value for each window from `first` to `last`, so that lines of several producers are above
    each other; None where there is none.
    """
    slots: list[float | None] = [None] * (last - first + 1)
    for point in points:
        slots[point["x"] // width - first] = point["value"]
    return slots


def _summary(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """First and last value; the smallest and the largest, of the steps within windows where the
    aggregator tells.
    """
    ends = [
        point[end]
        for point in points
        for end in ("value", "low", "high")
        if point.get(end) is not None
    ]
    extremes = [number(min(ends, default=None)), number(max(ends, default=None))]
    return [_value(points[0]), _value(points[-1]), *extremes]


def _lines(
    lines: Mapping[str, tuple[list[float | None], list[str]]], *, at: str, console: Console
) -> Table:
    """One row a line: its name, its sparkline in the room that is left, its numbers."""
    numbered = ("first", "last", "min", "max", at)
    table = plain_table("", "", *(f">{title}" for title in numbered))
    rows = [(name, *numbers) for name, (_, numbers) in lines.items()]
    columns = zip(("", *numbered), *rows, strict=True)
    taken = sum(max(map(len, cells)) + COLUMN_GAP for cells in columns)
    room = PIPED_SPARKLINE_COLUMNS
    if console.is_terminal:
        room = min(max(console.width - taken, MIN_SPARKLINE_COLUMNS), MAX_SPARKLINE_COLUMNS)
    for name, (slots, numbers) in lines.items():
        table.add_row(*map(Text, (name, sparkline(slots, width=room), *numbers)))
    return table
