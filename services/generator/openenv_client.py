"""Environments on a server that speaks the OpenEnv protocol (PyPI `openenv`, seen: 0.10).

The protocol, as far as it is spoken here:

- `GET /schema`: `action` is the JSON schema of what a step takes. Where it is MCP's (`tool_name`
  and `arguments`), or has no fields at all, `POST /mcp` with the JSON-RPC method `tools/list` names
  the tools, and a step is `{"type": "call_tool", "tool_name": ..., "arguments": {...}}`. Any other
  action is one tool, `step`, whose arguments are the action's fields.
- `/ws`, a WebSocket: a session with an environment of its own for as long as it is open. Requests
  are `{"type": "reset" | "step" | "state", "data": {...}}`, answers `{"type": "observation",
  "data": {"observation": {...}, "reward": number or null, "done": bool}}` or `{"type": "error",
  "data": {"code": ..., "message": ...}}`. After `{"type": "close"}` the server ends the session,
  then the connection. A server that has all its sessions in use answers CAPACITY_REACHED.
- A reward is "the reward signal from the last action"; an episode's is the last one that a step
  gave, as in the package's own harness, or their sum with `reward = "sum"`.

The package's own client is not used: importing it imports gradio (12 s) and fastmcp, which needs
mcp < 2 where vLLM needs mcp >= 2; and it opens a new session in the middle of an episode, without a
word, where the server has closed the old one.
"""

import asyncio
import contextlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import Field
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.protocol import State

from services.common.section import Section
from services.common.worker_process import plain
from services.generator.environment_hosts import CLOSE_TIMEOUT_S
from services.generator.tool_text import as_text
from services.generator.types import EnvironmentFailed, ToolFailed

ASK_AGAIN_S = 0.2
"""Between two tries of a server that does not answer or has no session free; grows to ten times
that."""

MAX_ANSWER_BYTES = 64 << 20
"""Of one message from the server."""

NO_SESSION = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
"""Codes of errors after which there is no session."""

STARTING = (502, 503, 504)
"""HTTP statuses of a server that is not up yet, said by what stands before it."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Hosts that no proxy is asked for."""

T = TypeVar("T")


class OpenEnvServer(Section):
    """`params` of an environment "openenv"."""

    url: Annotated[str, Field(pattern=r"^https?://[^/]")]
    """The server's address: "http://host:8000"."""
    reward: Literal["last", "sum"] = "last"
    """An episode's reward: the last one that a step gave, or the sum of all."""
    observation: str | None = None
    """The field of observations that the model is told; without it all of them, as JSON."""

    @property
    def base(self) -> str:
        """The address without a slash at its end."""
        return self.url.rstrip("/")

    @property
    def is_local(self) -> bool:
        """It is on this machine."""
        return urlsplit(self.url).hostname in LOOPBACK


