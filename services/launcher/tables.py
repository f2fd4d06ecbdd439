"""Tables and lines of the commands that print answers: for the eye on a terminal, for other
programs elsewhere.
"""

import sys

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_COLUMNS = 10_000
"""Nothing is cut or wrapped where no terminal says how wide a line may be."""

COLUMN_GAP = 2
"""Spaces between two columns of a table."""

LEAST_FIRST_COLUMNS = 8
"""A name or a key is wrapped to no less."""


def console() -> Console:
    """Where the commands print to: as wide as the terminal, or as wide as the text needs."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=PIPED_COLUMNS)


def plain_table(*titles: str) -> Table:
    """A table without lines; a column whose title begins with ">" is aligned to the right.

    On a terminal that is too narrow the first column is wrapped, not cut: a key or a name can still
    be copied.
    """
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(
            title.removeprefix(">"),
            justify="right" if title.startswith(">") else "left",
            overflow="fold",
            no_wrap=bool(table.columns),
        )
    return table


def show_table(to: Console, table: Table) -> None:
    """Print a table: on a terminal, whose lines it may exceed rather than lose a digit; elsewhere
    without the spaces at the ends of its lines.
    """
    if to.is_terminal:
        to.width = max(to.width, _least_columns(table))
        to.print(table)
        return
    with to.capture() as captured:
        to.print(table)
    for line in captured.get().splitlines():
        say(to, line.rstrip())


def _least_columns(table: Table) -> int:
    """Columns of the terminal below which rich would cut cells that must not be wrapped."""
    first, *others = (
        max(cell_len(str(text)) for text in (column.header, *column.cells))
        for column in table.columns
    )
    return min(first, LEAST_FIRST_COLUMNS) + sum(COLUMN_GAP + width for width in others)


def say(to: Console, text: str | Text) -> None:
    """One line that stays one, also where it is piped to another program."""
    to.print(Text(text) if isinstance(text, str) else text, soft_wrap=True)


def pass_on(text: str) -> None:
    """An answer as it came, on a line of its own."""
    sys.stdout.write(f"{text.rstrip()}\n")
