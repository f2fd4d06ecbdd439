import asyncio
import inspect
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import UserError
from services.generator.parsing import Hermes
from services.generator.tools import Tools, run_calls
from services.generator.types import CallResult, EnvironmentFailed, ToolCall, ToolFailed
from tests.services.generator.fakes import recipe_of
from tests.waiting import until

HERE = "tests.services.generator.tool_functions"


def tools_of(*names: str, inflight: int = 8, workers: int = 1, timeout_s: float = 60.0) -> Tools:
    return Tools(
        recipe_of(
            tools={
                "functions": [f"{HERE}:{name}" for name in names],
                "workers": workers,
                "timeout_s": timeout_s,
            },
            generator={"max_inflight": inflight},
        )
    )


@asynccontextmanager
async def started(*names: str, **settings: Any) -> AsyncIterator[Tools]:
    tools = tools_of(*names, **settings)
    await tools.start()
    try:
        yield tools
    finally:
        await tools.close()


def block(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def asked(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(text=f"{name}({json.dumps(arguments)})", name=name, arguments=arguments)


async def results_of(
    calls: Sequence[ToolCall], tools: Tools | None, environment: Any = None
) -> list[CallResult]:
    results: list[CallResult] = []
    await run_calls(calls, tools=tools, environment=environment, finished=results.append)
    return results


async def test_broken_calls_are_told_and_the_good_ones_run() -> None:
    """C41."""
    async with started("add", "nothing") as tools:
        bad = ['{"a": 1,', "[1, 2]", '"x"', "null", '{"a": 1, "zz": 2}']
        text = "\n".join(block("add", arguments) for arguments in [*bad, '{"a": 1, "b": 2}'])
        results = await results_of(Hermes().parse(text).calls, tools)
        assert len(results) == 6
        assert [result.failed for result in results] == [True] * 5 + [False]
        assert [result.text for result in results] == [
            "error: the call is not valid JSON: Expecting property name enclosed in double quotes",
            "error: arguments must be a JSON object",
            "error: arguments are not valid JSON: Expecting value",
            "error: a is missing (the arguments are a, b)",
            "error: there is no argument zz (the arguments are a, b)",
            "3",
        ]
        assert all(result.declared for result in results)
        calls = Hermes().parse(block("nothing", "null") + block("nothing", "{}")).calls
        assert [r.text for r in await results_of(calls, tools)] == ["null", "null"]


async def test_what_a_tool_returns_or_raises_becomes_text() -> None:
    """C41."""
    async with started("raises", "nothing", "table", "raw", "raises_at_length") as tools:
        calls = [
            asked("raises", why="no such thing"),
            *(asked(name) for name in ("nothing", "table", "raw", "raises_at_length")),
        ]
        results = await results_of(calls, tools)
        assert [(result.text, result.failed) for result in results] == [
            ("error: KeyError: 'no such thing'", True),
            ("null", False),
            ('{"é": [1, 2.5, null]}', False),
            ("a\ufffd", False),
            ("error: ValueError: first\nsecond", True),
        ]
        assert tools.pool.alive == 1


async def test_a_name_that_nobody_declared_is_told_apart() -> None:
    async with started("add", "nothing") as tools:
        (result,) = await results_of([asked("subtract", a=1)], tools)
    assert (result.failed, result.declared) == (True, False)
    assert result.text == "error: there is no tool subtract; there are add, nothing"
    (result,) = await results_of([asked("subtract", a=1)], None)
    assert result.text == "error: there is no tool subtract; there are none"


async def test_calls_of_a_turn_run_in_order_and_see_what_the_last_one_left() -> None:
    """C43: also what it left in a global of its module."""
    async with started("keep", "kept", "pid", "async_add", workers=3) as tools:
        # Another turn holds the worker that would be next.
        async with tools.session() as other:
            others_pid = await other.call("pid", {})
            results = await results_of([asked("keep", text="a"), asked("kept")], tools)
            assert results[1].text == "a"
            assert results[0].text != others_pid
            assert results[0].end_s <= results[1].begin_s
        assert tools.pool.alive == tools.pool.idle == 3


async def test_no_worker_is_kept_during_an_async_call() -> None:
    async with started("pid", "async_add") as tools, tools.session() as session:
        await session.call("pid", {})
        assert tools.pool.idle == 0
        assert await session.call("async_add", {"a": 1, "b": 2}) == "3"
        assert tools.pool.idle == 1


async def test_a_slow_tool_delays_no_other_conversation(tmp_path: Path) -> None:
    """C43: one of eight sleeps in a sync tool, one in an async one."""
    async with started("wait_for", "add", "async_sleep") as tools:
        go = tmp_path / "go"
        slow = asyncio.create_task(results_of([asked("wait_for", path=str(go))], tools))
        slow_async = asyncio.create_task(results_of([asked("async_sleep", seconds=60)], tools))
        others = await asyncio.gather(
            *(results_of([asked("add", a=n), asked("add", a=n, b=1)], tools) for n in range(6))
        )
        assert [[r.text for r in results] for results in others] == [
            [str(n), str(n + 1)] for n in range(6)
        ]
        assert not slow.done()
        assert not slow_async.done()
        slow_async.cancel()
        go.touch()
        assert [result.text for result in await slow] == ["there"]
        await until(lambda: tools.num_strays == 0)
        assert tools.pool.alive == tools.pool.idle


async def test_the_event_loop_is_never_blocked() -> None:
    async with started("sleep", "endless", timeout_s=1.5) as tools:
        longest_s = 0.0

        async def watch() -> None:
            nonlocal longest_s
            while True:
                begin_s = time.monotonic()
                await asyncio.sleep(0.01)
                longest_s = max(longest_s, time.monotonic() - begin_s)

        watcher = asyncio.create_task(watch())
        await asyncio.gather(
            results_of([asked("sleep", seconds=1.2)], tools),
            results_of([asked("endless")], tools),
        )
        watcher.cancel()
        # A loaded machine may be slow, but nothing here may wait for a call.
        assert longest_s < 1.0


async def test_endless_calls_are_cut_and_the_tools_still_serve() -> None:
    """C43."""
    threads = threading.active_count()
    async with started("endless", "add", inflight=4, timeout_s=0.05) as tools:
        results = await asyncio.gather(*(results_of([asked("endless")], tools) for _ in range(30)))
        assert {result.text for (result,) in results} == {"error: did not return within 0.05 s"}
        assert all(result.failed and result.declared for (result,) in results)
    async with started("endless", "add", "dies", inflight=2, timeout_s=1.0) as tools:
        # The rest of a turn goes on in another process.
        ended, died, served = await results_of(
            [asked("endless"), asked("dies"), asked("add", a=1)], tools
        )
        assert ended.text == "error: did not return within 1 s"
        assert died.text == "error: its process ended with status 3"
        assert served.text == "1"
        assert tools.pool.alive == tools.pool.idle == 1
    # One waits for each process that is alive.
    await until(lambda: threading.active_count() <= threads)


async def test_an_async_tool_is_cut_even_where_it_ignores_it(tmp_path: Path) -> None:
    async with started(
        "async_stubborn", "async_leaves", "async_cancels_itself", "async_add"
    ) as tools:
        tools._timeout_s = 0.05
        go = tmp_path / "go"
        results = await results_of(
            [
                asked("async_stubborn", path=str(go)),
                asked("async_leaves"),
                asked("async_cancels_itself"),
                asked("async_add", a=1, b=2),
            ],
            tools,
        )
        assert [result.text for result in results] == [
            "error: did not return within 0.05 s",
            "error: RuntimeError: SystemExit: 4",
            "error: CancelledError: it cancelled itself",
            "3",
        ]
        assert tools.num_strays == 1
        go.touch()
        await until(lambda: tools.num_strays == 0)


async def test_results_before_a_cancellation_are_kept_and_its_worker_is_not() -> None:
    async with started("add", "endless") as tools:
        results: list[CallResult] = []
        turn = asyncio.create_task(
            run_calls(
                [asked("add", a=1), asked("endless"), asked("add", a=2)],
                tools=tools,
                environment=None,
                finished=results.append,
            )
        )
        await until(lambda: results)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert [result.text for result in results] == ["1"]
        assert tools.pool.alive == 0
        assert [r.text for r in await results_of([asked("add", a=3)], tools)] == ["3"]


async def test_the_user_is_shown_the_first_traceback_of_a_kind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with started("raises", "raises_at_length") as tools:
        await results_of([asked("raises", why="a"), asked("raises", why="b")], tools)
        await results_of([asked("raises_at_length")], tools)
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("raise KeyError(why)") == 1
    assert (shown.out + shown.err).count("raise ValueError(") == 1


class Counter:
    """An environment as calls see it."""

    def __init__(self, tools: Tools) -> None:
        self.count, self._tools, self.idle = 0, tools, -1

    @property
    def methods(self) -> Collection[str]:
        return ("step", "broken", "raises")

    def signature(self, name: str) -> inspect.Signature:
        return inspect.signature(getattr(self, name))

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        self.idle = self._tools.pool.idle
        text: str = getattr(self, name)(**arguments)
        return text

    def step(self, by: int) -> str:
        self.count += by
        return str(self.count)

    def raises(self) -> str:
        raise ToolFailed("ValueError: not now")

    def broken(self) -> str:
        raise EnvironmentFailed("it is gone")


async def test_methods_of_an_environment_are_called_among_tools() -> None:
    async with started("add") as tools:
        environment = Counter(tools)
        calls = [
            asked("step", by=2),
            asked("add", a=1),
            asked("step", by=3),
            asked("step"),
            asked("raises"),
            asked("other"),
        ]
        results = await results_of(calls, tools, environment)
        assert [(r.text, r.by_environment, r.failed) for r in results] == [
            ("2", True, False),
            ("1", False, False),
            ("5", True, False),
            ("error: by is missing (the arguments are by)", True, True),
            ("error: ValueError: not now", True, True),
            ("error: there is no tool other; there are step, broken, raises, add", False, True),
        ]
        # No worker of the tools is kept meanwhile.
        assert environment.idle == 1
        told: list[CallResult] = []
        with pytest.raises(EnvironmentFailed, match="it is gone"):
            await run_calls(
                [asked("add", a=1), asked("broken"), asked("add", a=2)],
                tools=tools,
                environment=environment,
                finished=told.append,
            )
        assert [result.text for result in told] == ["1"]
        assert tools.pool.idle == 1


async def test_only_sync_tools_need_processes() -> None:
    async with started("async_add") as tools:
        assert [r.text for r in await results_of([asked("async_add", a=1, b=2)], tools)] == ["3"]
        assert tools.pool.alive == 0


def test_names_and_schemas_are_in_the_order_of_the_recipe() -> None:
    tools = tools_of("nothing", "add")
    assert tools.names == ("nothing", "add")
    assert [schema["function"]["name"] for schema in tools.schemas] == ["nothing", "add"]
    assert list(tools.signature("add").parameters) == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["add", "undocumented"], r"tools\.functions\[1\]: undocumented cannot be described"),
        (["ad"], r"tools\.functions\[0\]: .* did you mean add\?"),
        (["add", "Elsewhere.add"], r"tools\.functions\[1\]: there are two functions called add"),
    ],
)
def test_a_function_that_cannot_be_used_is_told(names: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        tools_of(*names)


async def test_a_module_that_workers_cannot_import_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "only_here.py"
    module.write_text(
        f"import os\nassert os.getpid() == {os.getpid()}\n"
        "def now() -> int:\n    '''Now.'''\n    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tools = Tools(recipe_of(tools={"functions": ["only_here:now"]}))
    with pytest.raises(UserError, match=r"tools\.functions: .*AssertionError"):
        await tools.start()
