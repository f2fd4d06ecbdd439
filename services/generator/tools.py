"""What the model may call: the recipe's functions, with what the chat template says of them, and
the running of a turn's calls.

A sync function runs in a worker process, so that it may block, hang or crash there; an async one is
awaited in this process. Whatever a call ends with is told to the model: `error: ` and the reason,
where it gave no result.
"""

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import structlog

from services.common import plugins, workers
from services.common.async_calls import awaited
from services.common.background import Strays
from services.common.config import Recipe
from services.common.errors import UserError
from services.generator import tool_worker
from services.generator.parsing import validate
from services.generator.tool_schema import is_async, schema_of
from services.generator.tool_text import as_text
from services.generator.types import CallResult, ToolCall, ToolFailed


@dataclass(frozen=True)
class Tool:
    """One function of the recipe."""

    reference: str
    """`module:function`, for workers."""
    call: Callable[..., Any]
    is_async: bool
    signature: inspect.Signature
    schema: Mapping[str, Any]


class Tools:
    """The recipe's tools and the workers of the sync ones."""

    def __init__(self, recipe: Recipe) -> None:
        """Find and check them. Raises UserError naming the key of the first that cannot be used."""
        self._timeout_s = recipe.tools.timeout_s
        self._tools: dict[str, Tool] = {}
        for position, reference in enumerate(recipe.tools.functions):
            key = f"tools.functions[{position}]"
            call = plugins.load(reference, key)
            schema = schema_of(call, key)
            name = schema["function"]["name"]
            if name in self._tools:
                raise UserError(f"{key}: there are two functions called {name}; rename one")
            self._tools[name] = Tool(
                reference=reference,
                call=call,
                is_async=is_async(call),
                signature=inspect.signature(call),
                schema=schema,
            )
        sync = [tool.reference for tool in self._tools.values() if not tool.is_async]
        self._pool = workers.Pool(
            recipe.generator.max_inflight,
            preload=[tool_worker.CALL, *sync],
            ready=recipe.tools.workers if sync else 0,
        )
        self._strays = Strays()
        self._told: set[tuple[str, str]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """In the recipe's order."""
        return tuple(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """For the chat template, in the recipe's order."""
        return [dict(tool.schema) for tool in self._tools.values()]

    @property
    def pool(self) -> workers.Pool:
        """The workers of the sync tools."""
        return self._pool

    @property
    def num_strays(self) -> int:
        """Async calls that run, those past their time included."""
        return len(self._strays)

    def signature(self, name: str) -> inspect.Signature:
        """What the tool takes."""
        return self._tools[name].signature

    async def start(self) -> None:
        """Start the workers. Raises UserError for a function that cannot be imported there."""
        try:
            await self._pool.start()
        except workers.LoadFailed as error:
            raise UserError(
                f"tools.functions: importing them in a worker process failed: {error}"
            ) from error

    async def close(self) -> None:
        """End the workers, with the calls in them."""
        await self._pool.close()

    def session(self) -> "Session":
        """For the calls of one turn."""
        return Session(self)

    def _failed(self, name: str, error: workers.CallRaised) -> ToolFailed:
        """What to tell the model; its user is shown the first traceback of each kind."""
        kind = (name, error.text.partition(":")[0])
        if kind not in self._told:
            self._told.add(kind)
            structlog.get_logger().warning(
                "a tool raised (told once for each kind)", tool=name, why=error.traceback_text
            )
        return ToolFailed(error.text)


class Session:
    """The calls of one turn, one at a time. Sync calls that follow each other run in the same
    worker process, so that the second finds what the first left there. `async with` gives the
    worker back.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._lease: workers.Lease | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the worker back to others; the next sync call takes another."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the tool of this name gives, as text. Raises ToolFailed, with `Type: message` of
        what it raised, or that it did not return in time.
        """
        tool = self._tools._tools[name]
        try:
            if tool.is_async:
                # Nobody keeps a worker while waiting for something else.
                self.close()
                return await self._awaited(tool, arguments)
            if self._lease is None or self._lease.ended:
                self._lease = await self._tools.pool.lease()
            text: str = await self._lease.call(
                tool_worker.CALL,
                {"reference": tool.reference, "arguments": dict(arguments)},
                timeout_s=self._tools._timeout_s,
            )
            return text
        except workers.CallRaised as error:
            raise self._tools._failed(name, error) from error
        except workers.WorkerError as error:
            raise ToolFailed(str(error)) from error

    async def _awaited(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        async def run() -> str:
            return as_text(await tool.call(**arguments))

        text: str = await awaited(
            run(), timeout_s=self._tools._timeout_s, strays=self._tools._strays
        )
        return text


class Methods(Protocol):
    """The part of an environment that calls need."""

    @property
    def methods(self) -> Collection[str]:
        """Names."""
        ...

    def signature(self, name: str) -> inspect.Signature:
        """What a method takes, without its instance."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What a method gives, as text. Raises ToolFailed or EnvironmentFailed."""
        ...


async def run_calls(
    calls: Sequence[ToolCall],
    *,
    tools: Tools | None,
    environment: Methods | None,
    finished: Callable[[CallResult], None],
) -> None:
    """Run a turn's calls strictly in order; `finished` is told each result as it is there, so that
    those before a cancellation are not lost.

    A block that is no call, an unknown name, arguments that do not fit and a call that fails are
    results whose text begins with `error: `; only the last of them was run. A method of the
    environment goes before a tool of its name. Raises EnvironmentFailed.
    """
    session = None if tools is None else tools.session()
    try:
        for call in calls:
            finished(await _run(call, tools=tools, environment=environment, session=session))
    finally:
        if session is not None:
            session.close()


async def _run(
    call: ToolCall, *, tools: Tools | None, environment: Methods | None, session: Session | None
) -> CallResult:
    begin_s = time.monotonic()
    by_environment = environment is not None and call.name in environment.methods
    declared = by_environment or (tools is not None and call.name in tools.names)

    def result(text: str, *, failed: bool) -> CallResult:
        return CallResult(
            call=call,
            text=f"error: {text}" if failed else text,
            failed=failed,
            declared=declared,
            by_environment=by_environment,
            begin_s=begin_s,
            end_s=time.monotonic(),
        )

    if call.mistake is not None:
        return result(call.mistake, failed=True)
    assert call.name is not None
    assert call.arguments is not None
    if not declared:
        known = [*(environment.methods if environment else ()), *(tools.names if tools else ())]
        there_are = f"there are {', '.join(known)}" if known else "there are none"
        return result(f"there is no tool {call.name}; {there_are}", failed=True)
    try:
        if by_environment:
            assert environment is not None
            mistake = validate(call, environment.signature(call.name))
            if mistake is not None:
                return result(mistake, failed=True)
            if session is not None:
                session.close()
            return result(await environment.call(call.name, call.arguments), failed=False)
        assert tools is not None
        assert session is not None
        mistake = validate(call, tools.signature(call.name))
        if mistake is not None:
            return result(mistake, failed=True)
        return result(await session.call(call.name, call.arguments), failed=False)
    except ToolFailed as error:
        return result(str(error), failed=True)
