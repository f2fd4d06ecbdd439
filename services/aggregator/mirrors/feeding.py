"""Feeds the mirrors of the run of the aggregator's recipe, each from where it was.

waits_for: steps that settle. unblocked_by: time alone; no one waits for it. A mirror that fails is
closed and tried again from the step that was noted last; the others go on.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from sqlalchemy.exc import SQLAlchemyError

from services.aggregator import fleet
from services.aggregator.alerts import OVER_S, Write
from services.aggregator.metric import Catalogue
from services.aggregator.mirrors import position as positions
from services.aggregator.mirrors.position import Position
from services.aggregator.mirrors.steps import read_steps, settled
from services.aggregator.mirrors.tensorboard import TensorBoard
from services.aggregator.mirrors.trackers import Trackio, Wandb
from services.aggregator.mirrors.types import Mirror
from services.aggregator.series import find_run
from services.aggregator.store import Store
from services.common.config import Recipe

EVERY_S = 5.0

AT_ONCE = 64
"""Steps that are read and written together."""

AFTER_FAILURE_S = 60.0
"""Before a mirror that failed is tried again."""


class Feeding:
    """One mirror of one run. `step` blocks; `keep` is for the writer's thread."""

    def __init__(
        self,
        store: Store,
        run: str,
        mirror: Mirror,
        *,
        catalogue: Catalogue,
        settle_s: float,
        leads: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._run = run
        self.mirror = mirror
        self._catalogue = catalogue
        self._settle_s = settle_s
        self._leads = leads
        self._clock = clock
        self._using = threading.Lock()
        """The mirror; a step that is under way when the task is cancelled ends before close()."""
        self._at: tuple[int, int, int] | None = None
        """The run's id, the attempt with which the mirror was opened, and the step it goes on
        with."""

    def step(self) -> tuple[int, Position] | None:
        """Write the steps that have settled, AT_ONCE at most: the run's id, and the position to be
        kept. None where there is nothing new, or where another process watches the run. Raises what
        the mirror raises."""
        with self._using:
            if self._leads():
                return self._step()
            self._at = None
            self.mirror.close()
            return None

    def _step(self) -> tuple[int, Position] | None:
        now_s = self._clock()
        with self._store.engine.begin() as connection:
            run = find_run(connection, self._run)
            if run is None:
                return None
            kept = positions.read(connection, run.id, self.mirror.name)
            begin = positions.following(kept, run.line)
            if begin is None:
                return None
            over = fleet.is_over(connection, run, since_s=now_s - OVER_S)
            end = settled(connection, run, now_s=now_s, settle_s=self._settle_s, over=over)
            end = min(end, begin.step + AT_ONCE)
            if end <= begin.step:
                return None
            steps = read_steps(
                connection, run, catalogue=self._catalogue, begin=begin.step, end=end
            )
        if self._at != (run.id, begin.began, begin.step):
            self.mirror.open(began=begin.began, step=begin.step)
        self._at = None  # what a write that fails has written is not known
        self.mirror.write(steps)
        self._at = (run.id, begin.began, end)
        return run.id, Position(attempt=begin.attempt, began=begin.began, step=end)

    def keep(self, run_id: int, position: Position) -> None:
        """Note how far it came, unless the run was deleted meanwhile."""
        with self._store.write() as writing:
            run = find_run(writing.connection, self._run)
            if run is not None and run.id == run_id:
                positions.keep(writing.connection, run_id, self.mirror.name, position)

    def close(self) -> None:
        """Close the mirror; the next step() opens it again."""
        with self._using:
            self._at = None
            self.mirror.close()


def mirrors_of(recipe: Recipe) -> list[Mirror]:
    """The mirrors that a recipe asks for. Raises UserError for one whose package is missing."""
    settings = recipe.mirrors
    config = {"run": recipe.run, **recipe.experiment()}
    found: list[Mirror] = []
    if settings.tensorboard:
        found.append(TensorBoard(recipe.run_folder / "tensorboard"))
    if settings.wandb is not None:
        found.append(Wandb(settings.wandb, run=recipe.run, folder=recipe.run_folder, config=config))
    if settings.trackio is not None:
        found.append(Trackio(settings.trackio, run=recipe.run, config=config))
    return found


async def feed_once(feeding: Feeding, *, write: Write) -> bool:
    """One chunk of steps; True when there may be more."""
    done = await asyncio.to_thread(feeding.step)
    if done is None:
        return False
    await write(partial(feeding.keep, *done))
    return True


async def keep_feeding(feedings: Sequence[Feeding], *, write: Write, every_s: float) -> None:
    """Feed all mirrors until cancelled; then close them."""
    try:
        async with asyncio.TaskGroup() as group:
            for feeding in feedings:
                group.create_task(_feed(feeding, write=write, every_s=every_s))
    finally:
        for feeding in feedings:
            await _closed(feeding)


async def _feed(feeding: Feeding, *, write: Write, every_s: float) -> None:
    log = structlog.get_logger().bind(mirror=feeding.mirror.name)
    while True:
        try:
            more = await feed_once(feeding, write=write)
            pause_s = 0.0 if more else every_s
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            log.error("a mirror waits for the store", cause=str(cause))
            pause_s = every_s
        except Exception as error:
            # Of a tracker anything may come, and a run must not end for it.
            log.error("a mirror failed", cause=f"{type(error).__name__}: {error}"[:500])
            pause_s = AFTER_FAILURE_S
            await _closed(feeding)
        await asyncio.sleep(pause_s)


async def _closed(feeding: Feeding) -> None:
    try:
        await asyncio.to_thread(feeding.close)
    except Exception as error:
        structlog.get_logger().error(
            "a mirror could not be closed",
            mirror=feeding.mirror.name,
            cause=f"{type(error).__name__}: {error}"[:500],
        )
