"""`headrace runs`: which runs an aggregator knows, deleting one, and how long one is kept."""

import math
import sys

import typer
from rich.console import Console
from rich.text import Text

from services.common.errors import UserError
from services.launcher.asking import Access, Answer, asking, run_path
from services.launcher.figures import ABSENT, ago, number, whole
from services.launcher.tables import pass_on, plain_table, say, show_table

FOREVER, DEFAULT = "forever", "default"
"""Instead of a number of days: never deleted; as long as the aggregator keeps runs."""


def show_runs(url: str, *, as_json: bool, access: Access, console: Console) -> None:
    """Print a table of all runs, the one heard of last first.

    Raises UserError for an address or token that is not right, RunFailed when the aggregator cannot
    answer.
    """
    with asking(url, access=access) as aggregator:
        answer = aggregator.get("runs")
        if as_json:
            pass_on(answer.text)
            return
        table = plain_table(
            "run",
            ">attempt",
            ">step",
            "first seen",
            "last seen",
            ">producers",
            ">gaps",
            "kept until",
        )
        for run in answer.body["runs"]:
            until = run["kept_until"]
            row = (
                run["run"],
                whole(run["attempt"]),
                whole(run["latest_step"]),
                ago(answer.age_s(run["first_seen"])),
                ago(answer.age_s(run["last_seen"])),
                whole(run["num_producers"]),
                whole(run["missing_batches"]),
                FOREVER if until is None else ago(answer.age_s(until)),
            )
            table.add_row(*map(Text, row))
        if table.rows:
            show_table(console, table)
        else:
            say(console, "no runs")


def delete(url: str, *, run: str, without_asking: bool, access: Access, console: Console) -> bool:
    """Delete all that the aggregator knows of a run, after a yes on the terminal; False after a no.

    Raises UserError for an address, token or run that is not right, and where there is no terminal
    to ask on; RunFailed when the aggregator cannot do it.
    """
    path = run_path(run)
    with asking(url, access=access) as aggregator:
        answer = aggregator.get(path)
        what = f"run {answer.body['run']} ({_extent(answer)})"
        if not without_asking:
            if not sys.stdin.isatty():
                raise UserError(
                    f"--yes: there is no terminal to ask on; give it to delete {what}; nothing was "
                    "deleted"
                )
            if not typer.confirm(f"Delete {what}?"):
                say(console, "nothing was deleted")
                return False
        aggregator.delete(path)
        say(console, f"deleted {what}")
        return True


def keep(
    url: str, *, run: str, how_long: str, as_json: bool, access: Access, console: Console
) -> None:
    """Keep a run for a number of days after it was last heard of, "forever", or ("default") as long
    as the aggregator keeps runs.

    Raises UserError for an address, token, run or time that is not right, RunFailed when the
    aggregator cannot do it.
    """
    path = run_path(run)
    keep_days = _days(how_long)
    with asking(url, access=access) as aggregator:
        answer = aggregator.patch(path, {"keep_days": keep_days})
        if as_json:
            pass_on(answer.text)
            return
        say(console, f"run {answer.body['run']} is kept {_how_long(answer)}")


def _how_long(answer: Answer) -> str:
    days, until = answer.body["keep_days"], answer.body["kept_until"]
    if days == FOREVER:
        return FOREVER
    how = "as long as this aggregator keeps runs"
    if days is not None:
        how = f"{number(days)} days after it was last heard of"
    end = FOREVER if until is None else f"until {until} ({ago(answer.age_s(until))})"
    return f"{how}: {end}"


def _days(text: str) -> float | str | None:
    if text == DEFAULT:
        return None
    if text == FOREVER:
        return FOREVER
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not math.isfinite(days):
        raise UserError(
            f"DAYS: {text!r} is no number of days; write one, or {FOREVER}, or {DEFAULT} (as long "
            "as the aggregator keeps runs)"
        )
    return days


def _extent(answer: Answer) -> str:
    """What a run holds, in words."""
    run = answer.body
    attempts, producers = len(run["attempts"]), run["num_producers"]
    steps = ABSENT if run["latest_step"] is None else whole(run["latest_step"])
    return (
        f"{attempts} {'attempt' if attempts == 1 else 'attempts'}, step {steps}, {producers} "
        f"{'producer' if producers == 1 else 'producers'}, last heard of "
        f"{ago(answer.age_s(run['last_seen']))}"
    )
