"""The real engine against transformers: log-probabilities, weights replaced under running requests,
caches, failed loads, and the proof that finds a stale head. Tied and untied."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from services.common import canary
from services.common.errors import UserError
from services.common.generation_config import Generator
from services.generator import engine_environment
from services.generator.perturbation import perturbed_copy
from services.generator.proof import LoadNotProven, Proof, prove
from services.generator.reconcile import to_sequences
from services.generator.types import EngineDead, Generated, SampledTurn
from tests.services.generator.references import VOCABULARY, Reference, make
from tests.waiting import until

if TYPE_CHECKING:
    from services.generator.engine import Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # An engine lives in one loop, and it takes half a minute to start: tests share both.
    pytest.mark.asyncio(loop_scope="module"),
]

SETTINGS = Generator(max_inflight=32, max_model_len=512, kv_cache_bytes=16 << 20)
STALE_HEAD = "tests.services.generator.stale_head.Extension"
EXACT = 1e-4
"""Of log-probabilities in float32."""


@contextmanager
def prepared() -> Iterator[None]:
    """What an engine needs of the environment, and what vLLM sets there, for a time."""
    before = dict(os.environ)
    cores = sorted(os.sched_getaffinity(0))
    # As the launcher does it for replica 0: else vLLM asks the machine, which a container forbids.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(cores[0]))
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    engine_environment.prepare(enforce_eager=True, vocab_size=VOCABULARY)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@asynccontextmanager
async def started(folder: Path, **arguments: Any) -> "AsyncIterator[Engine]":
    from services.generator.engine import Engine

    engine = await Engine.start(folder, settings=SETTINGS, dtype="float32", **arguments)
    try:
        yield engine
    finally:
        engine.shutdown()


@dataclass
class Bench:
    """An engine, and two models whose weights it may have."""

    engine: "Engine"
    old: Reference
    new: Reference
    version: int = 0
    sampled: list[int] = field(default_factory=list)
    """Tokens that each call of sample() has said it generated."""

    async def load(self, reference: Reference) -> int:
        """Load it under the next version."""
        self.version += 1
        times = await self.engine.load(reference.path, self.version)
        assert times.pause_s >= times.load_s > 0
        return self.version

    async def sample(
        self, prompt: Sequence[int], num: int, *, temperature: float = 1.0
    ) -> Generated:
        return await self.engine.generate(
            prompt,
            temperature=temperature,
            max_tokens=num,
            stop_token_ids=[],
            sampled=self.sampled.append,
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["untied", "tied"])
async def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    folder, tied = tmp_path_factory.mktemp(request.param), request.param == "tied"
    old, new = make(folder, tied=tied, seed=1), make(folder, tied=tied, seed=2)
    with prepared():
        async with started(folder) as engine:
            yield Bench(engine, old, new)


RNG = np.random.default_rng(0)


def prompt_of(num: int) -> list[int]:
    return [int(token) for token in RNG.integers(0, VOCABULARY, num)]


def gap(
    reference: Reference, prompt: Sequence[int], generated: Generated, *, temperature: float = 1.0
) -> "np.ndarray[Any, Any]":
    """How far each sampled token's log-probability is from the reference's."""
    all_of_them = reference.logprobs([*prompt, *generated.token_ids], temperature=temperature)
    return np.abs(all_of_them[len(prompt) - 1 :] - generated.logprobs)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_are_those_of_transformers(bench: Bench, temperature: float) -> None:
    """C11 and C12: temperature is inside, nothing else is."""
    version = await bench.load(bench.old)
    prompts = [prompt_of(num) for num in (1, 2, 5, 31, 32, 33, 40, 75)]
    done = await asyncio.gather(
        *(bench.sample(prompt, 24, temperature=temperature) for prompt in prompts)
    )
    for prompt, generated in zip(prompts, done, strict=True):
        assert len(generated.token_ids) == 24
        assert generated.finish_reason == "length"
        assert [(s.version, s.start, s.end) for s in generated.spans] == [(version, 0, 24)]
        assert gap(bench.old, prompt, generated, temperature=temperature).max() <= EXACT
    wrong = [
        gap(bench.old, p, g, temperature=1.7 - temperature)
        for p, g in zip(prompts, done, strict=True)
    ]
    assert np.concatenate(wrong).max() > 0.1


async def test_sequences_of_many_turns_are_those_of_transformers(bench: Bench) -> None:
    """Five turns: two whose prompts begin with all that is held, one that has another tail of the
    last answer, one that has lost its begin. Every token that is trained has, in the sequence that
    trains it, the log-probability that it was sampled with."""
    version = await bench.load(bench.old)
    prompts, turns = [prompt_of(9)], []
    for rewrite in (_append, _append, _other_tail, _lose_begin, None):
        generated = await bench.sample(prompts[-1], 20)
        held = [*prompts[-1], *generated.token_ids]
        turns.append(
            SampledTurn(
                prompt_ids=tuple(prompts[-1]),
                token_ids=tuple(generated.token_ids),
                logprobs=generated.logprobs,
                spans=generated.spans,
            )
        )
        if rewrite is not None:
            prompts.append(rewrite(held))
    sequences, transitions = to_sequences(turns, fork_threshold_tokens=16)
    assert (transitions.clean, transitions.realigned, transitions.forked) == (2, 1, 1)
    assert [int(sequence.trained_mask.sum()) for sequence in sequences] == [77, 20]
    assert transitions.demoted_tokens == 3
    for sequence in sequences:
        mask = sequence.trained_mask[1:] == 1
        reference = bench.old.logprobs(sequence.token_ids.tolist())
        assert np.abs(reference - sequence.logprobs[1:])[mask].max() <= EXACT
        assert {span.version for span in sequence.spans} == {version}


def _append(held: list[int]) -> list[int]:
    return [*held, *prompt_of(7)]


def _other_tail(held: list[int]) -> list[int]:
    return [*held[:-3], (held[-3] + 1) % VOCABULARY, *prompt_of(7)]


def _lose_begin(held: list[int]) -> list[int]:
    return [held[0], *held[30:], *prompt_of(7)]


async def test_an_end_token_is_part_of_what_was_sampled(bench: Bench) -> None:
    await bench.load(bench.old)
    prompt = prompt_of(20)
    expected = bench.old.greedy(prompt, 12)
    end = expected[-1]
    length = expected.index(end) + 1
    generated = await bench.engine.generate(
        prompt,
        temperature=0.0,
        max_tokens=64,
        stop_token_ids=[end],
        sampled=bench.sampled.append,
    )
    assert generated.token_ids == expected[:length]
    assert generated.finish_reason == "stop"
    assert len(generated.logprobs) == length
    assert bench.sampled[-1] == length


async def test_the_canary_is_that_of_transformers(bench: Bench) -> None:
    await bench.load(bench.new)
    rows = canary.rows(VOCABULARY)
    seen = await bench.engine.row_logprobs(rows)
    assert seen.shape == (canary.ROWS, canary.ROW_TOKENS - 1)
    assert np.abs(seen - bench.new.rows(rows)).max() <= EXACT


async def test_weights_are_replaced_under_running_requests(bench: Bench) -> None:
    """Each token's log-probability is that of one exact policy over the whole prefix: the old one
    before the switch, the new one after it."""
    before = await bench.load(bench.old)
    prompts = [prompt_of(num) for num in (3, 20, 32, 50)]
    running = [asyncio.create_task(bench.sample(prompt, 300)) for prompt in prompts]
    await until(lambda: bench.engine.running == len(prompts))
    await bench.sample(prompt_of(3), 8)  # when it has ended, the others have begun
    after = await bench.load(bench.new)
    for prompt, task in zip(prompts, running, strict=True):
        generated = await task
        first, second = generated.spans
        assert (first.version, second.version) == (before, after)
        assert 0 == first.start < first.end == second.start < second.end == 300
        switch = first.end
        assert gap(bench.old, prompt, generated)[:switch].max() <= EXACT
        assert gap(bench.new, prompt, generated)[switch:].max() <= EXACT
        assert gap(bench.old, prompt, generated)[switch:].max() > 0.1


async def test_no_cached_block_outlives_its_weights(bench: Bench) -> None:
    """C24: the same greedy request before and after a load; after it, as on a fresh server."""
    from vllm import SamplingParams

    prompt = prompt_of(200)

    async def cached_tokens() -> int:
        output = await bench.engine._run(prompt, SamplingParams(max_tokens=1, temperature=0.0))
        return int(output.num_cached_tokens)

    async def greedy() -> Generated:
        return await bench.sample(prompt, 24, temperature=0.0)

    await bench.load(bench.old)
    first, again = await greedy(), await greedy()
    assert first.token_ids == again.token_ids == bench.old.greedy(prompt, 24)
    assert await cached_tokens() > 0
    await bench.load(bench.new)
    assert await cached_tokens() == 0
    await bench.load(bench.new)
    second = await greedy()
    assert second.token_ids == bench.new.greedy(prompt, 24) != first.token_ids
    assert gap(bench.new, prompt, second).max() <= EXACT


async def test_a_partial_load_never_serves_and_a_whole_one_repairs_it(
    bench: Bench, tmp_path: Path
) -> None:
    await bench.load(bench.old)
    prompt = prompt_of(9)
    tensors = load_file(bench.new.path)
    lost = "model.layers.1.self_attn.q_norm.weight"
    del tensors[lost]
    partial = tmp_path / "partial.safetensors"
    save_file(tensors, partial)
    for _ in range(2):
        with pytest.raises(Exception, match=r"were not written|method failed") as error:
            await bench.engine.load(partial, 1000)
        assert not isinstance(error.value, EngineDead)
    waiting = asyncio.create_task(bench.sample(prompt, 16))
    dropped = asyncio.create_task(bench.sample(prompt, 16))
    await asyncio.wait({waiting}, timeout=0.3)
    assert await bench.engine._llm.is_paused()
    assert not waiting.done()
    dropped.cancel()
    await asyncio.wait({dropped})
    assert dropped.cancelled()
    version = await bench.load(bench.new)
    generated = await waiting
    assert [span.version for span in generated.spans] == [version]
    assert gap(bench.new, prompt, generated).max() <= EXACT
    assert bench.engine.running == 0


async def test_tokens_count_also_where_the_call_is_cut_off(bench: Bench) -> None:
    """What a cancelled request had generated by then, and at most that."""
    await bench.load(bench.old)
    bench.sampled.clear()
    whole = await bench.sample(prompt_of(5), 12)
    assert bench.sampled == [len(whole.token_ids)] == [12]
    long = 450
    task = asyncio.create_task(bench.sample(prompt_of(5), long))
    processor = bench.engine._llm.output_processor

    def so_far() -> int:
        return sum(s.detokenizer.num_output_tokens() for s in processor.request_states.values())

    await until(lambda: so_far() >= 3)
    at_least = so_far()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    _, cut_off = bench.sampled
    assert at_least <= cut_off < long
    assert bench.engine.running == 0


async def test_a_pause_lasts_until_the_next_load(bench: Bench) -> None:
    await bench.load(bench.old)
    await bench.engine.pause()
    await bench.engine.pause()
    prompt = prompt_of(9)
    waiting = asyncio.create_task(bench.sample(prompt, 16))
    await asyncio.wait({waiting}, timeout=0.3)
    assert not waiting.done()
    version = await bench.load(bench.new)
    assert [span.version for span in (await waiting).spans] == [version]


async def load_path_proof(engine: "Engine", reference: Reference) -> Proof:
    """What services/generator/serving.py does at the start of a replica."""
    rows = canary.rows(VOCABULARY)
    perturbed = perturbed_copy(reference.path)
    await engine.load(perturbed, 0)
    engine_perturbed = await engine.row_logprobs(rows)
    await engine.load(reference.path, 1)
    return prove(
        engine_true=await engine.row_logprobs(rows),
        engine_perturbed=engine_perturbed,
        trainer_true=reference.rows(rows),
        trainer_perturbed=reference.with_weights(perturbed).rows(rows),
        dtypes={"float32"},
    )


async def test_a_good_load_path_is_proven_by_far(bench: Bench) -> None:
    proof = await load_path_proof(bench.engine, bench.old)
    assert proof.movement > 0.01
    assert proof.movement_error < proof.movement / 1000
    assert proof.true_error < EXACT


async def test_the_engine_answers_its_probe(bench: Bench) -> None:
    await bench.load(bench.old)
    await bench.engine.check(60.0)


async def test_a_stale_head_is_found_and_a_dead_engine_says_so(tmp_path: Path) -> None:
    """The trap of tied embeddings on CPUs, planted on purpose. Then the engine's processes die."""
    reference = make(tmp_path, tied=True, seed=1)
    this = psutil.Process()
    others = set(this.children(recursive=True))
    with prepared():
        async with started(tmp_path, extension=STALE_HEAD) as engine:
            with pytest.raises(LoadNotProven, match="a stale tensor, such as a tied output head"):
                await load_path_proof(engine, reference)
            for process in set(this.children(recursive=True)) - others:
                process.kill()
            with pytest.raises(EngineDead):
                await engine.generate(
                    [1], temperature=1.0, max_tokens=9, stop_token_ids=[], sampled=lambda _: None
                )
            with pytest.raises(EngineDead):
                await engine.check(60.0)
            with pytest.raises(EngineDead):
                await engine.load(reference.path, 2)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (SETTINGS.model_copy(update={"seeded": True}), "generator.seeded"),
        (SETTINGS.model_copy(update={"kv_cache_bytes": None}), "generator.kv_cache_bytes"),
    ],
)
async def test_what_would_kill_an_engine_on_cpus_is_refused(
    tmp_path: Path, settings: Generator, key: str
) -> None:
    with prepared():
        from services.generator.engine import Engine

        with pytest.raises(UserError, match=key):
            await Engine.start(tmp_path, settings=settings, dtype="float32")