@dataclass(frozen=True)
class RemoteTool:
    """What the model can call on a server."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates take tools."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

    @property
    def signature(self) -> inspect.Signature:
        """Its arguments; any where the schema allows others, or names that Python does not."""
        fields = self.parameters.get("properties", {})
        required = self.parameters.get("required", ())
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if name in required else field.get("default"),
            )
            for name, field in fields.items()
            if name.isidentifier()
        ]
        if len(parameters) < len(fields) or self.parameters.get("additionalProperties"):
            parameters.append(inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD))
        return inspect.Signature(parameters)


@dataclass(frozen=True)
class Remote:
    """What a server offers."""

    tools: tuple[RemoteTool, ...]
    by_mcp: bool
    """They are MCP tools; else there is one, `step`, whose arguments are the action."""


async def describe(server: OpenEnvServer, *, timeout_s: float) -> Remote:
    """Ask a server what it offers, for up to `timeout_s` where it does not answer yet.

    Raises EnvironmentFailed.
    """

    async def ask() -> Remote:
        async with httpx.AsyncClient(trust_env=not server.is_local, timeout=timeout_s) as client:
            try:
                return await _describe(server, client)
            except httpx.TransportError as error:
                raise _NotYet(f"{type(error).__name__}: {error}") from error
            except httpx.HTTPStatusError as error:
                if error.response.status_code in STARTING:
                    raise _NotYet(str(error)) from error
                raise EnvironmentFailed(f"{server.base} is no OpenEnv server: {error}") from error
            except (httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as error:
                raise EnvironmentFailed(
                    f"{server.base} is no OpenEnv server as of version 0.10: "
                    f"{type(error).__name__}: {error}"
                ) from error

    return await _patiently(ask, timeout_s=timeout_s, what=server.base)


async def _describe(server: OpenEnvServer, client: httpx.AsyncClient) -> Remote:
    answer = await client.get(f"{server.base}/schema")
    action = answer.raise_for_status().json()["action"]
    fields = {k: v for k, v in action.get("properties", {}).items() if k != "metadata"}
    if set(fields) <= {"type"} or set(fields) == {"type", "tool_name", "arguments"}:
        question = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = await client.post(f"{server.base}/mcp", json=question)
        listed = answer.raise_for_status().json()
        if "error" not in listed or set(fields) == {"type", "tool_name", "arguments"}:
            return Remote(tuple(_mcp_tool(tool) for tool in listed["result"]["tools"]), by_mcp=True)
    kept = {name: value for name, value in action.items() if name in ("$defs", "required")}
    parameters = {"type": "object", "properties": _without_titles(fields), **kept}
    description = str(action.get("description", "")).partition("\n\n")[0]
    return Remote(
        (RemoteTool("step", description or "Act in the environment.", parameters),), by_mcp=False
    )


def _mcp_tool(tool: Mapping[str, Any]) -> RemoteTool:
    # One name in MCP itself, the other in OpenEnv's own model of a tool.
    parameters = dict(tool.get("inputSchema") or tool.get("input_schema") or {"type": "object"})
    parameters["properties"] = _without_titles(parameters.get("properties", {}))
    return RemoteTool(str(tool["name"]), str(tool.get("description") or ""), parameters)


def _without_titles(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Titles that repeat the names cost tokens of every prompt."""
    return {
        name: {key: value for key, value in field.items() if key != "title"}
        for name, field in fields.items()
    }


class _NotYet(Exception):
    """The server does not answer, or not with a session: worth another try."""


