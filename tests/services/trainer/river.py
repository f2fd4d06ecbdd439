"""A whole run around the real trainer: real queue server and gRPC, and a small generator and scorer
of the tests, which speak the streams and the policy service as the real ones do.

The generator samples random tokens but says their true log-probabilities under the weights that it
has fetched, so that what the trainer measures about agreement is real, too.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from headrace.v1 import policy_pb2 as policy_wire
from headrace.v1 import policy_pb2_grpc, rollout_pb2
from safetensors.torch import load

from services.common import grpc_kit, queue
from services.common.background import guarded
from services.common.config import Data, Model, Network, Queue, Recipe
from services.common.config import Recorder as RecorderSettings
from services.common.generation_config import Generation, Generator
from services.common.lifecycle import Lifecycle
from services.common.partials import Count
from services.common.queue import QueueClient
from services.common.recorder import Recorder
from services.common.streams import Entry, Stage
from services.common.training_config import Checkpoint, Evaluation, Optimizer, Trainer
from services.trainer.policy import PolicyServicer
from services.trainer.run_queue import RunQueue
from services.trainer.training import Training
from tests.services.trainer.numerics import make_model, sequence_logprobs
from tests.services.trainer.scored import make_scored, make_sequence
from tests.waiting import until

PROMPT, COMPLETION = 3, 3
"""Tokens."""

Decide = Callable[[str, int], str | int]
"""What becomes of a group, from its id and how often its prompt was dispatched before: "" a healthy
one; a tombstone's reason; "poison"; "zero" signal; "long" beyond any budget; "lost" by the server;
"twice" in the stream; a version that it claims to be of."""


def recipe_of(folder: Path, model: Path, url: str, **changes: Any) -> Recipe:
    """A run of 5 steps of 2 groups of 2 conversations; `changes` by section."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{n} w{n + 1}"}}\n' for n in range(14)))
    sections: dict[str, Any] = {
        "trainer": {"groups_per_step": 2, "max_steps": 5, "max_staleness": 2, "device": "cpu"},
        "evaluation": {"enabled": False, "size": 2},
        "data": {"file": str(prompts)},
        "queue": {"url": url, "claim_after_s": 5.0},
        "checkpoint": {},
    }
    for name, section in changes.items():
        sections[name] = sections.get(name, {}) | section
    return Recipe(
        run="r",
        folder=str(folder / "runs"),
        model=Model(path=str(model)),
        data=Data(**sections["data"]),
        generation=Generation(num_generations=2, max_completion_tokens=4),
        generator=Generator(max_model_len=16),
        optimizer=Optimizer(learning_rate=1e-3),
        trainer=Trainer(**sections["trainer"]),
        checkpoint=Checkpoint(**sections["checkpoint"]),
        evaluation=Evaluation(**sections["evaluation"]),
        queue=Queue(**sections["queue"]),
    )


