"""The commands `headrace dead-letters`, which ask a run's queue server."""

from pathlib import Path
from typing import Annotated

import typer

NOT_ALL_STATUS = 1
"""Exit status where something was not done: no such letter, too late, or a no to "are you sure"."""

Where = Annotated[
    str, typer.Argument(metavar="QUEUE", help="The run's recipe; or the queue's URL, with --run.")
]
Run = Annotated[
    str | None, typer.Option("--run", metavar="NAME", help="The run; the recipe's by default.")
]
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Ids of letters, as `list` shows them.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

app = typer.Typer(
    help="Look at what a run could not process, and put it back or delete it.",
    no_args_is_help=True,
)


@app.command(
    "list",
    epilog="Examples:\n\n`headrace dead-letters list recipes/mine.toml`\n\n"
    "`headrace dead-letters list redis://localhost:6379/0 --run mine --json`",
)
def list_letters(where: Where, run: Run = None, as_json: AsJson = False) -> None:
    """List all dead letters of a run, the oldest first."""
    from services.launcher import dead_letters_command as command
    from services.launcher import tables

    command.show_list(command.find(where, run=run), as_json=as_json, console=tables.console())


@app.command(
    epilog="Examples:\n\n`headrace dead-letters show recipes/mine.toml 1700000000000-0`\n\n"
    "`headrace dead-letters show recipes/mine.toml 1700000000000-0 --raw entry.bin`"
)
def show(
    where: Where,
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="The letter's id.")],
    run: Run = None,
    raw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the entry's bytes to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a dead letter: its entry as JSON, or in hexadecimal where it cannot be read."""
    from services.launcher import dead_letters_command as command
    from services.launcher import tables

    place = command.find(where, run=run)
    if not command.show_one(place, letter_id, raw=raw, as_json=as_json, console=tables.console()):
        raise typer.Exit(NOT_ALL_STATUS)


@app.command(
    epilog="Examples:\n\n`headrace dead-letters requeue recipes/mine.toml 1700000000000-0`\n\n"
    "`headrace dead-letters requeue recipes/mine.toml --all --regenerate`"
)
def requeue(
    where: Where,
    letter_ids: Ids = None,
    run: Run = None,
    all_letters: Annotated[bool, typer.Option("--all", help="All that are there.")] = False,
    regenerate: Annotated[
        bool,
        typer.Option(
            "--regenerate",
            help="Generate their prompts anew instead, at no cost of a try.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put entries back where they came from, while the trainer has not heard of their end.

    Later there is nothing to put back: their prompts are due again anyhow, or given up.
    """
    from services.launcher import dead_letters_command as command
    from services.launcher import tables

    if not command.requeue(
        command.find(where, run=run),
        letter_ids or (),
        all_letters=all_letters,
        regenerate=regenerate,
        as_json=as_json,
        console=tables.console(),
    ):
        raise typer.Exit(NOT_ALL_STATUS)


@app.command(epilog="Example: `headrace dead-letters discard recipes/mine.toml --all --yes`")
def discard(
    where: Where,
    letter_ids: Ids = None,
    run: Run = None,
    all_letters: Annotated[bool, typer.Option("--all", help="All that are there.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete dead letters. What their groups became stays as it is."""
    from services.launcher import dead_letters_command as command
    from services.launcher import tables

    if not command.discard(
        command.find(where, run=run),
        letter_ids or (),
        all_letters=all_letters,
        without_asking=yes,
        console=tables.console(),
    ):
        raise typer.Exit(NOT_ALL_STATUS)
