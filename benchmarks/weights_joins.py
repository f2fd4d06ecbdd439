"""A replica that joins in mid-run, with everything real: the trainer's learner takes optimizer
steps and publishes them, replicas serve them with vLLM on CPUs and generate meanwhile.

The model is random, its file 0.26 GB in float32: each version travels whole, as bfloat16's do to
one that has no base. Each party is a process. While a replica joins, a version is published once it
has begun to fetch, so that the join is overtaken by a version.

All engines share this machine's cores, so the work of one that joins (it loads twice for its proof)
slows the loads of the others. What joining itself does to them is told by the control: an engine
that does the same work and joins nothing.
"""

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import measured
from headrace.v1 import policy_pb2_grpc
from weights_parts import SERVICE, Started, recorder

from services.common import grpc_kit
from services.common.config import Data, Model, Network, Recipe
from services.common.generation_config import Generator
from services.common.lifecycle import Lifecycle, cancel
from services.common.partials import Observation
from services.common.recorder import Recorder
from services.common.training_config import Optimizer, Trainer
from services.launcher import plan

NUM_SERVING = 2
"""Replicas that serve; with the one that joins there are three engines."""

VOCABULARY, HIDDEN, LAYERS = 48_000, 512, 4

GENERATED_TOKENS = 64
"""Of each of the conversations that a serving replica always has, NUM_CONVERSATIONS."""

NUM_CONVERSATIONS = 2

PATIENCE_S = 300.0


def make_model(folder: Path) -> Path:
    """A random Qwen3 with the tiny models' tokenizer; its folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from services.launcher import tiny_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.build_tokenizer().save_pretrained(folder)
    return folder


def trainer(pipe: Connection, model: str, folder: str) -> None:
    """A process that trains: told "step", it takes an optimizer step, told "publish", it publishes;
    the answer is the version. Proofs for those that join are computed as in a run."""
    asyncio.run(_trainer(pipe, model, Path(folder)))


async def _trainer(pipe: Connection, model: str, folder: Path) -> None:
    from services.trainer.learner import Learner
    from services.trainer.policy import PolicyServicer, PolicyStore
    from services.trainer.publishing import Publisher
    from services.trainer.torch_thread import TorchThread

    recipe = Recipe(
        model=Model(path=model),
        data=Data(file="prompts.jsonl", epochs=1.0),
        optimizer=Optimizer(learning_rate=1e-6),
        trainer=Trainer(device="cpu"),
    )
    measures, lifecycle = recorder("trainer"), Lifecycle("trainer")
    servicer = PolicyServicer(measures)
    with ThreadPoolExecutor(1) as executor:
        torch = TorchThread(executor)
        learner: Any = await torch(Learner, recipe)
        store = PolicyStore(
            checkpoints=folder, attempt=1, vocab_size=learner.vocab_size, max_staleness=2
        )
        publisher = Publisher(learner, store, servicer, torch, lifecycle, measures)
        servicer.open(store, learner.folder)
        add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
        served = await grpc_kit.serve(Network(), lifecycle, [(add, servicer, SERVICE)])
        await publisher.publish()
        proving = asyncio.create_task(publisher.prove_late())
        pipe.send(served.port)
        try:
            while told := await asyncio.to_thread(pipe.recv):
                if told == "step":
                    await torch(_step, learner)
                else:
                    await publisher.publish()
                pipe.send(store.version)
        finally:
            await cancel(proving)
            publisher.close()
            await served.stop(0)
            store.close()


def _step(learner: Any) -> None:
    """One optimizer step on a sample of random tokens."""
    import numpy as np

    from services.trainer.types import Row, TrainSample

    tokens = np.random.default_rng(learner.num_applied).integers(0, VOCABULARY, 64)
    trained = np.arange(64) >= 16
    sample = TrainSample(
        rollout_id="bench/0",
        token_ids=tokens,
        trained_mask=trained,
        logprobs=np.where(trained, -np.log(VOCABULARY), 0.0).astype(np.float32),
        advantage=1.0,
        lags=np.zeros(64, np.int16),
    )
    learner.accumulate([Row([sample])])
    assert learner.finish().applied


def replica(pipe: Connection, number: int, port: int, model: str) -> None:
    """A process with a vLLM engine, its threads and cores those of the replica of that number under
    `headrace run`. Told "serve", it joins for good, generates, and answers each
    version that it has loaded and proven with (version, pause in seconds, seconds of the fetch).

    Told "join", it joins and leaves again: it answers "fetching" when it begins to, and a `Join`
    at the end. Told "fetch", it fetches the current version, and nothing else, and answers the
    seconds that took. Told "work", its engine does what a join's does, with weights of its own: it
    answers "working" when it begins to, and "done".
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling a sampler takes half a minute an engine
    os.environ |= plan.environment(
        Recipe(model=Model(path=model), data=Data(file="prompts.jsonl", epochs=1.0)),
        "generator",
        replica=number,
        machine=plan.this_machine(),
        environ=os.environ,
    )
    asyncio.run(_replica(pipe, f"replica-{number}", port, model))


