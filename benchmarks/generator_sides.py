"""The two sides of benchmarks/generator.py, each in processes that live for all rounds and idle in
those of the other.

The service: queue server, aggregator, trainer and generator, started as `headrace run` starts them.
The trainer announces its weights, serves them, and then waits for ever: the rounds' requests are in
a run of another name, and nobody answers its own.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import generator_load as load
import psutil
from headrace.v1 import rollout_pb2

from services.common import config, queue
from services.common.config import Recipe
from services.common.queue import QueueClient
from services.generator import engine_environment
from services.generator.template import ChatTemplate
from services.launcher import embedded_queue, plan
from services.launcher.folder import RunFolder
from services.trainer.run_queue import RunQueue

RUN = "bench"

START_WITHIN_S = 300.0
"""What either side may take to start, on a machine that does other things, too."""

LOOK_S = 0.01
"""Pause between two looks at how many groups have come."""


@dataclass(frozen=True)
class Round:
    """What one side has done in one round."""

    seconds: float
    tokens: int
    cpu_s: float
    """Of all its processes."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.tokens / self.seconds


class Service:
    """Plays rounds through the queue."""

    def __init__(
        self,
        client: QueueClient,
        requests: Sequence[rollout_pb2.RolloutRequest],
        processes: "Processes",
    ) -> None:
        self._client, self._requests, self._processes = client, requests, processes
        self._run_queue = RunQueue(client)
        self._rounds = 0

    async def begin(self) -> None:
        """Begin the run that the rounds are in."""
        await self._run_queue.start(floor=1, recipe="bench")

    async def play(self) -> Round:
        """Dispatch all requests of a round and wait for the last group."""
        self._rounds += 1
        stream = self._client.keys.groups
        requests = []
        for request in self._requests:
            named = rollout_pb2.RolloutRequest()
            named.CopyFrom(request)
            named.group_id = f"{self._rounds}.{request.group_id.split('.', 1)[1]}"
            requests.append((named.group_id, named.SerializeToString()))
        cpu_s, begin_s = self._processes.cpu_s(), time.perf_counter()
        await asyncio.gather(*(self._run_queue.dispatch(*request) for request in requests))
        while await self._client.raw.xlen(stream) < len(requests):
            await asyncio.sleep(LOOK_S)
            self._processes.check()
        seconds = time.perf_counter() - begin_s
        spent_s = self._processes.cpu_s() - cpu_s
        groups = [
            rollout_pb2.RolloutGroup.FromString(fields[b"data"])
            for _, fields in await self._client.raw.xrange(stream)
        ]
        await self._client.raw.xtrim(stream, maxlen=0, approximate=False)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        wanted = sum(request.sampling.num_generations for request in self._requests)
        assert len(rollouts) == wanted, f"{wanted - len(rollouts)} conversations have failed"
        tokens = sum(turn.num_generated_tokens for each in rollouts for turn in each.turns)
        return Round(seconds, tokens, spent_s)


