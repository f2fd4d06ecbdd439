"""`headrace ledger`: asks an aggregator where the groups of a run are, and prints it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.common.errors import UserError
from services.launcher.asking import Access, asking, run_path
from services.launcher.figures import ABSENT, number, whole
from services.launcher.tables import pass_on, plain_table, say, show_table

PARTS = ("trained", "rolled_back", "dropped", "given_up", "in_flight")
"""What `dispatched` is the sum of."""

IN_FLIGHT = ("dispatched", "generating", "generated", "scoring", "scored", "queued")

MAX_SHOWN = 20
"""Names of groups that are given up or stuck, on one line; --json has more."""

STAGES = {
    "wait_for_generator_s": "wait for a generator",
    "generation_s": "generation",
    "wait_for_scorer_s": "wait for a scorer",
    "scoring_s": "scoring",
    "wait_for_trainer_s": "wait for the trainer",
}


@dataclass(frozen=True)
class View:
    """What of the ledger is asked for."""

    of: Literal["run", "group", "row", "step"]
    path: tuple[str, ...]
    """Under the run's."""


def view(*, group: str | None, row: int | None, step: int | None) -> View:
    """What the options ask for. Raises UserError for several at once."""
    given = [
        View("group", ("groups", quote(group or "", safe=""))) if group is not None else None,
        View("row", ("rows", str(row))) if row is not None else None,
        View("step", ("steps", str(step))) if step is not None else None,
    ]
    views = [each for each in given if each is not None]
    if len(views) > 1:
        raise UserError("--group, --row, --step: give one of them at a time")
    if group is not None and not group.strip("."):
        raise UserError(f"--group: {group!r} is no group; write it as 0.17.1.1")
    return views[0] if views else View("run", ("ledger",))


def show(
    url: str,
    *,
    run: str,
    view: View,
    as_json: bool,
    access: Access,
    console: Console,
) -> None:
    """Print the ledger of a run, or the way of a group, or the groups of a row or step.

    Raises UserError for an address, token, run or option that is not right, and for what the ledger
    never heard of or has pruned; RunFailed when the aggregator cannot answer.
    """
    path = run_path(run, *view.path)
    with asking(url, access=access) as aggregator:
        answer = aggregator.get(path)
        if as_json:
            pass_on(answer.text)
        elif view.of == "run":
            _show_run(console, answer.body)
        elif view.of == "group":
            _show_group(console, answer.body)
        else:
            _show_groups(console, answer.body, of=view.of)


def _show_run(console: Console, ledger: Mapping[str, Any]) -> None:
    parts = " + ".join(f"{whole(ledger[part])} {_words(part)}" for part in PARTS)
    holds = "balanced" if ledger["balanced"] else "NOT BALANCED"
    say(console, f"{whole(ledger['dispatched'])} dispatched = {parts}: {holds}")
    states = ledger["states"]
    _say_counts(console, "in flight", {name: states[name] for name in IN_FLIGHT if states[name]})
    _say_counts(console, "dropped", ledger["dropped_reasons"])
    _say_counts(console, "given up", ledger["given_up_reasons"])
    _say_names(console, "given up groups", ledger["given_up_groups"], total=ledger["given_up"])
    if ledger["num_stuck"]:
        after = f"in flight for more than {number(ledger['stuck_after_s'])} s"
        names = [each["group_id"] for each in ledger["stuck"]]
        _say_names(console, after, names, total=ledger["num_stuck"])
    if ledger["oldest"]:
        show_table(console, _oldest(ledger["oldest"]))


def _say_counts(console: Console, what: str, counts: Mapping[str, int]) -> None:
    if counts:
        listed = ", ".join(f"{whole(n)} {_words(name) or ABSENT}" for name, n in counts.items())
        say(console, f"{what}: {listed}")


def _say_names(console: Console, what: str, names: Sequence[str], *, total: int) -> None:
    if names:
        shown = names[:MAX_SHOWN]
        more = f", and {whole(total - len(shown))} more" if total > len(shown) else ""
        say(console, f"{what}: {', '.join(shown)}{more}")


def _oldest(groups: list[dict[str, Any]]) -> Table:
    table = plain_table("oldest in flight", ">row", "state", ">age s", ">in state s", "held by")
    for group in groups:
        row = (
            group["group_id"],
            whole(group["row_index"]),
            group["state"],
            number(group["age_s"]),
            number(group["in_state_s"]),
            group["holder"] or ABSENT,
        )
        table.add_row(*map(Text, row))
    return table


def _show_group(console: Console, group: Mapping[str, Any]) -> None:
    said = [f"group {group['group_id']}", f"row {whole(group['row_index'])}", _outcome(group)]
    if group["total_s"] is not None:
        said.append(f"{number(group['total_s'])} s")
    say(console, " · ".join(said))
    stages = [
        f"{name} {number(group['stages'][key])} s"
        for key, name in STAGES.items()
        if group["stages"][key] is not None
    ]
    if stages:
        say(console, ", ".join(stages))
    table = plain_table("state", "at", "said by", "again at", "said by", "why")
    for event in group["events"]:
        row = (
            _words(event["state"]),
            event["at"],
            event["worker"],
            event["again_at"] or ABSENT,
            event["again_worker"] or ABSENT,
            _why(event) or ABSENT,
        )
        table.add_row(*map(Text, row))
    show_table(console, table)


def _show_groups(console: Console, answer: Mapping[str, Any], *, of: str) -> None:
    which = answer["row_index"] if of == "row" else answer["step"]
    groups, total = answer["groups"], answer["num_groups"]
    count = f"{whole(total)} {'group' if total == 1 else 'groups'}"
    listed = f", the last {whole(len(groups))} of them" if len(groups) < total else ""
    say(console, f"{of} {whole(which)}: {count}{listed}")
    table = plain_table("group", ">epoch", ">attempt", ">try", ">row", "state", "why")
    for group in groups:
        row = (
            group["group_id"],
            *(whole(group[name]) for name in ("epoch", "attempt", "try_number", "row_index")),
            _words(group["state"]),
            _why(group) or ABSENT,
        )
        table.add_row(*map(Text, row))
    show_table(console, table)


def _outcome(group: Mapping[str, Any]) -> str:
    why = _why(group)
    return f"{_words(group['state'])} ({why})" if why else _words(group["state"])


def _why(said: Mapping[str, Any]) -> str:
    """Step and reason, of those that there are."""
    step = "" if said["step"] is None else f"step {whole(said['step'])}"
    return ", ".join(part for part in (step, _words(said["reason"])) if part)


def _words(name: str) -> str:
    return name.replace("_", " ")