@dataclass(frozen=True)
class Join:
    """One start of a replica whose engine was up."""

    fetched_s: float
    """From the start of its client until it had a version whole."""
    transfer_s: float
    """Of it the fetch."""
    values_s: float
    """Then, until the values of its proof came: the trainer computes them between micro-batches."""
    load_s: float
    """Of the true weights, into the engine."""
    proof_s: float
    """Perturbing, loading and reading the canary twice."""
    version: int
    fetches: int


async def _replica(pipe: Connection, name: str, port: int, model: str) -> None:
    from services.generator import engine_environment

    engine_environment.prepare(enforce_eager=True, vocab_size=VOCABULARY)
    from services.generator.engine import Engine

    settings = Generator(max_inflight=16, max_model_len=512, kv_cache_bytes=64 << 20)
    engine: Any = await Engine.start(Path(model), settings=settings, dtype="float32")
    try:
        await engine.check(600.0)
        pipe.send("up")
        while told := await asyncio.to_thread(pipe.recv):
            if told == "serve":
                await _serve(pipe, engine, name, port)
                return
            if told == "fetch":
                async with _Connected(name, port) as at:
                    begin_s = time.monotonic()
                    await at.client.fetch(await at.client.newer_than(0))
                    pipe.send(time.monotonic() - begin_s)
            elif told == "work":
                await _work(pipe, engine, Path(model) / "model.safetensors")
            else:
                pipe.send(await _join(pipe, engine, name, port))
    finally:
        engine.shutdown()


class _Connected:
    """A replica's connection to the trainer, and its server for others."""

    async def __aenter__(self) -> "_Connected":
        await self._served_client()
        return self

    def __init__(self, name: str, port: int) -> None:
        self._name, self._network = name, Network(trainer=f"127.0.0.1:{port}")
        self.recorder: Recorder = recorder("generator")

    async def _served_client(self) -> None:
        from services.generator.weight_peers import PeerServicer
        from services.generator.weights import PolicyClient

        peers, add = PeerServicer(), policy_pb2_grpc.add_PolicyServiceServicer_to_server
        self._served = await grpc_kit.serve(
            self._network, Lifecycle("generator"), [(add, peers, SERVICE)]
        )
        self._channel = grpc_kit.channel(self._network.trainer, self._network)
        self.client = PolicyClient(
            self._channel,
            generator=self._name,
            network=self._network,
            recorder=self.recorder,
            port=self._served.port,
        )
        peers.open(self.client.find_file)
        self._watch = asyncio.create_task(self.client.watch())

    async def __aexit__(self, *_: object) -> None:
        await cancel(self._watch)
        await self.client.close()
        await self._channel.close(None)
        await self._served.stop(0)

    def observed(self, key: str) -> tuple[int, float]:
        """How often it was observed so far, and the sum."""
        found = [each for (name, _, _), each in self.recorder.snapshot().items() if name == key]
        observations = [each for each in found if isinstance(each, Observation)]
        return sum(each.n for each in observations), sum(each.total.value for each in observations)


