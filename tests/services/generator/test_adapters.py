"""The real engine with adapters, against peft: log-probabilities, requests under way when a newer
one comes, cached blocks, removal, failed loads, and the proof of the load path. Tied and untied."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from services.common import adapter_files, canary
from services.common.errors import UserError
from services.generator.adapters import Adapters, AdapterSettings
from services.generator.perturbation import perturbed_copy
from services.generator.proof import LoadNotProven, prove
from services.generator.types import EngineDead, Generated
from tests.services.generator.references import VOCABULARY, Reference, make
from tests.services.generator.test_engine import (
    EXACT,
    Bench,
    gap,
    one_thread,
    prepared,
    prompt_of,
    started,
)
from tests.waiting import until

__all__ = ["one_thread"]  # a fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

MAX_STALENESS = 1
RANK = 4


@dataclass(frozen=True)
class Adapted(Reference):
    """A model with an adapter that peft holds, and the adapter in a file."""

    def with_weights(self, path: Path) -> "Adapted":
        folder = path.parent / f"of-{path.stem}"
        folder.mkdir()
        shutil.copyfile(path, folder / adapter_files.WEIGHTS)
        shutil.copyfile(self.path.parent / adapter_files.CONFIG, folder / adapter_files.CONFIG)
        return adapted_from(folder, self.model.get_base_model().config, base=path.parents[1])


def base_model(folder: Path, config: Any) -> Any:
    model = Qwen3ForCausalLM(config)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model.eval()


def adapted_from(folder: Path, config: Any, *, base: Path) -> Adapted:
    model = PeftModel.from_pretrained(base_model(base, config), folder)
    return Adapted(model.eval(), folder / adapter_files.WEIGHTS)


def make_adapter(folder: Path, config: Any, *, seed: int) -> Adapted:
    """An adapter with second factors so large that it changes what is said, in `folder`/SEED."""
    torch.manual_seed(seed)
    settings = LoraConfig(
        r=RANK, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", bias="none"
    )
    made = get_peft_model(base_model(folder, config), settings)
    for name, parameter in made.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(folder / str(seed))
    return Adapted(made.eval(), folder / str(seed) / adapter_files.WEIGHTS)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["untied", "tied"])
async def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    folder, tied = tmp_path_factory.mktemp(request.param), request.param == "tied"
    base = make(folder, tied=tied, seed=1)
    base.path.rename(folder / "model.safetensors")
    old, new = (make_adapter(folder, base.model.config, seed=seed) for seed in (2, 3))
    config = (old.path.parent / adapter_files.CONFIG).read_bytes()
    settings = AdapterSettings(config=config, max_staleness=MAX_STALENESS)
    with prepared():
        async with started(folder, adapters=settings) as engine:
            yield Bench(engine, old, new)


def adapters_of(bench: Bench) -> Adapters:
    adapters = bench.engine.adapters
    assert adapters is not None
    return adapters


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_are_those_of_peft(bench: Bench, temperature: float) -> None:
    version = await bench.load(bench.old)
    prompts = [prompt_of(num) for num in (1, 2, 31, 32, 33, 75)]
    done = await asyncio.gather(
        *(bench.sample(prompt, 24, temperature=temperature) for prompt in prompts)
    )
    without = Reference(bench.old.model.get_base_model(), bench.old.path)
    for prompt, generated in zip(prompts, done, strict=True):
        assert [(s.version, s.start, s.end) for s in generated.spans] == [(version, 0, 24)]
        assert gap(bench.old, prompt, generated, temperature=temperature).max() <= EXACT
    with bench.old.model.disable_adapter():
        assert gap(without, prompts[-1], done[-1], temperature=temperature).max() > 0.1


async def test_the_canary_is_that_of_peft(bench: Bench) -> None:
    await bench.load(bench.new)
    rows = canary.rows(VOCABULARY)
    assert np.abs(await bench.engine.row_logprobs(rows) - bench.new.rows(rows)).max() <= EXACT


async def test_a_request_keeps_its_adapter_and_a_new_one_has_the_newest(bench: Bench) -> None:
    """Nothing is paused and nothing computed again: each token's log-probability is that of the
    version in its label, over the whole prefix."""
    before = await bench.load(bench.old)
    prompts = [prompt_of(num) for num in (3, 20, 50)]
    running = [asyncio.create_task(bench.sample(prompt, 300)) for prompt in prompts]
    await until(lambda: bench.engine.running == len(prompts))
    await bench.sample(prompt_of(3), 8)  # when it has ended, the others have begun
    after = await bench.load(bench.new)
    assert not any(task.done() for task in running)
    later = await bench.sample(prompts[0], 20)
    assert not any(task.done() for task in running)
    assert [span.version for span in later.spans] == [after]
    assert gap(bench.new, prompts[0], later).max() <= EXACT
    for prompt, task in zip(prompts, running, strict=True):
        generated = await task
        assert [(s.version, s.start, s.end) for s in generated.spans] == [(before, 0, 300)]
        assert gap(bench.old, prompt, generated).max() <= EXACT


async def test_no_cached_block_is_of_another_version(bench: Bench) -> None:
    """C24: the same greedy request under the next version, and under the first one again, which
    then has another name."""
    from vllm import SamplingParams

    prompt = prompt_of(200)

    async def cached_tokens() -> int:
        with adapters_of(bench).used() as adapter:
            output = await bench.engine._run(
                prompt, SamplingParams(max_tokens=1, temperature=0.0), adapter=adapter
            )
        return int(output.num_cached_tokens)

    async def greedy() -> Generated:
        return await bench.sample(prompt, 24, temperature=0.0)

    await bench.load(bench.old)
    first, again = await greedy(), await greedy()
    assert first.token_ids == again.token_ids == bench.old.greedy(prompt, 24)
    assert await cached_tokens() > 0
    await bench.load(bench.new)
    assert await cached_tokens() == 0
    second = await greedy()
    assert second.token_ids == bench.new.greedy(prompt, 24) != first.token_ids
    assert gap(bench.new, prompt, second).max() <= EXACT
    await bench.load(bench.old)
    assert await cached_tokens() == 0
    await bench.load(bench.old)
    third = await greedy()
    assert third.token_ids == first.token_ids
    assert gap(bench.old, prompt, third).max() <= EXACT


async def test_old_adapters_are_removed_when_nothing_needs_them(bench: Bench) -> None:
    """`max_staleness` behind stays; older ones go, but not while a request runs with one, nor the
    file that it came from."""
    adapters = adapters_of(bench)
    first = await bench.load(bench.old)
    long = asyncio.create_task(bench.sample(prompt_of(9), 400))
    await until(lambda: bench.engine.running == 1)
    mid = await bench.load(bench.new)
    assert adapters.held == [(first, 1), (mid, 0)]
    last = await bench.load(bench.old)
    newest = await bench.load(bench.new)
    assert not long.done()
    assert adapters.held == [(first, 1), (last, 0), (newest, 0)]
    loaded = await bench.engine._llm.list_loras()
    assert len(loaded) == 3
    assert len((await long).token_ids) == 400
    following = await bench.load(bench.old)
    assert adapters.held == [(newest, 0), (following, 0)]
    assert len(await bench.engine._llm.list_loras()) == 2
    folders = [*bench.old.path.parent.glob("adapter-*"), *bench.new.path.parent.glob("adapter-*")]
    assert len(folders) == 2


async def test_the_load_path_is_proven_even_of_an_adapter_that_is_zero(
    bench: Bench, tmp_path: Path
) -> None:
    """As an adapter is before its first step: only what is added to its second factors moves the
    canary. The perturbed one is not kept."""
    tensors = load_file(bench.old.path)
    zero = {name: t * 0 if ".lora_B." in name else t for name, t in tensors.items()}
    base = bench.old.path.parents[1]
    folder = base / "zero"
    folder.mkdir()
    save_file(zero, folder / adapter_files.WEIGHTS)
    shutil.copyfile(bench.old.path.parent / adapter_files.CONFIG, folder / adapter_files.CONFIG)
    reference = adapted_from(folder, bench.old.model.get_base_model().config, base=base)
    rows, engine = canary.rows(VOCABULARY), bench.engine
    perturbed = perturbed_copy(reference.path)
    await engine.load(perturbed, 0)
    engine_perturbed = await engine.row_logprobs(rows)
    bench.version += 1
    await engine.load(reference.path, bench.version)
    assert 0 not in [version for version, _ in adapters_of(bench).held]
    measured = {
        "engine_true": await engine.row_logprobs(rows),
        "engine_perturbed": engine_perturbed,
        "trainer_true": reference.rows(rows),
        "trainer_perturbed": reference.with_weights(perturbed).rows(rows),
    }
    proof = prove(**measured, dtypes={"float32"})
    assert proof.movement > 0.01
    assert proof.movement_error < proof.movement / 1000
    assert proof.true_error < EXACT
    # An engine that serves without the adapter is found.
    with pytest.raises(LoadNotProven):
        prove(**measured | {"engine_perturbed": measured["engine_true"]}, dtypes={"float32"})


async def test_a_broken_adapter_never_serves(bench: Bench, tmp_path: Path) -> None:
    version = await bench.load(bench.old)
    tensors = load_file(bench.new.path)
    odd = {name.replace("q_proj", "z_proj"): tensor for name, tensor in tensors.items()}
    save_file(odd, tmp_path / "odd.safetensors")
    with pytest.raises(Exception, match=r"z_proj|method failed") as error:
        await bench.engine.load(tmp_path / "odd.safetensors", 1000)
    assert not isinstance(error.value, EngineDead)
    prompt = prompt_of(9)
    generated = await bench.sample(prompt, 16)
    assert [span.version for span in generated.spans] == [version]
    assert gap(bench.old, prompt, generated).max() <= EXACT
    settings = AdapterSettings(
        config=(bench.old.path.parent / adapter_files.CONFIG).read_bytes(),
        max_staleness=MAX_STALENESS,
    )
    with pytest.raises(UserError, match=r"^trainer\.lora\.publish: .* set it to \"merged\""):
        await Adapters(bench.engine._llm, settings).load(tmp_path / "odd.safetensors", 1000)
    assert [path.name for path in await asyncio.to_thread(lambda: [*tmp_path.iterdir()])] == [
        "odd.safetensors"
    ]
    # As after a canary that has failed: nothing runs until a load is proven.
    await bench.engine.pause()
    waiting = asyncio.create_task(bench.sample(prompt, 16))
    await asyncio.wait({waiting}, timeout=0.3)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    later = await bench.load(bench.new)
    generated = await bench.sample(prompt, 16)
    assert [span.version for span in generated.spans] == [later]
    assert gap(bench.new, prompt, generated).max() <= EXACT
    assert bench.engine.running == 0


async def test_merged_weights_say_what_the_adapter_says(bench: Bench, tmp_path: Path) -> None:
    """The same rows by an engine that has the adapter merged into its weights."""
    await bench.load(bench.new)
    rows = canary.rows(VOCABULARY)
    adapted = await bench.engine.row_logprobs(rows)
    base = bench.new.path.parents[1]
    merged = PeftModel.from_pretrained(
        base_model(base, bench.new.model.get_base_model().config), bench.new.path.parent
    ).merge_and_unload()
    merged.save_pretrained(tmp_path)
    with prepared():
        async with started(tmp_path, with_weights=True) as engine:
            assert np.abs(await engine.row_logprobs(rows) - adapted).max() <= EXACT
    assert np.abs(Reference(merged, base).rows(rows) - adapted).max() <= EXACT
    with bench.new.model.disable_adapter():
        assert np.abs(Reference(bench.new.model, base).rows(rows) - adapted).max() > 0.1
