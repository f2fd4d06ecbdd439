"""The commands of `headrace` that ask a running aggregator: verdict, metrics, ledger and runs."""

from pathlib import Path
from typing import Annotated

import typer

DECLINED_STATUS = 1
"""Exit status after a no to "are you sure"."""

Url = Annotated[str, typer.Argument(metavar="URL", help="The aggregator's address.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="F", help="The file of network.token_file, if any.")
]
CaFile = Annotated[
    Path | None,
    typer.Option(metavar="F", help="For https: PEM certificates of who signed the aggregator's."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the REST interface's answer as it is, for scripts.")
]

runs = typer.Typer(
    help="List the runs that an aggregator knows, delete one, say how long one is kept.",
    no_args_is_help=True,
)


def add_to(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command(
        epilog="Examples:\n\n`headrace verdict http://localhost:8080 demo --speed-up 2`\n\n"
        "`headrace verdict http://localhost:8080 demo --history --window 100`"
    )(verdict)
    app.command(
        epilog="Examples:\n\n`headrace metrics http://localhost:8080 demo --match ^perf/`\n\n"
        "`headrace metrics http://localhost:8080 demo reward perf/step_s --last 100`\n\n"
        "`headrace metrics http://localhost:8080 demo tools/latency_s --reduce p95 --by-producer`"
    )(metrics)
    app.command(
        epilog="Examples:\n\n`headrace ledger http://localhost:8080 demo`\n\n"
        "`headrace ledger http://localhost:8080 demo --group 0.17.1.1`\n\n"
        "`headrace ledger http://localhost:8080 demo --step 40`"
    )(ledger)
    app.add_typer(runs, name="runs")


def verdict(
    url: Url,
    run: RunName,
    window: Annotated[
        int | None, typer.Option(metavar="N", help="Judge the last N steps, 20 by default.")
    ] = None,
    speed_up: Annotated[
        float | None,
        typer.Option(metavar="X", help="Also predict a step with that stage X times as fast."),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Show how the verdict has changed, N steps a line.")
    ] = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Say which stage holds a run back, what it costs, what to turn, and what else is wrong."""
    from services.launcher import tables, verdict_command
    from services.launcher.asking import Access

    ask = verdict_command.show_history if history else verdict_command.show
    ask(
        url,
        run=run,
        window=window,
        speed_up=speed_up,
        access=Access(token_file, ca_file),
        console=tables.console(),
    )


def metrics(
    url: Url,
    run: RunName,
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY", help="Show the history of these; else list all."),
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="List only keys in which this expression is found."),
    ] = None,
    reduce: Annotated[
        str | None,
        typer.Option(metavar="R", help="mean, p95, sum, rate, …; the key's own by default."),
    ] = None,
    axis: Annotated[
        str | None, typer.Option(metavar="step|time", help="By step (the default) or wall time.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="X", help="From this step; by time seconds since 1970 or ISO 8601."),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="X", help="Before this one.")] = None,
    last: Annotated[
        int | None, typer.Option(metavar="N", help="The last N steps of the run; by time seconds.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(metavar="N", help="Only this start of the trainer.")
    ] = None,
    by_producer: Annotated[
        bool, typer.Option("--by-producer", help="Also a line for each process alone.")
    ] = False,
    as_json: AsJson = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Show what a run measures: a table of all latest values, or the history of some keys.

    An absent value is an em dash. With --json each KEY's answer is a line of its own.
    """
    from services.launcher import metrics_command, tables
    from services.launcher.asking import Access

    metrics_command.show(
        url,
        run=run,
        keys=keys or (),
        match=match,
        span=metrics_command.Span(
            axis=axis,
            reduce=reduce,
            since=since,
            until=until,
            last=last,
            attempt=attempt,
            by_producer=by_producer,
        ),
        as_json=as_json,
        access=Access(token_file, ca_file),
        console=tables.console(),
    )


def ledger(
    url: Url,
    run: RunName,
    group: Annotated[
        str | None, typer.Option(metavar="ID", help="The way of one group, with its times.")
    ] = None,
    row: Annotated[
        int | None, typer.Option(metavar="N", help="What became of a row of the dataset.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="The groups that an optimizer step trained.")
    ] = None,
    as_json: AsJson = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Say where every group of a run is: trained, dropped and why, given up, or in flight.

    dispatched = trained + rolled back + dropped + given up + in flight, or it says so.
    """
    from services.launcher import ledger_command, tables
    from services.launcher.asking import Access

    ledger_command.show(
        url,
        run=run,
        view=ledger_command.view(group=group, row=row, step=step),
        as_json=as_json,
        access=Access(token_file, ca_file),
        console=tables.console(),
    )


@runs.command("list", epilog="Example: `headrace runs list http://localhost:8080`")
def list_runs(
    url: Url, as_json: AsJson = False, token_file: TokenFile = None, ca_file: CaFile = None
) -> None:
    """List all runs, the one heard of last first.

    Gaps are batches of metrics that have not arrived although later ones did.
    """
    from services.launcher import runs_command, tables
    from services.launcher.asking import Access

    runs_command.show_runs(
        url, as_json=as_json, access=Access(token_file, ca_file), console=tables.console()
    )


@runs.command("delete", epilog="Example: `headrace runs delete http://localhost:8080 demo --yes`")
def delete_run(
    url: Url,
    run: RunName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Delete all that the aggregator knows of a run. It cannot be brought back."""
    from services.launcher import runs_command, tables
    from services.launcher.asking import Access

    if not runs_command.delete(
        url,
        run=run,
        without_asking=yes,
        access=Access(token_file, ca_file),
        console=tables.console(),
    ):
        raise typer.Exit(DECLINED_STATUS)


@runs.command(
    "keep",
    epilog="Examples:\n\n`headrace runs keep http://localhost:8080 demo 30`\n\n"
    "`headrace runs keep http://localhost:8080 demo forever`",
)
def keep_run(
    url: Url,
    run: RunName,
    days: Annotated[
        str,
        typer.Argument(
            metavar="DAYS|forever|default",
            help="After it was last heard of; default: the aggregator's aggregator.keep_runs_days.",
        ),
    ],
    as_json: AsJson = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Say how long a run is kept."""
    from services.launcher import runs_command, tables
    from services.launcher.asking import Access

    runs_command.keep(
        url,
        run=run,
        how_long=days,
        as_json=as_json,
        access=Access(token_file, ca_file),
        console=tables.console(),
    )
