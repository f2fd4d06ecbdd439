"""The command line that all services share: `python -m services.NAME RECIPE [--set a.b=c]
[--replica R] [--announce FILE]`."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from services.common import config, lifecycle
from services.common.errors import UserError


@dataclass(frozen=True)
class Invocation:
    """What a service was started with."""

    recipe: config.Recipe
    announce: str | None
    """File to write the taken ports to (see lifecycle.announce)."""


ServiceMain = Callable[[Invocation, lifecycle.Lifecycle], Coroutine[Any, Any, None]]


def service_command(service: str, main: ServiceMain, help_text: str) -> Callable[..., None]:
    """The typer command of a service; it exits with the status of lifecycle.run()."""

    def command(
        recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.")],
        overrides: Annotated[
            list[str] | None,
            typer.Option("--set", help="Override one key: --set trainer.max_steps=10. Repeatable."),
        ] = None,
        replica: Annotated[
            str | None,
            typer.Option(help="This process among its kind; the host's name by default."),
        ] = None,
        announce: Annotated[
            str | None, typer.Option(help="Write the ports taken to this file, as JSON.")
        ] = None,
    ) -> None:
        try:
            loaded = config.load(recipe, overrides=overrides or ())
        except UserError as error:
            raise typer.Exit(lifecycle.exit_status(error)) from None
        name = replica if replica is not None else lifecycle.default_replica()
        invocation = Invocation(recipe=loaded, announce=announce)

        async def body(state: lifecycle.Lifecycle) -> None:
            await main(invocation, state)

        status = lifecycle.run(lambda: lifecycle.Lifecycle(service=service, replica=name), body)
        raise typer.Exit(status)

    command.__doc__ = help_text
    return command
