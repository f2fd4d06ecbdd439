"""The command line that all services share: `python -m services.NAME RECIPE [--set a.b=c]
[--replica R] [--announce FILE]`, and `--node N` where a service may be on several machines."""

import gc
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from services.common import config, lifecycle
from services.common.errors import UserError


@dataclass(frozen=True)
class Invocation:
    """What a service was started with."""

    recipe: config.Recipe
    announce: str | None
    """File to write the taken ports to (see lifecycle.announce)."""
    node: int = 0
    """Which of a trainer's machines this is."""


ServiceMain = Callable[[Invocation, lifecycle.Lifecycle], Coroutine[Any, Any, None]]


RecipePath = Annotated[Path, typer.Argument(help="The recipe, a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one key: --set trainer.max_steps=10. Repeatable."),
]
Replica = Annotated[
    str | None, typer.Option(help="This process among its kind; the host's name by default.")
]
Announce = Annotated[str | None, typer.Option(help="Write the ports taken to this file, as JSON.")]
NodeNumber = Annotated[
    int,
    typer.Option(min=0, help="Which machine of a trainer on several this is; 0 is the trainer."),
]


def service_command(service: str, main: ServiceMain, help_text: str) -> Callable[..., None]:
    """The typer command of a service; it exits with the status of lifecycle.run()."""

    def command(
        recipe: RecipePath,
        overrides: Overrides = None,
        replica: Replica = None,
        announce: Announce = None,
    ) -> None:
        _run(service, main, recipe, overrides, replica, announce, node=0)

    command.__doc__ = help_text
    return command


def service_command_of_nodes(
    service: str, main: ServiceMain, help_text: str
) -> Callable[..., None]:
    """The same for a service that may be on several machines."""

    def command(
        recipe: RecipePath,
        overrides: Overrides = None,
        replica: Replica = None,
        announce: Announce = None,
        node: NodeNumber = 0,
    ) -> None:
        _run(service, main, recipe, overrides, replica, announce, node=node)

    command.__doc__ = help_text
    return command


def _run(
    service: str,
    main: ServiceMain,
    recipe: Path,
    overrides: list[str] | None,
    replica: str | None,
    announce: str | None,
    *,
    node: int,
) -> NoReturn:
    try:
        loaded = config.load(recipe, overrides=overrides or ())
    except UserError as error:
        raise typer.Exit(lifecycle.exit_status(error)) from None
    name = replica if replica is not None else lifecycle.default_replica()
    invocation = Invocation(recipe=loaded, announce=announce, node=node)

    async def body(state: lifecycle.Lifecycle) -> None:
        state.on_ready_change(freeze_heap)
        await main(invocation, state)

    status = lifecycle.run(lambda: lifecycle.Lifecycle(service=service, replica=name), body)
    raise typer.Exit(status)


async def freeze_heap(ready: bool) -> None:
    """When a service is ready for the first time, spare the garbage collector what it has made so
    far: it stays. With torch and vLLM that is 700,000 objects, and looking through them in every
    full collection was a third of a generator's CPU time.
    """
    if ready and not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