class River:
    """The trainer, the run's other half, and what a test looks at."""

    training: Training
    trainers: QueueClient
    """The trainer's own connection."""
    stub: Any
    """Of the trainer's policy service."""

    def __init__(self, recipe: Recipe, client: QueueClient, decide: Decide) -> None:
        self.recipe, self.client, self._decide = recipe, client, decide
        self.lifecycle = Lifecycle("trainer")
        self.recorder = _recorder("trainer")
        self.dispatches: Counter[str] = Counter()
        self.requests: list[rollout_pb2.RolloutRequest] = []
        self.announced: list[policy_wire.PolicyVersion] = []
        self._model = make_model()
        self.version = 0
        self.served_attempt = 0
        self._served = asyncio.Event()
        self._draw = np.random.default_rng(0)

    def stage(self, name: str) -> Stage:
        settings = self.recipe.queue
        return Stage(
            self.client,
            name=name,
            consumer=f"test-{name}",
            settings=settings,
            capacity=100,
            recorder=_recorder(name),
        )

    async def run(self) -> dict[str, Any] | None:
        """The trainer's report, while everything flows."""
        async with asyncio.timeout(60):
            beside = (self.watch(), self.generate(), self.score())
            return await guarded(self.training.run(), *beside)

    def current_version(self) -> int:
        """The trainer's version, which the generator serves before it generates."""
        return self.training._store.version

    async def begin_with(self) -> int:
        """The version that is noted for groups that begin."""
        return self.current_version()

    def is_current(self) -> bool:
        """Whether the generator serves it."""
        return self.version == self.current_version()

    async def watch(self) -> None:
        """Serve each new version, as a generator does."""
        stub = self.stub
        async for answer in stub.WatchPolicy(policy_wire.WatchPolicyRequest(generator="g")):
            version = answer.version
            self.announced.append(version)
            if version.version == self.version:
                self.served_attempt = version.attempt
                continue
            request = policy_wire.FetchWeightsRequest(
                version=version.version, sha256=version.sha256
            )
            data = b"".join([piece.data async for piece in stub.FetchWeights(request)])
            self._model.load_state_dict(load(data), strict=False)
            self.version, self.served_attempt = version.version, version.attempt
            self._served.set()
            await stub.ReportServing(
                policy_wire.ReportServingRequest(generator="g", version=version.version), timeout=30
            )

    async def generate(self) -> None:
        """Requests to groups."""
        await self._served.wait()
        async with self.stage("requests") as stage:
            while True:
                # What an earlier attempt published may be of a dead line.
                await until(lambda: self.served_attempt >= stage.clock.attempt)
                for entry in await stage.take(4, version=self.begin_with):
                    await self._generate_one(stage, entry)

    async def _generate_one(self, stage: Stage, entry: Entry) -> None:
        # Never behind, so that what is stale is decided by the test and not by the machine's load.
        await until(self.is_current)
        request = rollout_pb2.RolloutRequest.FromString(entry.data)
        self.requests.append(request)
        prompt = entry.group_id.rsplit(".", 2)[0]
        what = "" if request.evaluation else self._decide(entry.group_id, self.dispatches[prompt])
        self.dispatches[prompt] += 1
        if what in ("failed", "stale", "bad luck"):
            await stage.tombstone(entry, reason=str(what))
            return
        if what == "lost":
            keys = self.client.keys
            await self.client.raw.xdel(keys.requests, entry.entry_id)
            await self.client.raw.hdel(keys.outstanding, entry.group_id)
            return
        group = rollout_pb2.RolloutGroup(request=request, oldest_version=self.version)
        if isinstance(what, int):
            group.oldest_version = what
        group.newest_version = group.oldest_version
        group.producer = str(what)  # tells the scorer of this test what to do
        length = 40 if what == "long" else PROMPT + COMPLETION
        rows = self._draw.integers(0, 48, (request.sampling.num_generations, length))
        rows[:, :PROMPT] = rows[0, :PROMPT]
        logprobs = sequence_logprobs(self._model, rows)[:, PROMPT - 1 :]
        for number, row in enumerate(rows):
            sequence = make_sequence(
                row.tolist(),
                num_prompt=PROMPT,
                spans=[(group.oldest_version, PROMPT, length)],
                logprobs=logprobs[number].tolist(),
            )
            group.rollouts.add(rollout_id=f"{entry.group_id}/{number}", sequences=[sequence])
        await stage.hand_off(entry, data=group.SerializeToString(), n=1)

    async def score(self) -> None:
        """Groups to scored groups."""
        async with self.stage("groups") as stage:
            while True:
                for entry in await stage.take(4):
                    await self._score_one(stage, entry)

    async def _score_one(self, stage: Stage, entry: Entry) -> None:
        group = rollout_pb2.RolloutGroup.FromString(entry.data)
        if group.producer == "poison":
            await stage.hand_off(entry, data=b"\xff\xfe no message", n=1)
            return
        sequences = [rollout.sequences[0] for rollout in group.rollouts]
        scored = make_scored(
            entry.group_id,
            *sequences,
            oldest=group.oldest_version,
            advantages=[0.0, 0.0] if group.producer == "zero" else [1.0, -1.0][: len(sequences)],
        )
        data = scored.SerializeToString()
        if group.producer == "twice":
            fields = {"id": entry.group_id, "n": "1", "data": data}
            await self.client.raw.xadd(self.client.keys.samples, fields)
        await stage.hand_off(entry, data=data, n=1)

    def counts(self, prefix: str) -> dict[str, float]:
        """What the trainer has counted, over all steps."""
        found: dict[str, float] = {}
        for (key, _, _), partial in self.recorder.snapshot().items():
            if key.startswith(prefix) and isinstance(partial, Count):
                name = key.removeprefix(prefix)
                found[name] = found.get(name, 0) + partial.sum
        return found


R = TypeVar("R", bound=River)


@asynccontextmanager
async def flowing(recipe: Recipe, *, decide: Decide = lambda *_: "") -> AsyncIterator[River]:
    """A trainer and the run's other half, ready to run."""
    async with flowing_as(River, recipe, decide=decide) as river:
        yield river


@asynccontextmanager
async def flowing_as(
    kind: type[R], recipe: Recipe, *, decide: Decide = lambda *_: ""
) -> AsyncIterator[R]:
    """The same, with another half of the test's own."""
    assert recipe.queue.url is not None
    client = await queue.connect(recipe.queue.url, run=recipe.run, claim_after_s=5.0)
    river = kind(recipe, client, decide)
    servicer, network = PolicyServicer(river.recorder), Network()
    add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
    served = await grpc_kit.serve(
        network, river.lifecycle, [(add, servicer, "headrace.v1.PolicyService")]
    )
    channel = grpc_kit.channel(f"127.0.0.1:{served.port}", network)
    torch_thread, at_exit = ThreadPoolExecutor(max_workers=1), ExitStack()
    river.trainers = await queue.connect(recipe.queue.url, run=recipe.run, claim_after_s=5.0)
    river.training = Training(
        recipe,
        river.lifecycle,
        river.recorder,
        servicer,
        RunQueue(river.trainers),
        torch_thread,
        at_exit,
    )
    river.stub = policy_pb2_grpc.PolicyServiceStub(channel)
    try:
        yield river
    finally:
        await channel.close(None)
        await served.stop(0)
        torch_thread.shutdown()
        at_exit.close()
        for each in (client, river.trainers):
            await each.close()


def _recorder(service: str) -> Recorder:
    return Recorder(
        run="r", producer=service, service=service, settings=RecorderSettings(), channel=None
    )