def _serving(engine: Any, at: _Connected) -> Any:
    from services.generator.serving import Serving

    return Serving(engine, at.client, at.recorder, dtype="float32", details={})


async def _join(pipe: Connection, engine: Any, name: str, port: int) -> Join:
    moments: dict[str, float] = {}

    def say(phase: str) -> None:
        word = phase.split()[0]
        moments[word] = time.monotonic()
        if word == "fetching":
            pipe.send("fetching")

    begin_s = time.monotonic()
    async with _Connected(name, port) as at:
        fetch = at.client.fetch

        async def timed(target: Any) -> Path:
            path = await fetch(target)
            moments["fetched"] = time.monotonic()
            return path

        at.client.fetch = timed  # type: ignore[method-assign]
        serving = _serving(engine, at)
        await serving.start(say)
        end_s = time.monotonic()
        fetches, transfer_s = at.observed("perf/weight_sync_transfer_s")
        _, load_s = at.observed("perf/weight_sync_pause_s")
        return Join(
            fetched_s=moments["fetched"] - begin_s,
            transfer_s=transfer_s,
            values_s=moments["proving"] - moments["fetched"],
            load_s=load_s,
            proof_s=end_s - moments["proving"] - load_s,
            version=serving.version,
            fetches=fetches,
        )


async def _work(pipe: Connection, engine: Any, path: Path) -> None:
    from services.common import canary
    from services.generator.perturbation import perturbed_copy

    pipe.send("working")
    rows = canary.rows(VOCABULARY)
    perturbed = await asyncio.to_thread(perturbed_copy, path)
    for each in (perturbed, path):
        await engine.load(each, 0)
        await engine.row_logprobs(rows)
    perturbed.unlink()
    pipe.send("done")