class Processes:
    """Child processes and what they have used."""

    def __init__(self) -> None:
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, spec: Any) -> None:
        """Start what a ChildSpec says."""
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        if spec.announce is not None:
            spec.announce.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            self.started[spec.name] = subprocess.Popen(
                spec.argv, env=dict(spec.env), stdout=log, stderr=log, start_new_session=True
            )

    def check(self) -> None:
        """Fail when one has ended."""
        for name, process in self.started.items():
            assert process.poll() is None, f"{name} has ended with status {process.returncode}"

    def cpu_s(self) -> float:
        """CPU seconds of all of them and their descendants."""
        return sum(cpu_s(process.pid) for process in self.started.values())

    def stop(self) -> None:
        """End all, workers first."""
        for process in reversed(self.started.values()):
            process.terminate()
        for process in self.started.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its living descendants."""
    root, seconds = psutil.Process(pid), 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:2])
    return seconds


@asynccontextmanager
async def service(
    workload: load.Workload, *, model: Path, num_groups: int, folder: Path, overrides: Sequence[str]
) -> AsyncIterator[Service]:
    """The service, ready to generate."""
    recipe = load.recipe_of(
        workload, model=model, overrides=[*overrides, f"folder={folder}", f"run={RUN}"]
    )
    place, other = RunFolder(recipe.run_folder), RunFolder(folder / "trainer")
    for each, run in ((place, RUN), (other, "trainer")):
        each.path.mkdir(parents=True)
        each.recipe.write_text(config.dump_toml(recipe.model_copy(update={"run": run})))
    addresses, processes = plan.choose_addresses(recipe), Processes()
    environ = dict(os.environ)
    assert addresses.queue_port is not None
    try:
        processes.start(plan.queue_spec(place, port=addresses.queue_port, environ=environ))
        await embedded_queue.answers(addresses.queue_url)
        for each, services in ((place, ("aggregator", "generator")), (other, ("trainer",))):
            for spec in plan.service_specs(
                recipe,
                each,
                model=model,
                addresses=addresses,
                machine=plan.this_machine(),
                environ=environ,
            ):
                if spec.name.rpartition("-")[0] in services:
                    processes.start(spec)
        await _ready(place.log("generator-0"), processes)
        client = await queue.connect(
            addresses.queue_url, run=RUN, claim_after_s=recipe.queue.claim_after_s
        )
        side = Service(client, load.requests_of(recipe, number=num_groups), processes)
        await side.begin()
        try:
            yield side
        finally:
            await client.close()
    finally:
        processes.stop()


async def _ready(log: Path, processes: Processes) -> None:
    async with asyncio.timeout(START_WITHIN_S):
        while not await asyncio.to_thread(_says_ready, log):
            processes.check()
            await asyncio.sleep(0.2)


def _says_ready(log: Path) -> bool:
    return '"event": "ready"' in log.read_text()


class Offline:
    """Plays rounds by vLLM's `LLM.generate`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def play(self) -> Round:
        """Generate all conversations of a round."""
        before_s = cpu_s(self._process.pid)
        assert self._process.stdin is not None
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        answer = self.answer()
        spent_s = cpu_s(self._process.pid) - before_s
        return Round(answer["seconds"], answer["tokens"], spent_s)

    def answer(self) -> dict[str, Any]:
        """The next line of JSON; vLLM prints, too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the offline engine has ended with status {self._process.wait()}")


@contextmanager
def offline(
    recipe: Recipe,
    *,
    model: Path,
    num_groups: int,
    folder: Path,
    one_process: bool,
) -> Iterator[Offline]:
    """vLLM's own engine on the same model, with the same settings and environment."""
    template, generator = ChatTemplate(model), recipe.generator
    settings = {
        "engine": {
            "skip_tokenizer_init": True,
            "dtype": recipe.model.dtype,
            "max_model_len": generator.max_model_len,
            "max_num_seqs": generator.max_num_seqs or generator.max_inflight,
            "max_num_batched_tokens": generator.max_num_batched_tokens,
            "enforce_eager": generator.enforce_eager,
            "enable_prefix_caching": True,
            "block_size": 32,
            "kv_cache_memory_bytes": generator.kv_cache_bytes,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
        },
        "sampling": {
            "temperature": recipe.generation.temperature,
            "max_tokens": recipe.generation.max_completion_tokens,
            "stop_token_ids": list(template.end_tokens),
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
        },
        "one_process": one_process,
    }
    prompts = load.prompts_of(load.requests_of(recipe, number=num_groups), template)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "settings.json", folder / "prompts.json"]
    for file, content in zip(files, (settings, prompts), strict=True):
        file.write_text(json.dumps(content))
    environ = plan.environment(
        recipe, "generator", replica=0, machine=plan.this_machine(), environ=os.environ
    )
    size = engine_environment.vocab_size(model)
    engine_environment.prepare(enforce_eager=True, vocab_size=size, environ=environ)
    script = Path(__file__).with_name("generator_offline.py")
    with (folder / "offline.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), str(model), *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environ,
        )
    try:
        side = Offline(process)
        side.answer()
        yield side
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
