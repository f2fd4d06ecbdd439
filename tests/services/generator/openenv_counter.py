"""An OpenEnv server with MCP tools, for `uvicorn`: each session has a counter of its own, and an
episode is over at 5. At most 3 sessions. Needs the packages of requirements/openenv.txt."""

import os
import time
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Counter(MCPEnvironment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("counter")
        self.value = 0

        @server.tool  # type: ignore[untyped-decorator]
        def add(amount: int, times: int = 1) -> int:
            """Add to the counter."""
            self.value += amount * times
            return self.value

        @server.tool  # type: ignore[untyped-decorator]
        def fail() -> str:
            """Always fails."""
            raise ValueError("no such luck")

        @server.tool  # type: ignore[untyped-decorator]
        def hang() -> None:
            """Never returns in time."""
            time.sleep(600)

        @server.tool  # type: ignore[untyped-decorator]
        def die() -> None:
            """Ends the server."""
            os._exit(9)

        super().__init__(server)

    def reset(self, start: int = 0, **_: Any) -> Observation:
        if start < 0:
            raise ValueError(f"cannot start at {start}")
        self.value = start
        return Observation(metadata={"not": "for the model"})

    async def step_async(self, action: Any, **more: Any) -> Any:
        observation = await super().step_async(action, **more)
        observation.reward, observation.done = self.value / 10, self.value >= 5
        return observation

    def _step_impl(self, action: Any, **_: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State(step_count=self.value)


app = create_app(Counter, CallToolAction, CallToolObservation, max_concurrent_envs=3)