async def _serve(pipe: Connection, engine: Any, name: str, port: int) -> None:
    async with _Connected(name, port) as at:
        serving = _serving(engine, at)
        await serving.start(lambda phase: None)
        pipe.send("serving")
        tasks = [asyncio.create_task(serving.follow(_nothing_held))]
        tasks += [asyncio.create_task(_converse(engine, n)) for n in range(NUM_CONVERSATIONS)]
        tasks.append(asyncio.create_task(_tell(pipe, at, serving)))
        try:
            told = asyncio.create_task(asyncio.to_thread(pipe.recv))
            await asyncio.wait([*tasks, told], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await cancel(*tasks)


async def _nothing_held() -> None:
    """Nothing is to be given back after a failed load, which then fails the measurement."""


async def _converse(engine: Any, number: int) -> None:
    for turn in itertools.count():
        prompt = [(number * 31 + turn * 7 + n) % VOCABULARY for n in range(16)]
        await engine.generate(
            prompt,
            temperature=1.0,
            max_tokens=GENERATED_TOKENS,
            stop_token_ids=(),
            sampled=lambda tokens: None,
        )


async def _tell(pipe: Connection, at: _Connected, serving: Any) -> None:
    """Of each version served, its pause and its fetch."""
    while True:
        before = [at.observed(key)[1] for key in _KEYS]
        await serving.wait_proven(serving.proven + 1)
        pause_s, fetch_s = (
            at.observed(key)[1] - was for key, was in zip(_KEYS, before, strict=True)
        )
        pipe.send((serving.version, pause_s, fetch_s))


_KEYS = ("perf/weight_sync_pause_s", "perf/weight_sync_transfer_s")


@dataclass
class Pauses:
    """Of the replicas that serve, in one phase."""

    pause_s: list[float] = field(default_factory=list)
    fetch_s: list[float] = field(default_factory=list)


class House:
    """All processes."""

    def __init__(self, folder: Path) -> None:
        model = str(make_model(folder / "model"))
        self.size_bytes = (folder / "model" / "model.safetensors").stat().st_size
        place = Path(tempfile.mkdtemp(dir=folder))
        self.trainer = Started(trainer, model, str(place))
        port = self.trainer.first
        self.serving = [Started(replica, n, port, model) for n in range(NUM_SERVING)]
        self.joiner = Started(replica, NUM_SERVING, port, model)
        for each in (*self.serving, self.joiner):
            assert each.first == "up"
        for each in self.serving:
            each.pipe.send("serve")
        for each in self.serving:
            assert each.hear(PATIENCE_S) == "serving"

    def end(self) -> None:
        """End all, the trainer last."""
        for each in (self.joiner, *self.serving, self.trainer):
            each.end()

    def step(self) -> None:
        """An optimizer step."""
        self.trainer.pipe.send("step")
        self.trainer.hear(PATIENCE_S)

    def publish(self, into: Pauses) -> int:
        """Publish, until all that serve have it; what they say of it goes `into`."""
        self.trainer.pipe.send("publish")
        version = int(self.trainer.hear(PATIENCE_S))
        for each in self.serving:
            served, pause_s, fetch_s = each.hear(PATIENCE_S)
            assert served == version, "a publish waits for the one before"
            into.pause_s.append(pause_s)
            into.fetch_s.append(fetch_s)
        return version

    def fetch_s(self) -> float:
        """Of one plain fetch of the current version by the one that will join, nothing else going
        on."""
        self.joiner.pipe.send("fetch")
        return float(self.joiner.hear(PATIENCE_S))

    def join(self, into: Pauses | None) -> Join:
        """One join; with `into` a version is published as soon as it fetches."""
        if into is not None:
            self.step()
        self.joiner.pipe.send("join")
        assert self.joiner.hear(PATIENCE_S) == "fetching"
        newer = None if into is None else self.publish(into)
        found = self.joiner.hear(PATIENCE_S)
        assert isinstance(found, Join), "fetched a second version before it served"
        assert newer is None or found.version == newer - 1
        return found

    def work(self, into: Pauses) -> None:
        """A publish while the one that could join does its work without joining."""
        self.step()
        self.joiner.pipe.send("work")
        assert self.joiner.hear(PATIENCE_S) == "working"
        self.publish(into)
        assert self.joiner.hear(PATIENCE_S) == "done"


def measure(rounds: int, folder: Path) -> dict[str, Any]:
    """`rounds` publishes without and with a replica that joins, and joins without a publish."""
    house = House(folder)
    alone, beside, control = Pauses(), Pauses(), Pauses()
    quiet, overtaken, fetches = [], [], []
    try:
        for number in range(rounds + 1):  # the first of each is not counted
            house.step()
            house.publish(alone if number else Pauses())
        for number in range(rounds + 1):
            fetch_s, one = house.fetch_s(), house.join(None)
            other = house.join(beside if number else Pauses())
            house.work(control if number else Pauses())
            if number:
                fetches.append(fetch_s)
                quiet.append(one)
                overtaken.append(other)
    finally:
        house.end()
    joins = {"quiet": quiet, "overtaken": overtaken}
    lone_s = statistics.median(fetches)
    return {
        "megabytes": house.size_bytes / 1e6,
        "fetch_s": measured.spread(fetches),
        "pause_s": {
            "without": measured.spread(alone.pause_s),
            "while one joins": measured.spread(beside.pause_s),
            "control": measured.spread(control.pause_s),
        },
        "fetch_of_serving_s": {
            "without": measured.spread(alone.fetch_s),
            "while one joins": measured.spread(beside.fetch_s),
        },
        "joins": {
            kind: {
                key: measured.spread([getattr(each, key) for each in found])
                for key in ("fetched_s", "transfer_s", "values_s", "load_s", "proof_s")
            }
            | {
                "most_fetches": max(each.fetches for each in found),
                "ratio_to_fetch": measured.spread(
                    [(each.fetched_s + each.load_s) / lone_s for each in found]
                ),
                "ratio_without_load": measured.spread([each.fetched_s / lone_s for each in found]),
            }
            for kind, found in joins.items()
        },
    }
