"""Environments of a generator: each conversation has an instance of its own, and no more than
`generator.max_inflight` are alive.

What a class has to be is said in environment_kinds.py, where an instance lives in
environment_hosts.py and openenv_client.py. Here: who has which. It owns the worker processes of
sync environments.
"""

import asyncio
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Signature
from typing import Any

import structlog

from services.common import workers
from services.common.background import Strays
from services.common.config import Recipe
from services.common.errors import UserError
from services.generator import openenv_client
from services.generator.environment_hosts import WORKER, Host, LoopHost, WorkerHost
from services.generator.environment_kinds import (
    EnvironmentKind,
    check_names,
    offered_by,
    read_kinds,
)
from services.generator.types import EnvironmentFailed, ToolFailed

__all__ = ["EnvironmentKind", "Environments", "Instance"]


class Environments:
    """All environments of a recipe. Use within one event loop; `start` and `close` it.

    Raises UserError, naming the key, where the recipe's environments cannot be used. `taken` are
    the names of tools, which no method may have.
    """

    def __init__(self, recipe: Recipe, *, taken: Collection[str] = ()) -> None:
        self._taken = frozenset(taken)
        self._column = recipe.environments.column
        self._timeout_s = recipe.environments.timeout_s
        self._kinds = {kind.name: kind for kind in read_kinds(recipe, taken=self._taken)}
        self._limit = recipe.generator.max_inflight
        self._free = self._limit
        """Places for instances that are not taken."""
        self._idle: dict[str, list[_Resident]] = {name: [] for name in self._kinds}
        self._waiting: deque[_Waiting] = deque()
        self._residents: set[_Resident] = set()
        self._endings: dict[_Resident, asyncio.Task[None]] = {}
        self._strays = Strays()
        self._told: set[tuple[str, str]] = set()
        self._closed = False
        blueprints = [kind.blueprint for kind in self._kinds.values() if not kind.in_loop]
        in_workers = [blueprint.reference for blueprint in blueprints if blueprint is not None]
        preload = [WORKER, *dict.fromkeys(in_workers)]
        self._pool = workers.Pool(self._limit, preload=preload, ready=1) if in_workers else None

    @property
    def kinds(self) -> tuple[EnvironmentKind, ...]:
        """All of them; servers' tools are known once `start` is done."""
        return tuple(self._kinds.values())

    @property
    def live(self) -> int:
        """Instances that exist, are being made or are being ended."""
        return self._limit - self._free

    @property
    def num_strays(self) -> int:
        """Calls of async environments that run, those past their time included."""
        return len(self._strays)

    @property
    def idle(self) -> int:
        """Instances that wait for a conversation."""
        return sum(len(residents) for residents in self._idle.values())

    async def start(self) -> None:
        """Ask servers what they offer, and start a worker, where the recipe needs one. Raises
        UserError."""
        for name, kind in self._kinds.items():
            if kind.server is None:
                continue
            try:
                remote = await openenv_client.describe(kind.server, timeout_s=self._timeout_s)
            except EnvironmentFailed as error:
                raise UserError(f"{kind.key}.params.url: {error}") from error
            self._kinds[name] = offered_by(kind, remote)
            check_names(self._kinds[name], self._taken)
        if self._pool is not None:
            try:
                await self._pool.start()
            except workers.WorkerError as error:
                raise UserError(f"environments.classes: in a worker process: {error}") from error

    async def close(self) -> None:
        """End all instances, also those of conversations, whose calls raise EnvironmentFailed."""
        self._closed = True
        for waiting in self._waiting:
            if not waiting.future.done():
                waiting.future.set_exception(EnvironmentFailed("the environments are closed"))
        self._waiting.clear()
        for resident in list(self._residents):
            self._end(resident)
        await asyncio.gather(*self._endings.values())
        if self._pool is not None:
            await self._pool.close()

    def choose(self, row: Mapping[str, Any]) -> EnvironmentKind | None:
        """The environment of a dataset row: what its `environments.column` names, None where that
        is null or not there; without `environments.column` the only one.

        Raises EnvironmentFailed for a name that the recipe does not have.
        """
        if self._column is None:
            (kind,) = self._kinds.values()
            return kind
        name = row.get(self._column)
        if name is None:
            return None
        if not isinstance(name, str) or name not in self._kinds:
            raise EnvironmentFailed(
                f"the row's column {self._column} names {name!r}, and environments.classes has "
                f"only {', '.join(self._kinds)}"
            )
        return self._kinds[name]

    async def acquire(self, kind: EnvironmentKind) -> "Instance":
        """An instance for one conversation, which must `reset` it first and `finish` it in any
        case. The one used last is used next; where all places are taken it waits.

        Raises EnvironmentFailed where none can be made.
        """
        if self._closed:
            raise EnvironmentFailed("the environments are closed")
        idle = self._idle[kind.name]
        while idle:
            resident = idle.pop()
            if resident.host.usable:
                return Instance(self, resident)
            self._end(resident)
        if self._free:
            self._free -= 1
        else:
            handed_over = await self._wait(kind)
            if handed_over is not None:
                return Instance(self, handed_over)
        try:
            host = await self._open(kind)
        except BaseException as error:
            self._free_place()
            self.tell(kind, error)
            raise
        resident = _Resident(kind, host)
        self._residents.add(resident)
        if self._closed:
            self._end(resident)
            raise EnvironmentFailed("the environments are closed")
        return Instance(self, resident)

    async def _wait(self, kind: EnvironmentKind) -> "_Resident | None":
        """An instance that another conversation has finished with, or None for a place to make one
        in."""
        # One of another kind that waits for nothing makes room.
        others = next((residents for residents in self._idle.values() if residents), None)
        if others is not None:
            self._end(others.pop(0))
        waiting = _Waiting(kind, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            return await waiting.future
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.future.cancelled() and waiting.future.exception() is None:
                # Handed over in the same turn of the event loop as the cancellation.
                resident = waiting.future.result()
                if resident is None:
                    self._free_place()
                else:
                    self._give(resident)
            raise

    async def _open(self, kind: EnvironmentKind) -> Host:
        if kind.server is not None:
            assert kind.remote is not None, "start() comes first"
            return await openenv_client.Session.open(
                kind.name, kind.server, kind.remote, timeout_s=self._timeout_s
            )
        assert kind.blueprint is not None
        if kind.in_loop:
            return LoopHost(kind.blueprint, timeout_s=self._timeout_s, strays=self._strays)
        assert self._pool is not None
        return await WorkerHost.open(kind.blueprint, self._pool, timeout_s=self._timeout_s)

    async def take_back(self, resident: "_Resident", *, healthy: bool) -> None:
        """Keep an instance for the next conversation where it is healthy and its kind is used
        again; else end it, which goes on when this is cancelled."""
        if healthy and resident.kind.reused:
            self._give(resident)
        else:
            await asyncio.shield(self._end(resident))

    def tell(self, kind: EnvironmentKind, error: BaseException) -> None:
        """Show the user the traceback of what a class has raised, the first of each type."""
        raised = error.__cause__
        if isinstance(raised, workers.CallRaised):
            what = (kind.name, raised.text.partition(":")[0])
            if what not in self._told:
                self._told.add(what)
                structlog.get_logger().warning(
                    "an environment raised (told once for each type)",
                    environment=kind.name,
                    why=raised.traceback_text,
                )

    def _give(self, resident: "_Resident") -> None:
        """Hand an instance to who has waited longest; end it where that one needs another kind's
        place; else keep it."""
        waiting = next((w for w in self._waiting if not w.future.done()), None)
        if self._closed or (waiting is not None and waiting.kind.name != resident.kind.name):
            self._end(resident)
        elif waiting is not None:
            self._waiting.remove(waiting)
            waiting.future.set_result(resident)
        else:
            self._idle[resident.kind.name].append(resident)

    def _end(self, resident: "_Resident") -> asyncio.Task[None]:
        """Begin to end an instance, once; its place is free when that is done."""
        if resident not in self._endings:
            idle = self._idle[resident.kind.name]
            if resident in idle:
                idle.remove(resident)
            self._endings[resident] = asyncio.create_task(self._ended(resident))
        return self._endings[resident]

    async def _ended(self, resident: "_Resident") -> None:
        try:
            await resident.host.close()
        finally:
            self._residents.discard(resident)
            del self._endings[resident]
            self._free_place()

    def _free_place(self) -> None:
        """Give a place to who has waited longest, or keep it."""
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_result(None)
                return
        self._free += 1


class Instance:
    """An environment that one conversation has for itself, until `finish`."""

    def __init__(self, owner: Environments, resident: "_Resident") -> None:
        self.kind = resident.kind
        self.broken = False
        """A call was cut off, or it has failed: what state it is in is not known. It has no reward
        to give, and is ended by `finish`."""
        self._owner, self._resident, self._host = owner, resident, resident.host
        self._raised = False
        """A method raised: the conversation goes on, the next one gets another instance."""
        self._finished = False

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of what the model can call."""
        return self.kind.methods

    @property
    def done(self) -> bool:
        """The episode is over, as of the last reset or call."""
        return self._host.done

    def signature(self, name: str) -> Signature:
        """What a method takes, without `self`."""
        return self.kind.signature(name)

    async def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begin an episode; the observation, if there is one. Raises EnvironmentFailed."""
        arguments = self.kind.reset_arguments(row)
        with self._unbroken():
            return await self._host.reset(arguments)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a method; its result as text.

        Raises ToolFailed with what it raised, for the model; the conversation can go on. Raises
        EnvironmentFailed where it did not return in time or its process died.
        """
        with self._unbroken():
            return await self._host.call(name, arguments)

    async def get_reward(self) -> float | None:
        """What the environment says that the episode was worth; None abstains. Raises
        EnvironmentFailed, also for what is no finite number."""
        with self._unbroken():
            return read_reward(await self._host.get_reward(), name=self.kind.name)

    async def finish(self) -> None:
        """Give the instance back, whatever has happened; does nothing the second time."""
        if not self._finished:
            self._finished = True
            healthy = not (self.broken or self._raised)
            await self._owner.take_back(self._resident, healthy=healthy)

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        if self._finished:
            raise EnvironmentFailed(f"environment {self.kind.name}: it has been given back")
        try:
            yield
        except BaseException as error:
            if isinstance(error, ToolFailed):
                self._raised = True
            else:
                # A cancellation, too: the call may have done half of its work.
                self.broken = True
            self._owner.tell(self.kind, error)
            raise


@dataclass(frozen=True, eq=False)
class _Resident:
    """An instance that takes a place, whoever has it."""

    kind: EnvironmentKind
    host: Host


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A conversation that waits for an instance, or for a place to make one in."""

    kind: EnvironmentKind
    future: asyncio.Future[_Resident | None]


def read_reward(value: Any, *, name: str) -> float | None:
    """What `get_reward` returned, as a double; True and False are 1.0 and 0.0, numbers of numpy are
    numbers, None abstains. Raises EnvironmentFailed, naming the environment, for anything else,
    NaN and the infinities included.
    """
    if value is None:
        return None
    try:
        number = value if isinstance(value, int | float | str) else workers.plain(value)
        reward = float(number) if isinstance(number, int | float) else None
    except (TypeError, OverflowError):
        reward = None
    if reward is None:
        raise EnvironmentFailed(
            f"environment {name}: get_reward returned a value of type {type(value).__name__}; give "
            "a number or None"
        )
    if not math.isfinite(reward):
        raise EnvironmentFailed(f"environment {name}: get_reward returned {reward}")
    return reward
