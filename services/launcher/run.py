"""`headrace run`: everything on one machine, from the recipe to the summary, and nothing left
behind. A run that was stopped or killed goes on where it was.

    check -> claim the folder -> model -> queue -> services -> watch -> stop -> summary

waits_for: the trainer's end, a failure, or a signal. unblocked_by: SIGINT and SIGTERM (drain, then
status 130), a second one (everything is killed at once).
"""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from rich.console import Console

from services.common import config, experiment, secret_keys
from services.common.certificates import client_context
from services.common.config import Recipe, without_passwords
from services.common.errors import UserError
from services.common.tokens import tokens_of
from services.launcher import (
    checks,
    embedded_queue,
    folder,
    launches,
    plan,
    ports,
    summary,
    tiny_model,
    view,
)
from services.launcher.children import Supervisor
from services.launcher.errors import Interrupted, RunFailed
from services.launcher.figures import percent
from services.launcher.folder import RunFolder
from services.launcher.metrics_client import MetricsClient
from services.launcher.observer import Observer

T = TypeVar("T")

INTERRUPTED_STATUS = 130

GRACE_S = 15.0
"""What workers get to give back their work after a signal, and to send their last metrics."""

LAST_GRACE_S = 5.0
"""What the aggregator, the queue server, and all after a failure get."""

LOOK_EVERY_S = 1.0
"""Pause between two looks at the run."""

WRITE_COST_EVERY_S = 10.0
"""A launcher that is killed takes no more of its account with it."""

ANSWER_WITHIN_S = 30.0
"""How long the embedded queue server and, where it is asked to forget a run, the aggregator may
take to answer.
"""


@dataclass(frozen=True)
class _Start:
    """What a run is started with."""

    recipe: Recipe
    folder: RunFolder
    model: Path
    fresh: bool
    began_s: float
    earlier: launches.Cost
    """What launches before this one have cost."""
    argv_of: plan.ServiceArgv


