"""Against servers of the package openenv itself: its template, and one with MCP tools."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import UserError
from services.generator import openenv_client
from services.generator.environments import EnvironmentKind, Environments, Instance
from services.generator.types import EnvironmentFailed, ToolFailed
from tests.conftest import free_port
from tests.services.generator.fakes import recipe_of
from tests.waiting import PATIENCE_S

PACKAGES = Path(sys.prefix) / "openenv"
"""Where `make` puts the packages of requirements/openenv.txt."""

ROOT = Path(__file__).parents[3]

with_package = pytest.mark.skipif(
    not PACKAGES.exists(), reason=f"no {PACKAGES}: make puts the package openenv there"
)


def environ(*paths: Path) -> dict[str, str]:
    path = os.pathsep.join(str(path) for path in (PACKAGES, *paths))
    return os.environ | {"PYTHONPATH": path, "ENABLE_WEB_INTERFACE": "false"}


@contextmanager
def serving(app: str, folder: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A server of `module:app`; its address at once, it may not answer yet."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", str(port)]
    with (folder / f"log.{port}").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environ(folder, ROOT), stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The package's template environment, generated and served: an echo, one session."""
    folder = tmp_path_factory.mktemp("template")
    command = [sys.executable, "-m", "openenv.cli", "init", "my_env", "--output-dir", str(folder)]
    subprocess.run(command, env=environ(), check=True, stdout=subprocess.DEVNULL)
    with serving("my_env.server.app:app", folder) as (url, _):
        yield url


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("counter")
    with serving("tests.services.generator.openenv_counter:app", folder) as (url, _):
        yield url


def environments_of(
    url: str, *, timeout_s: float = PATIENCE_S, taken: tuple[str, ...] = (), **params: Any
) -> Environments:
    classes = [{"environment": "openenv", "params": {"url": url, **params}}]
    recipe = recipe_of(environments={"classes": classes, "timeout_s": timeout_s})
    return Environments(recipe, taken=taken)


@asynccontextmanager
async def running(url: str, **more: Any) -> AsyncIterator[tuple[Environments, EnvironmentKind]]:
    environments = environments_of(url, **more)
    try:
        await environments.start()
        kind = environments.choose({})
        assert kind is not None
        yield environments, kind
    finally:
        await environments.close()
    assert environments.live == environments.idle == 0


@asynccontextmanager
async def session(
    environments: Environments, kind: EnvironmentKind, **row: Any
) -> AsyncIterator[Instance]:
    instance = await environments.acquire(kind)
    try:
        await instance.reset(row)
        yield instance
    finally:
        await instance.finish()


@with_package
async def test_an_episode_in_the_template_environment(template: str) -> None:
    async with running(template, taken=("add",)) as (environments, kind):
        assert (kind.name, kind.methods, kind.has_reward) == ("openenv", ("step",), True)
        assert kind.schemas[0]["function"] == {
            "name": "step",
            "description": "Action for the My Env environment - just a message to echo.",
            "parameters": {
                "type": "object",
                "properties": {
                    "message": {"type": "string", "description": "Message to echo back"}
                },
                "required": ["message"],
            },
        }
        assert str(kind.signature("step")) == "(*, message)"
        instance = await environments.acquire(kind)
        observation = await instance.reset({"prompt": "Say something", "answer": 3})
        assert observation == '{"echoed_message": "My Env environment ready!", "message_length": 0}'
        # The reward that a reset gives is of no action.
        assert await instance.get_reward() is None
        said = await instance.call("step", {"message": "hello"})
        assert said == '{"echoed_message": "hello", "message_length": 5}'
        assert not instance.done
        assert await instance.get_reward() == 0.5
        with pytest.raises(ToolFailed, match="Invalid message; message: Input should be a valid"):
            await instance.call("step", {"message": 1})
        await instance.call("step", {"message": "you"})
        assert await instance.get_reward() == pytest.approx(0.3)
        assert not instance.broken
        await instance.finish()
        assert (environments.live, environments.idle) == (0, 0)


@with_package
async def test_the_sum_of_rewards_and_one_field_of_observations(template: str) -> None:
    async with running(template, reward="sum", observation="echoed_message") as (all_of, kind):
        instance = await all_of.acquire(kind)
        assert await instance.reset({}) == "My Env environment ready!"
        assert await instance.call("step", {"message": "hello"}) == "hello"
        assert await instance.call("step", {"message": "you"}) == "you"
        assert await instance.get_reward() == pytest.approx(0.8)
        await instance.finish()
    async with running(template, observation="board") as (all_of, kind):
        with pytest.raises(
            EnvironmentFailed, match="there is no field board, only echoed_message, message_length"
        ):
            async with session(all_of, kind):
                pass


@with_package
async def test_a_conversation_waits_while_the_server_has_no_session_free(template: str) -> None:
    async with running(template) as (environments, kind):

        async def converse(number: int) -> str:
            async with session(environments, kind) as instance:
                return await instance.call("step", {"message": f"I am {number}"})

        texts = await asyncio.gather(*(converse(number) for number in range(3)))
        assert [f"I am {number}" in text for number, text in enumerate(texts)] == [True] * 3
    async with running(template, timeout_s=1.0) as (environments, kind):
        async with session(environments, kind):
            with pytest.raises(EnvironmentFailed, match=r"at capacity.*raise max_concurrent_envs"):
                await environments.acquire(kind)
        async with session(environments, kind):
            assert environments.live == 1


