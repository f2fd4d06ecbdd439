"""The command `headrace`. Heavy imports happen inside commands, so that help and mistakes are
quick.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from services.common.errors import UserError
from services.launcher import cli_asking, cli_dead_letters
from services.launcher.errors import RunFailed

FAILURE_STATUS, MISTAKE_STATUS = 1, 2

SERVICES = {
    "generator": "Turns requests into groups of rollouts (vLLM).",
    "scorer": "Turns groups of rollouts into scored samples.",
    "trainer": "Turns samples into policy versions.",
    "aggregator": "Turns metrics into history and answers queries.",
}

app = typer.Typer(
    name="headrace",
    help="Asynchronous GRPO post-training of language models, as four services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key of the recipe: --set trainer.max_steps=10. Repeatable.",
    ),
]


@app.command(epilog="Example: `headrace run recipes/arithmetic.toml --set run=demo --fresh`")
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Move an earlier run of this name aside (NAME.1, …) and start over."
        ),
    ] = False,
) -> None:
    """Run everything on this machine: queue, generators, scorers, trainer and aggregator.

    Ends with a summary in FOLDER/NAME/summary.json. Ctrl-C drains and leaves no process behind; the
    same command then goes on where the run was.
    """
    from rich.console import Console

    from services.launcher import run as launch

    raise typer.Exit(launch.run(recipe, overrides=overrides or (), fresh=fresh, console=Console()))


@app.command(epilog="Example: `headrace check recipes/mine.toml --set generator.replicas=2`")
def check(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Validate a recipe, its reward functions and its model, and print it with all defaults."""
    from services.common import config
    from services.launcher import checks

    loaded = config.load(recipe, overrides=overrides or ())
    checks.check_recipe(loaded)
    print(config.dump_toml(loaded, hide_passwords=True), end="")


@app.command(
    epilog="Examples:\n\n`headrace rollout recipes/calculator.toml --prompt 'What is 47 * 86?'`\n\n"
    "`headrace rollout recipes/guess.toml --row 0 --num 4`\n\n"
    "`headrace rollout recipes/mine.toml --row 0 --url localhost:50061`"
)
def rollout(
    recipe: RecipePath,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The user's message.")] = None,
    row: Annotated[
        int | None, typer.Option(metavar="N", help="Or row N of the recipe's dataset, from 0.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Dataset columns, for environments: '{\"level\": 3}'."),
    ] = None,
    num: Annotated[int, typer.Option(metavar="N", min=1, help="Conversations.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", min=0, help="The recipe's by default; 0: greedy.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="HOST:PORT",
            help="A running generator's gRPC address; else an engine is started here, on the "
            "recipe's model.",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Run a conversation now and print its turns, calls and sequences, the trained tokens marked.

    Nothing is trained. It shows what a chat template, a tool or an environment does.
    """
    from services.launcher import rollout_command, tables

    raise typer.Exit(
        rollout_command.show(
            recipe,
            overrides=overrides or [],
            prompt=prompt,
            row=row,
            columns=columns,
            num=num,
            temperature=temperature,
            address=address,
            console=tables.console(),
        )
    )


@app.command("tiny-model", epilog="Example: `headrace tiny-model models/tiny --seed 1`")
def make_tiny_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")],
    task: Annotated[str, typer.Option(help="What it is warmed up on.")] = "arithmetic",
    tied: Annotated[bool, typer.Option("--tied", help="Tie the output head to the embeddings.")] = (
        False
    ),
    seed: Annotated[int, typer.Option(help="The same seed gives the same model.")] = 0,
) -> None:
    """Make a small model with its tokenizer, warmed up on a task, for tests and first steps."""
    from services.launcher import tiny_model

    def tell(done: float, text: str) -> None:
        print(f"{done:4.0%}  {text}", flush=True)

    made = tiny_model.make(directory, task=task, tied=tied, seed=seed, progress=tell)
    print(f"made {made}")


@app.command(
    epilog="Examples:\n\n`headrace export demo models/demo`\n\n"
    "`headrace export runs/demo models/demo-100 --step 100`"
)
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, or its name.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")],
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Of the checkpoint of this step; by default the end of a run that is complete, "
            "else its newest checkpoint.",
        ),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter",
            help="Of a run that trains an adapter: it alone, as peft has it; by default it is "
            "merged into the weights.",
        ),
    ] = False,
    folder: Annotated[
        Path, typer.Option(metavar="PATH", help="Where runs are, for a name.")
    ] = Path("runs"),
) -> None:
    """Write a run's policy as a Hugging Face folder: configuration, tokenizer, weights.

    The run may go on meanwhile, be stopped, or be complete.
    """
    from services.launcher import export_command, tables

    export_command.write(
        run,
        directory,
        folder=folder,
        step=step,
        adapter_only=adapter,
        console=tables.console(),
    )


cli_asking.add_to(app)
app.add_typer(cli_dead_letters.app, name="dead-letters")


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(f"headrace {installed('headrace')}")


def _add_service(name: str, about: str) -> None:
    """`headrace NAME …` becomes `python -m services.NAME …`: what containers run, with the same
    process id.
    """

    @app.command(
        name,
        help=about,
        rich_help_panel="One service alone, as containers run it",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )
    def service(context: typer.Context) -> None:
        sys.stdout.flush()
        module = ["-m", f"services.{name}"]
        os.execv(sys.executable, [sys.executable, *module, *context.args])


for _name, _about in SERVICES.items():
    _add_service(_name, _about)


def main() -> None:
    """Entry point."""
    with one_line_errors():
        app()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A user's mistake ends as one red line and status 2, a failed run as one and status 1."""
    try:
        yield
    except UserError as error:
        _complain(error)
        raise SystemExit(MISTAKE_STATUS) from None
    except RunFailed as error:
        _complain(error)
        raise SystemExit(FAILURE_STATUS) from None


def _complain(error: Exception) -> None:
    """`error: …` on stderr, red on a terminal unless NO_COLOR is set; one line a mistake."""
    from rich.console import Console

    console = Console(stderr=True)
    for line in str(error).splitlines():
        console.print(f"error: {line}", style="red", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
