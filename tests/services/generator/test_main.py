"""The generator as a process: `python -m services.generator`, as long as there is no trainer."""

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import psutil
import pytest
from headrace.v1 import generator_pb2, generator_pb2_grpc, status_pb2, status_pb2_grpc

from tests.chaos.world import make_model
from tests.conftest import free_port
from tests.processes import service
from tests.services.generator.trainers import trainer
from tests.waiting import PATIENCE_S, until

RECIPE = """
run = "generator-test"
[data.reasoning_gym]
task = "chain_sum"
[trainer]
max_steps = 1
"""


def arguments(folder: Path, *overrides: str) -> list[str]:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    sets = [part for override in overrides for part in ("--set", override)]
    return [sys.executable, "-m", "services.generator", str(recipe), "--replica", "0", *sets]


def generator(folder: Path, *overrides: str) -> AbstractContextManager["subprocess.Popen[bytes]"]:
    """The process; its log is in `folder/log`, its ports in `folder/ports`."""
    return service(arguments(folder, *overrides), folder)


@pytest.mark.slow
async def test_it_says_what_it_waits_for_and_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    trainer = f"127.0.0.1:{free_port()}"
    nobody = f"127.0.0.1:{free_port()}"
    with generator(
        tmp_path, f"network.trainer={trainer}", f"network.aggregator={nobody}"
    ) as process:
        await until(lambda: (tmp_path / "ports").exists() or process.poll() is not None)
        ports = json.loads((tmp_path / "ports").read_text())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
            ask = status_pb2_grpc.StatusServiceStub(channel).GetStatus
            status = await ask(status_pb2.GetStatusRequest(), timeout=PATIENCE_S)
            assert (status.producer, status.ready) == ("generator-0", False)
            assert status.phase == f"waiting for the trainer at {trainer}"
            generate = generator_pb2_grpc.GeneratorServiceStub(channel).Generate
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await generate(generator_pb2.GenerateRequest(), timeout=PATIENCE_S)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert error.value.details() == f"not ready: waiting for the trainer at {trainer}"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
async def test_a_stop_while_the_engine_starts_ends_it_at_once(tmp_path: Path) -> None:
    """The threads in which it is imported and started cannot be stopped; nobody waits for them."""
    make_model(tmp_path / "model")
    async with trainer(tmp_path) as served:
        command = arguments(tmp_path, f"network.trainer=127.0.0.1:{served.port}")
        command[command.index("services.generator")] = "tests.services.generator.slow_start"
        with service(command, tmp_path) as process:
            its = psutil.Process(process.pid)
            await until(lambda: _sleeping(its) or process.poll() is not None)
            children = its.children(recursive=True)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
            gone, alive = await asyncio.to_thread(psutil.wait_procs, children, PATIENCE_S)
    assert gone
    assert not alive
    assert '"phase": "starting the engine"' in (tmp_path / "log").read_text()


def _sleeping(process: psutil.Process) -> bool:
    """Whether the engine's own process has come up."""
    return any("spawn_main" in " ".join(each.cmdline()) for each in process.children())


def test_the_command_line_imports_no_engine() -> None:
    """`headrace --help` and a mistake in a recipe are answered at once."""
    code = (
        "import sys; from services.launcher import cli; "
        "print({'vllm', 'torch', 'services.generator.service'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"