@with_package
async def test_mcp_tools_are_listed_and_called(counter: str) -> None:
    async with running(counter) as (environments, kind):
        assert kind.methods == ("add", "fail", "hang", "die")
        assert kind.schemas[0]["function"] == {
            "name": "add",
            "description": "Add to the counter.",
            "parameters": {
                "type": "object",
                "properties": {
                    "amount": {"type": "integer"},
                    "times": {"type": "integer", "default": 1},
                },
                "required": ["amount"],
                "additionalProperties": False,
            },
        }
        assert str(kind.signature("add")) == "(*, amount, times=1)"
        async with (
            session(environments, kind, start=1) as one,
            session(environments, kind, start=2) as two,
        ):
            assert await one.call("add", {"amount": 1}) == "2"
            assert await two.call("add", {"amount": 1, "times": 2}) == "4"
            assert not two.done
            with pytest.raises(ToolFailed, match="Error calling tool 'fail': no such luck"):
                await two.call("fail", {})
            with pytest.raises(ToolFailed, match="amount"):
                await two.call("add", {"amount": "x"})
            assert await two.call("add", {"amount": 1}) == "5"
            assert (one.done, two.done) == (False, True)
            assert (await one.get_reward(), await two.get_reward()) == (0.2, 0.5)
        assert environments.live == 0
        instance = await environments.acquire(kind)
        assert await instance.reset({}) is None
        await instance.finish()
        with pytest.raises(EnvironmentFailed, match="reset: cannot start at -1"):
            async with session(environments, kind, start=-1):
                pass
        assert environments.live == 0


@with_package
async def test_a_tool_that_has_a_methods_name(counter: str) -> None:
    environments = environments_of(counter, taken=("add",))
    with pytest.raises(UserError, match=r"environments.classes\[0\]: .*method add has the name"):
        await environments.start()
    await environments.close()


@with_package
async def test_a_step_without_an_answer_ends_the_session(
    counter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv_client, "CLOSE_TIMEOUT_S", 0.5)
    async with running(counter) as (environments, kind):
        instance = await environments.acquire(kind)
        await instance.reset({})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await instance.call("hang", {})
        assert instance.broken
        await instance.finish()
        assert environments.live == 0


@with_package
async def test_a_server_that_dies_in_the_middle_of_an_episode(tmp_path: Path) -> None:
    with serving("tests.services.generator.openenv_counter:app", tmp_path) as (url, process):
        async with running(url) as (environments, kind):
            first, second = [await environments.acquire(kind) for _ in range(2)]
            for instance in (first, second):
                await instance.reset({})
            with pytest.raises(EnvironmentFailed, match="step: the connection is closed"):
                await first.call("die", {})
            process.wait()
            with pytest.raises(EnvironmentFailed, match="step: the connection is closed"):
                await second.call("add", {"amount": 1})
            assert first.broken
            assert second.broken
            for instance in (first, second):
                await instance.finish()
            assert environments.live == 0
        async with running_kind(environments_of(url, timeout_s=0.5), kind) as away:
            with pytest.raises(EnvironmentFailed, match=r"127.0.0.1:\d+: Connect"):
                await away.acquire(kind)


@with_package
async def test_a_server_that_stops_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv_client, "CLOSE_TIMEOUT_S", 0.5)
    with serving("tests.services.generator.openenv_counter:app", tmp_path) as (url, process):
        async with running(url) as (_, kind):
            pass
        async with running_kind(environments_of(url, timeout_s=1.0), kind) as environments:
            instance = await environments.acquire(kind)
            await instance.reset({})
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(EnvironmentFailed, match="step: no answer within 1 s"):
                await instance.call("add", {"amount": 1})
            await instance.finish()
            assert environments.live == 0


@asynccontextmanager
async def running_kind(
    environments: Environments, kind: EnvironmentKind
) -> AsyncIterator[Environments]:
    """Environments that are used without start(), which asks the server; `kind` has been asked."""
    try:
        yield environments
    finally:
        await environments.close()
    assert environments.live == 0


@pytest.mark.parametrize(
    ("params", "wrong"),
    [
        ({}, r"environments.classes\[0\].params.url: Field required"),
        ({"url": "host:8000"}, r"params.url: String should match"),
        ({"url": "http://h", "reward": "mean"}, r"params.reward: Input should be 'last' or 'sum'"),
        ({"url": "http://h", "port": 3}, r"params.port: Extra inputs are not permitted"),
    ],
)
def test_parameters_are_checked(params: dict[str, Any], wrong: str) -> None:
    classes = [{"environment": "openenv", "params": params}]
    with pytest.raises(UserError, match=wrong):
        Environments(recipe_of(environments={"classes": classes}))


async def test_a_server_that_is_away() -> None:
    environments = environments_of(f"http://127.0.0.1:{free_port()}", timeout_s=0.5)
    with pytest.raises(UserError, match=r"environments.classes\[0\].params.url: .*Connect"):
        await environments.start()
    await environments.close()


async def test_a_server_of_something_else() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1")
    async with server:
        port = server.sockets[0].getsockname()[1]
        environments = environments_of(f"http://127.0.0.1:{port}")
        with pytest.raises(UserError, match=r"is no OpenEnv server: .*404"):
            await environments.start()
        await environments.close()
