"""`headrace dead-letters`: what could not be processed, and what a person does about it."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import Console
from rich.text import Text

from services.common import config, secret_keys
from services.common.config import without_passwords
from services.common.dead_letters import LETTER_ID, DeadLetters, Letter, decode
from services.common.errors import UserError
from services.common.queue import QueueClient
from services.common.queue_servers import open_client
from services.common.queue_url import SCHEMES
from services.launcher import embedded_queue
from services.launcher.errors import RunFailed
from services.launcher.figures import ABSENT, ago, whole
from services.launcher.tables import plain_table, say, show_table

ANSWER_WITHIN_S = 60.0
"""How long the queue server may take for one command."""

SETTLED = (
    "the trainer has settled group {group} already: its prompt was due again as another try, or "
    "was given up; the letter stays"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where the dead letters of a run are."""

    url: str = field(repr=False)
    """To connect with; it may hold a password."""
    run: str
    embedded: bool = False
    """True where `headrace run` starts the server."""


def find(where: str, *, run: str | None) -> Place:
    """The queue of a recipe, with `run` instead of the recipe's run; or of a URL and a run.

    Raises UserError.
    """
    if where.startswith(SCHEMES):
        if run is None:
            raise UserError("--run: with a queue's URL the run's name is needed, too")
        return Place(where, run)
    if "://" in where:
        raise UserError(
            f"QUEUE: {without_passwords(where)} is no queue's URL; write redis://host:port/0"
        )
    overrides = [] if run is None else [f"run={run}"]
    recipe = config.load(Path(where), overrides=overrides)
    url = secret_keys.queue_url(recipe.queue)
    if url is not None:
        return Place(url, recipe.run)
    url = embedded_queue.configured_url(recipe.run_folder / "queue")
    if url is None:
        raise UserError(
            f"QUEUE: run {recipe.run} has no queue server yet: the recipe gives no queue.url, and "
            f"`headrace run` has started none under {recipe.run_folder}"
        )
    return Place(url, recipe.run, embedded=True)


def show_list(place: Place, *, as_json: bool, console: Console) -> None:
    """Print a table of all letters, the oldest first. Raises UserError or RunFailed."""
    letters = _ask(place, lambda dead: dead.all())
    if as_json:
        print(json.dumps({"run": place.run, "dead_letters": [asdict(each) for each in letters]}))
        return
    if not letters:
        say(console, f"run {place.run} has no dead letters")
        return
    table = plain_table("id", "group", "stream", ">deliveries", ">bytes", "buried", "reason")
    for letter in letters:
        row = (
            letter.letter_id,
            letter.group_id or ABSENT,
            letter.stream,
            whole(letter.deliveries),
            whole(letter.num_bytes),
            ago(letter.age_s),
            " ".join(letter.reason.split()),
        )
        table.add_row(*map(Text, row))
    show_table(console, table)


def show_one(
    place: Place, letter_id: str, *, raw: Path | None, as_json: bool, console: Console
) -> bool:
    """Print a letter with its entry as JSON, or as hexadecimal digits where it is no such message;
    with `raw` its bytes go to a file instead. False where there is no such letter.

    Raises UserError or RunFailed.
    """
    _check_ids([letter_id])
    found = _ask(place, lambda dead: dead.read(letter_id))
    if found is None:
        say(console, f"run {place.run} has no dead letter {letter_id}")
        return False
    letter, data = found
    told = asdict(letter)
    if raw is not None:
        try:
            raw.write_bytes(data)
        except OSError as error:
            raise UserError(f"--raw: {raw} cannot be written: {error.strerror}") from None
        told["raw"] = str(raw)
    else:
        message = decode(data, stream=letter.stream)
        told |= {"hex": data.hex()} if message is None else {"message": message}
    if as_json:
        print(json.dumps(told))
        return True
    for name, value in told.items():
        text = json.dumps(value, indent=2, ensure_ascii=False) if name == "message" else str(value)
        say(console, f"{name}: {text}")
    return True