def run(
    recipe_path: Path,
    *,
    overrides: Sequence[str] = (),
    fresh: bool = False,
    console: Console,
    argv_of: plan.ServiceArgv = plan.python_module,
) -> int:
    """Run a recipe to its end, from its beginning or from where an earlier launch was ended; the
    exit status: 0, or 130 when a signal ended it.

    `argv_of` says how a service is started. Raises UserError for a user's mistake, before anything
    is started where it can be seen then, and RunFailed when the run cannot go on; in every case no
    process is left.
    """
    began_s = time.monotonic()
    recipe = config.load(recipe_path, overrides=overrides)
    place = RunFolder(recipe.run_folder)
    before = None if fresh else place.kept_recipe()
    if before is not None:
        experiment.check_same(experiment.plain(before), recipe, place=place.path)
    if not fresh and place.complete() and (before is None or _as_long(before, recipe)):
        console.print(
            f"run {recipe.run} is complete: see {place.summary}; --fresh starts it over",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return 0
    checks.check_recipe(recipe)
    checks.check_one_machine(recipe)
    queue_url = secret_keys.queue_url(recipe.queue)
    embedded_queue.check(queue_url, run=recipe.run)
    ports.check_http_port(recipe)
    if not fresh and before is None:
        _check_no_such_run(recipe)
    hold = folder.claim(place, fresh=fresh)
    try:
        if fresh and queue_url is not None:
            # Only now: with the folder held, no launcher is at work on these keys.
            embedded_queue.delete_keys(queue_url, run=recipe.run)
        if before is not None:
            console.print(f"run {recipe.run} goes on", markup=False, highlight=False)
        model = resolve_model(recipe.model.path, console=console)
        # A longer run than the one that is complete is not, from here on.
        place.summary.unlink(missing_ok=True)
        _write_recipe(recipe, place)
        earlier = launches.read(place.launches)
        start = _Start(recipe, place, model, fresh, began_s, earlier, argv_of)
        return asyncio.run(_River(start, console).flow())
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    finally:
        os.close(hold)


def resolve_model(path: str, *, console: Console) -> Path:
    """The model's folder; a tiny model is made first where it is not there yet, which is shown."""
    if not console.is_terminal:
        return tiny_model.resolve(
            path, progress=lambda _, text: console.print(text, markup=False, highlight=False)
        )
    with console.status(path) as status:
        return tiny_model.resolve(
            path, progress=lambda done, text: status.update(f"{path}  {percent(done)}  {text}")
        )


def _as_long(before: Recipe, now: Recipe) -> bool:
    """Whether two recipes end at the same step."""
    ends = [(each.trainer.max_steps, each.data.epochs) for each in (before, now)]
    return ends[0] == ends[1]


def _check_no_such_run(recipe: Recipe) -> None:
    """A queue server of the user's must not hold another run of this name."""
    url = secret_keys.queue_url(recipe.queue)
    if url is not None and embedded_queue.has_keys(url, run=recipe.run):
        raise UserError(
            f"run: the queue server at {without_passwords(url)} already holds a run named "
            f"{recipe.run}; choose another name, or start over with --fresh"
        )


def _write_recipe(recipe: Recipe, place: RunFolder) -> None:
    """Keep the resolved recipe; it may hold the queue server's password."""
    place.recipe.touch(mode=0o600)
    place.recipe.write_text(config.dump_toml(recipe))


class _River:
    """One run, from the first process to the last."""

    def __init__(self, start: _Start, console: Console) -> None:
        self._start = start
        self._console = console
        self._addresses = plan.choose_addresses(start.recipe)

    async def flow(self) -> int:
        """Start, watch, stop; the exit status."""
        recipe = self._start.recipe
        metrics = MetricsClient(
            self._addresses.page,
            run=recipe.run,
            tokens=tokens_of(recipe.network),
            tls=client_context(recipe.network),
        )
        async with Supervisor() as supervisor:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self._on_signal, supervisor)
            try:
                await self._start_children(supervisor, metrics)
                report = await self._watch(supervisor, metrics)
                # Workers send their last metrics when they stop: the summary needs them.
                await supervisor.stop(plan.WORKERS, grace_s=GRACE_S)
                await self._conclude(report, supervisor, metrics)
                return 0
            except Interrupted:
                await supervisor.stop(plan.WORKERS, grace_s=GRACE_S)
                return INTERRUPTED_STATUS
            finally:
                launches.write(self._cost(supervisor), self._start.folder.launches)
                await metrics.close()
                for tier in (plan.WORKERS, plan.AGGREGATOR, plan.QUEUE):
                    await supervisor.stop(tier, grace_s=LAST_GRACE_S)

    def _cost(self, supervisor: Supervisor) -> launches.Cost:
        """Of all launches up to now."""
        restarts = {name: child.restarts for name, child in supervisor.children.items()}
        wall_s = time.monotonic() - self._start.began_s
        return self._start.earlier + launches.Cost(wall_s, restarts)

    def _on_signal(self, supervisor: Supervisor) -> None:
        """The first one drains; once the run is over, for that or another reason, it kills."""
        if supervisor.over.done():
            supervisor.kill()
        else:
            supervisor.over.set_exception(Interrupted())

    async def _start_children(self, supervisor: Supervisor, metrics: MetricsClient) -> None:
        start, addresses = self._start, self._addresses
        if addresses.queue_port is not None:
            queue = plan.queue_spec(start.folder, port=addresses.queue_port, environ=os.environ)
            supervisor.start(queue)
            answers = embedded_queue.answers(addresses.queue_url)
            await self._answered(supervisor, answers, who="the embedded queue server")
        aggregator, *others = plan.service_specs(
            start.recipe,
            start.folder,
            model=start.model,
            addresses=addresses,
            machine=plan.this_machine(),
            environ=os.environ,
            argv_of=start.argv_of,
        )
        supervisor.start(aggregator)
        if start.fresh and start.recipe.aggregator.database is not None:
            # This database is not in the folder that was moved aside: the old run is forgotten
            # first.
            await self._answered(supervisor, metrics.forget_run(), who="the aggregator")
        for spec in others:
            supervisor.start(spec)

    async def _answered(
        self, supervisor: Supervisor, answer: Coroutine[Any, Any, bool], *, who: str
    ) -> None:
        """Await an answer. Raises RunFailed when it takes too long, or why the run is over."""
        answered = await self._unless_over(supervisor, answer, timeout_s=ANSWER_WITHIN_S)
        if supervisor.over.done():
            supervisor.over.result()
        if not answered:
            raise RunFailed(
                f"{who} did not answer within {ANSWER_WITHIN_S:.0f} s; "
                f"logs: {self._start.folder.logs}"
            )

    async def _unless_over(
        self,
        supervisor: Supervisor,
        work: Coroutine[Any, Any, T],
        *,
        timeout_s: float | None = None,
    ) -> T | None:
        """Await work, but not past the end of the run: None then, and when the time is up."""
        task = asyncio.create_task(work)
        both: list[asyncio.Future[Any]] = [task, supervisor.over]
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        return None

    async def _watch(self, supervisor: Supervisor, metrics: MetricsClient) -> dict[str, Any]:
        """Show the run until it is over; the trainer's account of it.

        Raises UserError, RunFailed or Interrupted.
        """
        observer = Observer(
            recipe=self._start.recipe,
            children=supervisor.children,
            metrics=metrics,
            page=self._addresses.page,
            host=self._addresses.host,
        )
        written_s = 0.0
        try:
            with view.choose(self._console) as shown:
                while not supervisor.over.done():
                    if time.monotonic() - written_s > WRITE_COST_EVERY_S:
                        written_s = time.monotonic()
                        launches.write(self._cost(supervisor), self._start.folder.launches)
                    picture = await self._unless_over(supervisor, observer.look())
                    if picture is not None:
                        shown.show(picture)
                    await asyncio.wait([supervisor.over], timeout=LOOK_EVERY_S)
                if isinstance(supervisor.over.exception(), Interrupted):
                    shown.note("stopping; once more kills everything at once")
                supervisor.over.result()
                report = summary.read_trainer_report(self._start.folder.trainer_report)
                shown.show((await observer.look()).ended(report))
                return report
        finally:
            await observer.close()

    async def _conclude(
        self, report: dict[str, Any], supervisor: Supervisor, metrics: MetricsClient
    ) -> None:
        """Write the summary and show it; the aggregator still answers, and has everything."""
        start, cost = self._start, self._cost(supervisor)
        try:
            composed = await summary.compose(
                report,
                metrics,
                run=start.recipe.run,
                wall_s=cost.wall_s,
                restarts=cost.restarts,
            )
        except httpx.HTTPError as error:
            raise RunFailed(
                f"the aggregator did not answer at the end ({type(error).__name__}: {error}); the "
                f"trainer's own account is in {start.folder.trainer_report}; "
                f"log: {start.folder.log('aggregator-0')}"
            ) from error
        summary.write(composed, start.folder.summary)
        self._console.print(summary.table(composed, start.folder))
