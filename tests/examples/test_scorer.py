"""The example of a scorer of somebody else's, as a real process in a real pipeline."""

import ast
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from headrace.v1 import rollout_pb2, sample_pb2

from services.common import queue
from services.common.config import Queue
from services.common.config import Recorder as RecorderSettings
from services.common.queue import GROUP, QueueClient
from services.common.recorder import Recorder
from services.common.streams import Stage
from services.trainer.intake import Policy, admit
from services.trainer.run_queue import Delivery, RunQueue
from tests.services.scorer.groups import group_of
from tests.waiting import PATIENCE_S, always

ROOT = Path(__file__).parents[2]

EXAMPLES = ROOT / "examples"

CLAIM_AFTER_S = 1.0

POLICY = Policy(version=4, step=4, step_of={3: 3, 4: 4}, max_staleness=2, vocab_size=50)


class River:
    """The trainer's and the generators' side of a run."""

    def __init__(self, client: QueueClient, url: str) -> None:
        self.client, self.url = client, url
        self.trainer = RunQueue(client)
        recorder = Recorder(
            run="r", producer="g", service="generator", settings=RecorderSettings(), channel=None
        )
        self.generator = Stage(
            client,
            name="requests",
            consumer="g",
            settings=Queue(),
            capacity=100,
            recorder=recorder,
        )

    async def put(self, *groups: rollout_pb2.RolloutGroup) -> None:
        """Dispatch these groups and hand them to the scorers."""
        for group in groups:
            await self.put_bytes(group.request.group_id, group.SerializeToString())

    async def put_bytes(self, group_id: str, data: bytes) -> None:
        await self.trainer.dispatch(group_id, b"", evaluation=group_id.startswith("eval"))
        [entry] = await self.generator.take(1, version=always(3))
        assert await self.generator.hand_off(entry, data=data, n=1) == "done"

    async def get(self, *, evaluation: bool = False) -> Delivery:
        """The next scored group, taken out of the run."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for found in await self.trainer.take(1, evaluation=evaluation):
                    if evaluation:
                        await self.trainer.discard_evaluation([found.entry_id])
                    else:
                        await self.trainer.settle([(found.entry_id, found.group_id)], step=1)
                    return found

    async def consumers(self) -> set[str]:
        """Workers that hold a group."""
        found = await self.client.raw.xpending(self.client.keys.groups, GROUP)
        return {each["name"].decode() for each in found["consumers"]}

    async def block_a_scorer(self) -> str:
        """Fill `samples`, whose capacity is 1, and put one more group: the worker that holds it
        until there is room."""
        await self.put(group_of("a", "bb", group_id="0.0.1.0"))
        await self.until_there_is(self.client.keys.samples, 1)
        await self.put(group_of("a", "bb", group_id="0.1.1.0"))
        async with asyncio.timeout(PATIENCE_S):
            while len(names := await self.consumers()) != 1:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
        return names.pop()

    async def until_there_is(self, key: str, length: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.client.raw.xlen(key) != length:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)

    @contextmanager
    def scorer(self, folder: Path, *, capacity: int = 8) -> Iterator["subprocess.Popen[bytes]"]:
        """The example, started as its README says."""
        command = [sys.executable, str(EXAMPLES / "scorer.py"), self.url, "r"]
        command += ["--scripts", str(ROOT / "services/common/scripts")]
        command += ["--capacity", str(capacity), "--claim-after-s", str(CLAIM_AFTER_S)]
        process = subprocess.Popen(command, cwd=folder)
        try:
            yield process
            if process.poll() is None:
                process.terminate()
                assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def river(url: str) -> AsyncIterator[River]:
    client = await queue.connect(url, run="r", claim_after_s=CLAIM_AFTER_S)
    try:
        seen = River(client, url)
        await seen.trainer.start(floor=1, recipe="x")
        yield seen
    finally:
        await client.close()


async def test_groups_become_samples_that_the_trainer_takes(queue_url: str, tmp_path: Path) -> None:
    async with river(queue_url) as seen:
        with seen.scorer(tmp_path):
            await seen.put(*(group_of("aa", "b", "cc", group_id=f"0.{n}.1.0") for n in range(3)))
            for number in range(3):
                delivery = await seen.get()
                group_id = f"0.{number}.1.0"
                assert (delivery.group_id, delivery.reason) == (group_id, "")
                admitted = admit(delivery.data, group_id=group_id, policy=POLICY)
                assert not admitted.zero_signal
                assert admitted.staleness == 1
                advantages = [sample.advantage for sample in admitted.samples]
                assert advantages == pytest.approx([-0.70711, 1.41421, -0.70711], abs=1e-5)
                scored = sample_pb2.ScoredGroup.FromString(delivery.data)
                assert [rollout.reward for rollout in scored.rollouts] == [1 / 3, 1 / 2, 1 / 3]
        assert await seen.trainer.outstanding() == {}
        assert all(fill.waiting == fill.held == 0 for fill in (await seen.trainer.gauge()).values())


async def test_every_other_end_of_a_group(valkey_url: str, tmp_path: Path) -> None:
    async with river(valkey_url) as seen:
        with seen.scorer(tmp_path):
            await seen.put(group_of("alone", group_id="0.0.1.0"))
            assert (await seen.get()).reason == "failed"
            untrained = group_of("a", "b", group_id="0.1.1.0", num_sequences=0)
            await seen.put(untrained)
            assert (await seen.get()).reason == "no_trained_tokens"
            await seen.put(group_of("same", "same", group_id="0.2.1.0"))
            equal = admit((await seen.get()).data, group_id="0.2.1.0", policy=POLICY)
            assert equal.zero_signal
            await seen.put_bytes("0.3.1.0", b"\xff")
            assert (await seen.get()).reason == "poison"
            await seen.put_bytes("0.4.1.0", group_of("a", "b").SerializeToString())
            assert (await seen.get()).reason == "poison"
            evaluation = group_of("a", group_id="eval.0.1.5", evaluation=True)
            await seen.put(evaluation)
            scored = sample_pb2.ScoredGroup.FromString((await seen.get(evaluation=True)).data)
            assert (len(scored.rollouts), len(scored.samples)) == (1, 0)
        dead = await seen.client.raw.xrange(seen.client.keys.dead)
        assert [fields[b"reason"].split(b":")[0] for _, fields in dead] == [
            b"not a RolloutGroup",
            b"its bytes are of group '0.0.1.0'",
        ]
        assert dead[0][1][b"data"] == b"\xff"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_what_one_held_is_scored_by_another(
    valkey_url: str, tmp_path: Path, how: signal.Signals
) -> None:
    """It holds a group because there is no room for the result; then it is ended."""
    async with river(valkey_url) as seen:
        with seen.scorer(tmp_path, capacity=1) as first:
            holder = await seen.block_a_scorer()
            first.send_signal(how)
            assert first.wait(PATIENCE_S) == (0 if how == signal.SIGTERM else -how)
            assert await seen.consumers() == {"~returned" if how == signal.SIGTERM else holder}
        with seen.scorer(tmp_path, capacity=1):
            assert (await seen.get()).group_id == "0.0.1.0"
            delivery = await seen.get()
            admit(delivery.data, group_id="0.1.1.0", policy=POLICY)
        assert await seen.client.raw.xlen(seen.client.keys.groups) == 0
        assert await seen.client.raw.xlen(seen.client.keys.samples) == 0


async def test_one_that_wakes_up_late_hands_nothing_off(valkey_url: str, tmp_path: Path) -> None:
    """Stopped with a group in its hands, and continued when another has scored it."""
    async with river(valkey_url) as seen:
        with seen.scorer(tmp_path, capacity=1) as zombie:
            holder = await seen.block_a_scorer()
            zombie.send_signal(signal.SIGSTOP)
            with seen.scorer(tmp_path, capacity=8):
                assert (await seen.get()).group_id == "0.0.1.0"
                assert (await seen.get()).group_id == "0.1.1.0"
                assert holder not in await seen.consumers()
                zombie.send_signal(signal.SIGCONT)
                await seen.put(group_of("a", "bb", group_id="0.2.1.0"))
                assert (await seen.get()).group_id == "0.2.1.0"
        assert await seen.client.raw.xlen(seen.client.keys.samples) == 0
        assert await seen.trainer.outstanding() == {}


async def test_it_goes_on_where_the_server_lost_everything(valkey_url: str, tmp_path: Path) -> None:
    async with river(valkey_url) as seen:
        with seen.scorer(tmp_path):
            await seen.put(group_of("a", "bb", group_id="0.0.1.0"))
            assert (await seen.get()).group_id == "0.0.1.0"
            await seen.client.raw.flushall()
            await seen.client.create_groups()
            await seen.trainer.start(floor=2, recipe="x")
            await seen.put(group_of("a", "bb", group_id="0.0.2.0"))
            assert (await seen.get()).group_id == "0.0.2.0"


def test_it_imports_nothing_of_the_package() -> None:
    for file in EXAMPLES.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "services"]


def test_its_types_hold(tmp_path: Path) -> None:
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "scorer.py", "stage.py"],
        cwd=EXAMPLES,
        env={**os.environ, "MYPYPATH": str(ROOT / "protos/python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