def requeue(
    place: Place,
    letter_ids: Sequence[str],
    *,
    all_letters: bool,
    regenerate: bool,
    as_json: bool,
    console: Console,
) -> bool:
    """Put letters back, and say of each what became of it; False unless all were.

    Raises UserError or RunFailed.
    """
    _check_choice(letter_ids, all_letters=all_letters)

    async def work(dead: DeadLetters) -> list[tuple[str, str, str]]:
        groups = {each.letter_id: each.group_id for each in await dead.all()}
        wanted = list(groups) if all_letters else letter_ids
        return [
            (each, groups.get(each, ""), await dead.requeue(each, regenerate=regenerate))
            for each in wanted
        ]

    outcomes = _ask(place, work)
    said = {
        "done": "its prompt is due again" if regenerate else "it is back where it came from",
        "gone": "there is no such letter",
        "settled": SETTLED,
        "evaluation": "--regenerate is for training: an evaluation is asked for once",
    }
    if as_json:
        rows = [{"letter_id": each, "outcome": outcome} for each, _, outcome in outcomes]
        print(json.dumps({"run": place.run, "dead_letters": rows}))
    else:
        for each, group, outcome in outcomes:
            word = "requeued" if outcome == "done" else "not requeued"
            say(console, f"{word} {each}: {said[outcome].format(group=group or ABSENT)}")
    return all(outcome == "done" for _, _, outcome in outcomes)


def discard(
    place: Place,
    letter_ids: Sequence[str],
    *,
    all_letters: bool,
    without_asking: bool,
    console: Console,
) -> bool:
    """Delete letters, after a yes on the terminal; False after a no, or where one was not there.

    Raises UserError, also where there is no terminal to ask on, or RunFailed.
    """
    _check_choice(letter_ids, all_letters=all_letters)
    letters: Sequence[Letter] = _ask(place, lambda dead: dead.all())
    there = {each.letter_id for each in letters}
    wanted = [each.letter_id for each in letters] if all_letters else list(letter_ids)
    doomed = [each for each in wanted if each in there]
    for each in wanted:
        if each not in there:
            say(console, f"not discarded {each}: there is no such letter")
    if doomed and not without_asking:
        what = f"{len(doomed)} dead {'letter' if len(doomed) == 1 else 'letters'} of {place.run}"
        if not sys.stdin.isatty():
            raise UserError(
                f"--yes: there is no terminal to ask on; give it to discard {what}; nothing was "
                "discarded"
            )
        if not typer.confirm(f"Discard {what}? Their bytes cannot be brought back"):
            say(console, "nothing was discarded")
            return False
    if doomed:
        _ask(place, lambda dead: dead.discard(doomed))
    say(console, f"discarded {len(doomed)}")
    return len(doomed) == len(wanted)


def _check_ids(letter_ids: Sequence[str]) -> None:
    for each in letter_ids:
        if not LETTER_ID.fullmatch(each):
            raise UserError(
                f"ID: {each!r} is no id of a dead letter, such as 1700000000000-0; `headrace "
                "dead-letters list` shows them"
            )


def _check_choice(letter_ids: Sequence[str], *, all_letters: bool) -> None:
    if all_letters == bool(letter_ids):
        raise UserError("ID: name the dead letters, or say --all")
    _check_ids(letter_ids)


def _ask(place: Place, work: Callable[[DeadLetters], Awaitable[T]]) -> T:
    """What `work` finds out. Raises UserError where no server answers or it knows no such run,
    RunFailed when it goes away meanwhile.
    """
    return asyncio.run(_asked(place, work))


async def _asked(place: Place, work: Callable[[DeadLetters], Awaitable[T]]) -> T:
    await _check_reachable(place)
    client = QueueClient(open_client(place.url, run=place.run), place.run, claim_after_s=0)
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            keys = (client.keys.clock, client.keys.dead)
            if not await client.call(lambda: client.raw.exists(*keys)):
                raise UserError(
                    f"--run: the queue server at {without_passwords(place.url)} knows no run "
                    f"{place.run!r}"
                )
            return await work(DeadLetters(client))
    except TimeoutError:
        raise RunFailed(
            f"the queue server at {without_passwords(place.url)} does not answer any more; what "
            "was asked may have been done"
        ) from None
    finally:
        await client.close()


async def _check_reachable(place: Place) -> None:
    try:
        await embedded_queue.reach(place.url, run=place.run)
    except UserError as error:
        if not place.embedded:
            raise
        raise UserError(
            f"QUEUE: the queue server of run {place.run} does not run: `headrace run` starts it, "
            f"and ends it with the run ({without_passwords(place.url)})"
        ) from error
