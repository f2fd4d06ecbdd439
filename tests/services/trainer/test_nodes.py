"""A trainer on two nodes, which are processes of one machine: lost, stopped, started again, to the
end of the run. Node 0 listens on 127.0.0.1, node 1 on 127.0.0.2."""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common import config
from services.common.background import guarded
from services.common.config import Recipe
from services.common.errors import STOPPED_STATUS
from tests.conftest import free_port
from tests.probes import is_healthy, status_of
from tests.services.trainer.folders import make_folder
from tests.services.trainer.test_killed import (
    ENDED,
    EPOCHS,
    PROMPTS,
    last_version,
    other_half,
    write_recipe,
)
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


PATIENCE_S = 180.0
"""For what two processes that import torch do on a busy machine."""


class Nodes:
    """Both nodes of a trainer, each with a log of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[asyncio.subprocess.Process] = []

    async def start(self, node: int, *sets: str) -> asyncio.subprocess.Process:
        """Start one; its log goes on."""
        address = ["--set", f"network.host=127.0.0.{node + 1}"]
        if node:
            address += ["--set", "network.grpc_port=0", "--node", str(node)]
        self.announced(node).unlink(missing_ok=True)
        with self._log(node).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.trainer", str(self._folder / "recipe.toml")),
                *(*address, "--announce", str(self.announced(node))),
                *(word for each in sets for word in ("--set", each)),
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._running.append(process)
        return process

    def announced(self, node: int) -> Path:
        return self._folder / f"ports-{node}.json"

    def said(self, node: int) -> str:
        return self._log(node).read_text()

    async def phase(self, node: int) -> str:
        host = f"127.0.0.{node + 1}"
        return (await status_of(self.announced(node), host=host)).phase

    async def until_phase(self, node: int, begin: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await until(self.announced(node).exists)
            while not (await self.phase(node)).startswith(begin):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        for process in self._running:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _log(self, node: int) -> Path:
        return self._folder / f"node-{node}.log"


@asynccontextmanager
async def two_nodes(folder: Path) -> AsyncIterator[Nodes]:
    nodes = Nodes(folder)
    try:
        yield nodes
    finally:
        await nodes.kill()


def write_recipe_of_nodes(folder: Path, url: str) -> Recipe:
    recipe = write_recipe(
        folder,
        make_folder(folder / "model"),
        url,
        trainer=free_port(),
        aggregator=free_port(),
        ranks=2,
    )
    tree = recipe.model_dump(exclude_none=True)
    tree["trainer"]["nodes"] = 2
    tree["network"]["ranks"] = f"127.0.0.1:{free_port()}"
    recipe = Recipe.model_validate(tree)
    (folder / "recipe.toml").write_text(config.dump_toml(recipe))
    return recipe


async def statuses(*processes: asyncio.subprocess.Process) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        return [await process.wait() for process in processes]


async def until_versions(recipe: Recipe, number: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while last_version(recipe) < number:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


async def test_two_nodes_end_together_and_go_on_from_the_checkpoint(
    valkey_url: str, tmp_path: Path
) -> None:
    recipe = write_recipe_of_nodes(tmp_path, valkey_url)

    async def course(nodes: Nodes) -> None:
        # Node 1 first; it is lost in the middle of a run.
        other = await nodes.start(1)
        await nodes.until_phase(1, "waiting for the trainer at 127.0.0.1:")
        assert await is_healthy(nodes.announced(1), "liveness", host="127.0.0.2")
        assert not await is_healthy(nodes.announced(1), host="127.0.0.2")
        trainer = await nodes.start(0)
        await until_versions(recipe, 3)
        assert await nodes.phase(1) == "hosting ranks 1"
        assert await is_healthy(nodes.announced(1), host="127.0.0.2")
        other.send_signal(signal.SIGKILL)
        assert await statuses(trainer, other) == [1, -signal.SIGKILL]

        # Node 0 first; node 1 is asked to stop, and the run ends in order.
        trainer, before = await nodes.start(0), last_version(recipe)
        await nodes.until_phase(0, "waiting for node 1 of 2")
        other = await nodes.start(1)
        await until_versions(recipe, before + 3)
        other.send_signal(signal.SIGTERM)
        assert await statuses(trainer, other) == [STOPPED_STATUS, STOPPED_STATUS]

        trainer, other = await nodes.start(0), await nodes.start(1)
        assert await statuses(trainer, other) == [0, 0]

    async with other_half(recipe) as (half, listener), two_nodes(tmp_path) as nodes:
        try:
            await guarded(course(nodes), half.watch(), half.generate(), half.score())
        except BaseException:
            print(nodes.said(0)[-4000:], nodes.said(1)[-4000:], sep="\n--- node 1\n")
            raise
        logs = [nodes.said(0), nodes.said(1)]

    assert "node 1 has hung up" in logs[0] or "rank 1 on node 1 ended" in logs[0]
    assert "a node is asked to stop" in logs[0]
    assert "writing a checkpoint" in logs[0]
    report = json.loads((recipe.run_folder / "trainer.json").read_text())
    groups = report["groups"]
    assert report["attempts"] == 3
    assert groups["trained"] == PROMPTS * EPOCHS
    assert (groups["given_up"], groups["in_flight"], groups["trained_twice"]) == (0, 0, 0)
    kept = [g for g, state in listener.state.items() if ENDED.get(state) == "trained"]
    prompts = Counter(group_id.rsplit(".", 2)[0] for group_id in kept)
    assert prompts == {f"{epoch}.{row}": 1 for epoch in range(EPOCHS) for row in range(PROMPTS)}
    assert listener.twice == []
    [*_, newest] = sorted(
        recipe.run_folder.glob("checkpoints/*-*"), key=lambda path: path.stat().st_mtime
    )
    assert sorted(path.name for path in newest.glob("rank-*")) == [
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    assert not list(recipe.run_folder.glob(".nodes-*"))


async def test_a_node_that_cannot_belong_to_the_trainer_is_refused(
    valkey_url: str, tmp_path: Path
) -> None:
    write_recipe_of_nodes(tmp_path, valkey_url)
    async with two_nodes(tmp_path) as nodes:
        trainer = await nodes.start(0)
        await nodes.until_phase(0, "waiting for node 1 of 2")
        other = await nodes.start(1, "loss.clip_high=0.3", "trainer.seed=5")
        assert await statuses(other) == [2]
        assert "not the same as on node 0: loss, trainer;" in nodes.said(1)
        details = (await status_of(nodes.announced(0))).details
        assert details["node 1"] == "refused: not the same as on node 0: loss, trainer"

        other = await nodes.start(1, "trainer.nodes=1")
        assert await statuses(other) == [2]
        assert "--node 1: nodes are counted from 0" in nodes.said(1)

        assert await nodes.phase(0) == "waiting for node 1 of 2"
        trainer.send_signal(signal.SIGTERM)
        assert await statuses(trainer) == [STOPPED_STATUS]


def test_recipes_of_several_nodes(tmp_path: Path) -> None:
    def mistakes(**tables: Any) -> str:
        with pytest.raises(ValueError, match=r"\S") as raised:
            Recipe.model_validate(
                {"data": {"file": "rows.jsonl", "epochs": 1.0}, "trainer": tables["trainer"]}
                | {"network": tables.get("network", {})}
            )
        return str(raised.value)

    assert "trainer.ranks: 3 cannot be spread evenly over trainer.nodes = 2" in mistakes(
        trainer={"ranks": 3, "nodes": 2}, network={"ranks": "a:1"}
    )
    assert "network.ranks: with trainer.nodes = 2 say at which HOST:PORT" in mistakes(
        trainer={"ranks": 2, "nodes": 2}
    )
    for address in ("trainer", ":29500", "trainer:0", "trainer:65536", "trainer:http"):
        assert "is no HOST:PORT" in mistakes(trainer={"ranks": 2}, network={"ranks": address})
