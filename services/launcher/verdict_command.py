"""`headrace verdict`: asks an aggregator what holds a run back and what is wrong, and prints it."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.common.errors import UserError
from services.launcher.asking import Access, asking, run_path
from services.launcher.figures import ABSENT, number, percent
from services.launcher.tables import plain_table, say, show_table

HISTORY_ROWS = 30
"""Most lines of a history: it is read from top to bottom."""


def show(
    url: str,
    *,
    run: str,
    window: int | None,
    speed_up: float | None,
    access: Access,
    console: Console,
) -> None:
    """Print the verdict on a run: the sentence, what to turn next, the evidence, and the faults.

    Raises UserError for an address, token, run or option that is not right, RunFailed when the
    aggregator cannot answer.
    """
    path = run_path(run, "verdict")
    with asking(url, access=access) as aggregator:
        answer = aggregator.get(path, window=window, speed_up=speed_up).body
        for text in (answer["sentence"], f"next: {answer['knob']}", _rests_on(answer)):
            say(console, text)
        if answer["missing"]:
            say(console, f"missing: {', '.join(answer['missing'])}")
        if answer["evidence"]:
            show_table(console, _evidence(answer["evidence"]))
        for fault in answer["faults"]:
            for line in _fault(fault):
                say(console, line)


def show_history(
    url: str,
    *,
    run: str,
    window: int | None,
    speed_up: float | None,
    access: Access,
    console: Console,
) -> None:
    """Print how the verdict has changed, a line for each window of steps. Raises as show(), and
    UserError for a speed-up: what was is not predicted.
    """
    if speed_up is not None:
        raise UserError("--speed-up: what has been is not predicted; leave it or --history out")
    path = run_path(run, "verdict", "history")
    with asking(url, access=access) as aggregator:
        answer = aggregator.get(path, window=window, max_points=HISTORY_ROWS).body
        if not answer["verdicts"]:
            say(console, "no steps yet")
            return
        table = plain_table("steps", "verdict", ">share", "confidence", ">s/step")
        for each in answer["verdicts"]:
            row = (
                f"{each['first_step']}-{each['last_step']}",
                each["verdict"],
                percent(each["share"]),
                each["confidence"] or ABSENT,
                number(each["step_s"]),
            )
            table.add_row(*map(Text, row))
        show_table(console, table)


def _fault(fault: Mapping[str, Any]) -> list[str]:
    """The fault in words, what to do, and each number beside its threshold."""
    found = "; ".join(
        f"{each['key']} {number(each['value'])} {each['compare']} {number(each['threshold'])}"
        for each in fault["evidence"]
    )
    return [f"fault: {fault['sentence']}", f"  next: {fault['knob']}", f"  found: {found}"]


def _rests_on(answer: Mapping[str, Any]) -> str:
    """Confidence, steps, and how much of a step is not explained."""
    parts = [f"confidence {answer['confidence']}"] if answer["confidence"] else []
    first, last, num_steps = answer["first_step"], answer["last_step"], answer["num_steps"]
    steps = f"steps {first} to {last}" if num_steps > 1 else f"step {first}"
    parts.append(steps if num_steps else "no steps")
    if answer["unaccounted_share"] is not None:
        parts.append(f"{percent(answer['unaccounted_share'])} of a step unaccounted for")
    stages = answer["stages"]
    if stages is not None:
        of_step = ", ".join(
            f"{name.removesuffix('_s')} {ABSENT if value is None else f'{number(value)} s'}"
            for name, value in stages.items()
        )
        parts.append(f"a step needs: {of_step}")
    return " · ".join(parts)


def _evidence(found: list[dict[str, Any]]) -> Table:
    table = plain_table("evidence", "", ">value", "wanted", "holds")
    for each in found:
        row = (
            each["key"],
            each["measure"],
            number(each["value"]),
            f"{each['compare']} {number(each['threshold'])}",
            ("yes" if each["holds"] else "no") if each["value"] is not None else "absent",
        )
        table.add_row(*map(Text, row))
    return table