class _Refused(Exception):
    """The server answered with an error."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code", "UNKNOWN"))
        wrong = [
            f"{'.'.join(str(part) for part in error.get('loc', ()))}: {error.get('msg')}"
            for error in data.get("errors", ())
        ]
        super().__init__("; ".join([str(data.get("message", self.code)), *wrong]))


class Session:
    """An instance on a server: an open WebSocket; what Host promises."""

    def __init__(
        self, name: str, server: OpenEnvServer, remote: Remote, *, timeout_s: float
    ) -> None:
        self.done = False
        self._name, self._server, self._remote, self._timeout_s = name, server, remote, timeout_s
        self._socket: ClientConnection | None = None
        self._rewards: list[float] = []

    @classmethod
    async def open(
        cls, name: str, server: OpenEnvServer, remote: Remote, *, timeout_s: float
    ) -> Self:
        """A new session, waited for up to `timeout_s` where the server is away or has none free.

        Raises EnvironmentFailed; no session stays behind then, nor when it is cancelled.
        """
        session = cls(name, server, remote, timeout_s=timeout_s)

        async def connect() -> None:
            try:
                await session._connect()
            except BaseException:
                await session.close()
                raise

        await _patiently(connect, timeout_s=timeout_s, what=f"environment {name}: {server.base}")
        return session

    @property
    def usable(self) -> bool:
        """The connection is open."""
        return self._socket is not None and self._socket.state is State.OPEN

    async def reset(self, arguments: Mapping[str, Any]) -> str | None:
        """Begin an episode with the row's columns; the observation, None where it is empty."""
        self._rewards.clear()
        try:
            data = await self._ask({"type": "reset", "data": dict(arguments)})
        except _Refused as error:
            raise self._failed("reset", error) from error
        self.done = bool(data.get("done"))
        observation = self._observed(data)
        return as_text(observation) if observation else None

    async def call(self, method: str, arguments: Mapping[str, Any]) -> str:
        """One step. Raises ToolFailed for an action that the server refuses or fails at."""
        action = dict(arguments)
        if self._remote.by_mcp:
            action = {"type": "call_tool", "tool_name": method, "arguments": action}
        try:
            data = await self._ask({"type": "step", "data": action})
        except _Refused as error:
            if error.code in NO_SESSION:
                raise self._failed(method, error) from error
            raise ToolFailed(str(error)) from error
        self.done = bool(data.get("done"))
        reward = data.get("reward")
        if isinstance(reward, int | float):
            self._rewards.append(float(reward))
        elif reward is not None:
            raise self._failed(method, f"the reward is {reward!r}, no number")
        if self._remote.by_mcp:
            return _mcp_text(data.get("observation"))
        observation = self._observed(data)
        return as_text(observation) if observation else ""

    async def get_reward(self) -> float | None:
        """Of the episode; None where no step gave one."""
        if not self._rewards:
            return None
        return self._rewards[-1] if self._server.reward == "last" else sum(self._rewards)

    async def close(self) -> None:
        """End the session: when it returns the server has it no longer, unless it did not answer
        in time."""
        if self._socket is None:
            return
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._socket.send('{"type": "close"}')
                await self._socket.wait_closed()
        self._socket.transport.abort()
        self._socket = None

    async def _connect(self) -> None:
        url = "ws" + self._server.base.removeprefix("http") + "/ws"
        try:
            self._socket = await connect(
                url,
                open_timeout=self._timeout_s,
                close_timeout=CLOSE_TIMEOUT_S,
                max_size=MAX_ANSWER_BYTES,
                proxy=None if self._server.is_local else True,
            )
        except (OSError, InvalidHandshake) as error:
            raise _NotYet(f"{type(error).__name__}: {error}") from error
        try:
            # The server accepts first and looks for a session then.
            await self._ask({"type": "state"})
        except _Refused as error:
            if error.code == "CAPACITY_REACHED":
                raise _NotYet(
                    f"{error}; raise max_concurrent_envs of the server, or lower "
                    "generator.max_inflight"
                ) from error
            if error.code in NO_SESSION:
                raise self._failed("a new session", error) from error
            # An environment may have no state to tell before its first reset: it is there.

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """One request, one answer. Raises _Refused and EnvironmentFailed."""
        assert self._socket is not None
        what = str(message["type"])
        try:
            async with asyncio.timeout(self._timeout_s):
                # A refused connection may be closed before we have asked; it says why all the same.
                with contextlib.suppress(ConnectionClosed):
                    await self._socket.send(json.dumps(message, default=plain))
                answer = json.loads(await self._socket.recv())
            kind, data = answer["type"], dict(answer["data"])
        except TimeoutError:
            raise self._failed(what, f"no answer within {self._timeout_s:g} s") from None
        except ConnectionClosed as error:
            raise self._failed(what, f"the connection is closed: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._failed(what, f"not understood: {type(error).__name__}: {error}") from error
        if kind == "error":
            raise _Refused(data)
        return data

    def _observed(self, data: Mapping[str, Any]) -> Any:
        """What the model is to see of an answer."""
        observation = dict(data.get("observation") or {})
        observation.pop("metadata", None)
        field = self._server.observation
        if field is None:
            return observation
        if field not in observation:
            raise self._failed(
                "observation",
                f"there is no field {field}, only {', '.join(observation) or '(none)'}",
            )
        return observation[field]

    def _failed(self, what: str, why: object) -> EnvironmentFailed:
        return EnvironmentFailed(f"environment {self._name}: {self._server.base}: {what}: {why}")


def _mcp_text(observation: Any) -> str:
    """What a tool said, as MCP has it: the texts of its content. Raises ToolFailed."""
    if not isinstance(observation, dict):
        return as_text(observation)
    if observation.get("error"):
        error = observation["error"]
        raise ToolFailed(str(error.get("message", error) if isinstance(error, dict) else error))
    result = observation.get("result")
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return as_text(result)
    parts = [part for part in result["content"] if isinstance(part, dict)]
    text = "\n".join(str(part["text"]) for part in parts if "text" in part)
    if result.get("is_error"):
        raise ToolFailed(text)
    return text


async def _patiently(ask: Callable[[], Awaitable[T]], *, timeout_s: float, what: str) -> T:
    """What `ask` gives, asked again while it raises _NotYet, for up to `timeout_s`. Raises
    EnvironmentFailed after that."""
    tries = AsyncRetrying(
        stop=stop_after_delay(timeout_s),
        wait=wait_random_exponential(multiplier=ASK_AGAIN_S, max=10 * ASK_AGAIN_S),
        retry=retry_if_exception_type(_NotYet),
        reraise=True,
    )
    try:
        return await tries(ask)
    except _NotYet as error:
        raise EnvironmentFailed(f"{what}: {error}") from error
