"""Where an environment's instance lives: in a worker process of its own, or in the event loop.

The third kind, on a server, is openenv_client.py. All promise what `Host` says, so that who uses
an instance need not know where it is.
"""

import copy
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, Self

import structlog

from services.common.async_calls import awaited, raised
from services.common.background import Strays
from services.common.workers import CallRaised, Lease, Pool, WorkerError
from services.generator.tool_text import as_text
from services.generator.types import EnvironmentFailed, ToolFailed

CLOSE_TIMEOUT_S = 5.0
"""Of an instance's `close()`; it is left to itself, or killed, after that."""

WORKER = "services.generator.environment_worker"
"""What runs in the worker processes."""


class Host(Protocol):
    """One instance, wherever it lives. One call at a time."""

    done: bool
    """The episode is over, as of the last reset or call."""

    @property
    def usable(self) -> bool:
        """It can be reset, as far as that can be told without asking it."""
        ...

    async def reset(self, arguments: Mapping[str, Any]) -> str | None:
        """Begin an episode; its observation. Raises EnvironmentFailed."""
        ...

    async def call(self, method: str, arguments: Mapping[str, Any]) -> str:
        """Call a method; its result. Raises ToolFailed for what the model is to be told, and
        EnvironmentFailed where the instance cannot go on."""
        ...

    async def get_reward(self) -> Any:
        """What the environment says of the episode. Raises EnvironmentFailed."""
        ...

    async def close(self) -> None:
        """End the instance, within CLOSE_TIMEOUT_S or a little more; raises nothing."""
        ...


@dataclass(frozen=True)
class Blueprint:
    """What a user's class is made with."""

    name: str
    """In messages."""
    reference: str
    """`module:Class`."""
    make: Callable[..., Any]
    """The class."""
    params: Mapping[str, Any]
    closes: bool
    """It has `close()`."""


class WorkerHost:
    """An instance in a worker process that is its alone. `async def` methods do not go here."""

    def __init__(self, blueprint: Blueprint, lease: Lease, *, timeout_s: float) -> None:
        self.done = False
        self._blueprint, self._lease, self._timeout_s = blueprint, lease, timeout_s

    @classmethod
    async def open(cls, blueprint: Blueprint, pool: Pool, *, timeout_s: float) -> Self:
        """Make an instance in a worker of the pool. Raises EnvironmentFailed; no worker stays
        behind then, nor when it is cancelled."""
        try:
            lease = await pool.lease()
        except WorkerError as error:
            _fail(blueprint.name, "no worker process", error)
        host = cls(blueprint, lease, timeout_s=timeout_s)
        made = {"reference": blueprint.reference, "params": blueprint.params}
        try:
            await host._ask("__init__", "create", **made)
        except BaseException:
            lease.discard()
            raise
        return host

    @property
    def usable(self) -> bool:
        """Its process has not ended."""
        return not self._lease.ended

    async def reset(self, arguments: Mapping[str, Any]) -> str | None:
        """See Host."""
        answer = await self._ask("reset", "reset", arguments=arguments)
        self.done = answer["done"]
        text: str | None = answer["text"]
        return text

    async def call(self, method: str, arguments: Mapping[str, Any]) -> str:
        """See Host."""
        try:
            answer = await self._lease.call(
                f"{WORKER}:call",
                {"method": method, "arguments": arguments},
                timeout_s=self._timeout_s,
            )
        except CallRaised as error:
            raise ToolFailed(error.text) from error
        except WorkerError as error:
            _fail(self._blueprint.name, method, error)
        self.done = answer["done"]
        text: str = answer["text"]
        return text

    async def get_reward(self) -> Any:
        """See Host."""
        return await self._ask("get_reward", "get_reward")

    async def close(self) -> None:
        """Call the instance's `close()`, if it can still be asked, and kill its process."""
        try:
            if self._blueprint.closes and not self._lease.ended:
                await self._lease.call(f"{WORKER}:close", {}, timeout_s=CLOSE_TIMEOUT_S)
        except WorkerError as error:
            _complain(self._blueprint.name, error)
        finally:
            self._lease.discard()

    async def _ask(self, what: str, function: str, **kwargs: Any) -> Any:
        try:
            return await self._lease.call(f"{WORKER}:{function}", kwargs, timeout_s=self._timeout_s)
        except WorkerError as error:
            _fail(self._blueprint.name, what, error)


@dataclass
class LoopHost:
    """An instance of a class whose methods are all `async def`, in the service's event loop."""

    blueprint: Blueprint
    timeout_s: float
    strays: Strays
    done: bool = False
    _instance: Any = field(init=False)

    def __post_init__(self) -> None:
        """Make the instance. Raises EnvironmentFailed."""
        try:
            # A copy, here and below: what an instance changes in place, others must not see.
            self._instance = self.blueprint.make(**copy.deepcopy(dict(self.blueprint.params)))
        except Exception as error:
            _fail(self.blueprint.name, "__init__", raised(error))

    @property
    def usable(self) -> bool:
        """Always."""
        return True

    async def reset(self, arguments: Mapping[str, Any]) -> str | None:
        """See Host."""
        try:
            observation = await self._await(
                self._instance.reset, arguments, timeout_s=self.timeout_s
            )
            text = None if observation is None else as_text(observation)
            self.done = self._read_done()
        except WorkerError as error:
            _fail(self.blueprint.name, "reset", error)
        return text

    async def call(self, method: str, arguments: Mapping[str, Any]) -> str:
        """See Host."""
        try:
            text = as_text(
                await self._await(
                    getattr(self._instance, method), arguments, timeout_s=self.timeout_s
                )
            )
            self.done = self._read_done()
        except CallRaised as error:
            raise ToolFailed(error.text) from error
        except WorkerError as error:
            _fail(self.blueprint.name, method, error)
        return text

    async def get_reward(self) -> Any:
        """See Host."""
        try:
            return await self._await(self._instance.get_reward, {}, timeout_s=self.timeout_s)
        except WorkerError as error:
            _fail(self.blueprint.name, "get_reward", error)

    async def close(self) -> None:
        """Await the instance's `close()`, but not for ever."""
        if not self.blueprint.closes:
            return
        try:
            await self._await(self._instance.close, {}, timeout_s=CLOSE_TIMEOUT_S)
        except WorkerError as error:
            _complain(self.blueprint.name, error)

    async def _await(
        self,
        method: Callable[..., Coroutine[Any, Any, Any]],
        arguments: Mapping[str, Any],
        *,
        timeout_s: float,
    ) -> Any:
        async def run() -> Any:
            return await method(**copy.deepcopy(dict(arguments)))

        return await awaited(run(), timeout_s=timeout_s, strays=self.strays)

    def _read_done(self) -> bool:
        try:
            return bool(getattr(self._instance, "done", False))
        except Exception as error:
            raise raised(error) from error


def _fail(name: str, what: str, error: WorkerError) -> NoReturn:
    """Raise EnvironmentFailed for what became of a call."""
    raise EnvironmentFailed(f"environment {name}: {what}: {error}") from error


def _complain(name: str, error: WorkerError) -> None:
    """The conversation is over, and its instance goes in any case."""
    structlog.get_logger().warning(
        "an environment could not be closed", environment=name, why=str(error)
    )
