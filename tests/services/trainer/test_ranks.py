"""Two ranks against one, by real processes and gloo; each pair of processes serves many tests, and
goes back to its first weights before each."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.common import canary
from services.common.config import Recipe
from services.common.errors import UserError
from services.trainer.device import choose_device
from services.trainer.learner import Learner
from services.trainer.ranks import Group
from services.trainer.sharding import local_rows
from services.trainer.tensor_files import read_weights
from services.trainer.types import TrainSample
from tests.services.trainer.folders import make_folder
from tests.services.trainer.numerics import make_groups
from tests.services.trainer.ranked import (
    halves,
    kept,
    one_by_one,
    ranked,
    recipe_for,
    state_in,
    step,
)

ROWS = canary.rows(50)[:8]

pytestmark = pytest.mark.timeout(240)


@dataclass
class World:
    """Two ranks, and what one rank is compared by."""

    two: Learner
    single: Recipe
    tolerance: float
    """Relative."""
    nodes: int

    def one(self) -> Learner:
        return Learner(self.single)


CASES: dict[str, dict[str, Any]] = {
    "untied-float32": {},
    # Recomputed layers gather their shards within backward.
    "tied-bfloat16": {"dtype": "bfloat16", "gradient_checkpointing": True},
    # A machine each, which share no memory.
    "tied-float32-nodes": {"nodes": 2},
}


@pytest.fixture(scope="module", params=CASES)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[World, Path]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_folder(folder / "model", tie_word_embeddings="tied-" in request.param[:5])
    keys = CASES[request.param]
    with ranked(recipe_for(model, ranks=2, **keys)) as two:
        tolerance = 1e-5 if "float32" in request.param else 2e-3
        begin = kept(two, folder / "begin")
        single = recipe_for(model, **{**keys, "nodes": 1})
        yield World(two, single, tolerance, keys.get("nodes", 1)), begin


@pytest.fixture
def world(running: tuple[World, Path]) -> World:
    made, begin = running
    made.two.restore(begin)
    return made


def samples_of(seed: int) -> list[TrainSample]:
    return make_groups(seed=seed, num_groups=2, generations=4, prompt=10, completion=6)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, over the whole tensor."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_the_gradient_is_that_of_one_rank(world: World, tmp_path: Path) -> None:
    one, rows = world.one(), halves(samples_of(0))
    both = step(world.two, rows)
    alone = step(one, one_by_one(rows))
    assert both.loss == pytest.approx(alone.loss, rel=world.tolerance)
    assert both.grad_norm == pytest.approx(alone.grad_norm, rel=world.tolerance)
    found, wanted = state_in(kept(world.two, tmp_path / "2")), state_in(kept(one, tmp_path / "1"))
    assert found.keys() == wanted.keys()
    for name in found:
        if name.startswith("exp_avg."):  # of a first step: a tenth of the gradient
            assert distance(found[name], wanted[name]) < world.tolerance, name


def test_the_curve_of_losses_is_that_of_one_rank(world: World, tmp_path: Path) -> None:
    one = world.one()
    for number in range(5):
        rows = halves(samples_of(number))
        both, alone = step(world.two, rows), step(one, one_by_one(rows))
        assert both.loss == pytest.approx(alone.loss, rel=world.tolerance), number
        for name in ("num_rows", "num_samples", "trained_tokens", "forwarded_tokens", "raw_tokens"):
            assert getattr(both, name) == getattr(alone, name), name
        assert both.statistics.tokens == alone.statistics.tokens
        assert both.statistics.guarded == alone.statistics.guarded
        assert both.statistics.lags[0].tokens == alone.statistics.lags[0].tokens
        assert both.statistics.clip_high_max == pytest.approx(alone.statistics.clip_high_max)
        assert both.learning_rate == alone.learning_rate
        assert len(both.rank_fwd_bwd_s) == 2
        assert min(both.rank_fwd_bwd_s) > 0
    for learner in (world.two, one):
        num_tensors, _ = learner.write_weights(tmp_path / f"{id(learner)}.safetensors")
        assert num_tensors == len(load_file(tmp_path / f"{id(learner)}.safetensors"))
    published = load_file(tmp_path / f"{id(world.two)}.safetensors")
    wanted = load_file(tmp_path / f"{id(one)}.safetensors")
    assert published.keys() == wanted.keys()
    for name, tensor in published.items():
        assert tensor.dtype == wanted[name].dtype
        assert distance(tensor, wanted[name]) < 10 * world.tolerance, name


def test_what_is_published_at_the_start_is_the_model(world: World, tmp_path: Path) -> None:
    world.two.write_weights(tmp_path / "1.safetensors")
    published = load_file(tmp_path / "1.safetensors")
    original = load_file(world.two.folder / "model.safetensors")
    assert published.keys() == original.keys()
    for name, tensor in published.items():
        assert torch.equal(tensor, original[name].to(tensor.dtype)), name


def test_canaries_are_those_of_one_rank_and_leave_no_trace(world: World, tmp_path: Path) -> None:
    one, path = world.one(), tmp_path / "1.safetensors"
    world.two.write_weights(path)
    absolute = 1e-4 if world.tolerance < 1e-4 else 0.1
    before = kept(world.two, tmp_path / "before")
    wanted = one.perturbed_logprobs(path, ROWS)
    np.testing.assert_allclose(world.two.perturbed_logprobs(path, ROWS), wanted, atol=absolute)
    wanted = one.canary_logprobs(ROWS)
    np.testing.assert_allclose(world.two.canary_logprobs(ROWS), wanted, atol=absolute)
    after = state_in(kept(world.two, tmp_path / "after"))
    assert all(torch.equal(after[name], tensor) for name, tensor in state_in(before).items())


def test_a_checkpoint_of_two_ranks_is_read_by_one_and_back(world: World, tmp_path: Path) -> None:
    for number in range(2):
        step(world.two, halves(samples_of(number)))
    by_two = kept(world.two, tmp_path / "two")
    assert sorted(path.name for path in by_two.iterdir()) == [
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    one = world.one()
    one.restore(by_two)
    assert one.num_applied == 2
    by_one = kept(one, tmp_path / "one")
    assert sorted(path.name for path in by_one.iterdir()) == ["rank-00000.safetensors"]
    both, alone = state_in(by_two), state_in(by_one)
    assert both.keys() == alone.keys()
    assert all(torch.equal(both[name], alone[name]) for name in both)
    assert read_weights(by_two).keys() == load_file(one.folder / "model.safetensors").keys()

    rows = halves(samples_of(2))
    wanted = step(world.two, rows)
    world.two.restore(by_one)
    again = step(world.two, rows)
    assert again.loss == wanted.loss
    assert again.grad_norm == wanted.grad_norm
    alone_again = step(one, one_by_one(rows))
    assert alone_again.loss == pytest.approx(wanted.loss, rel=world.tolerance)


def test_an_abandoned_step_leaves_nothing(world: World) -> None:
    rows = halves(samples_of(0))
    wanted = step(world.one(), one_by_one(rows))
    world.two.accumulate(halves(samples_of(1))[0])
    world.two.abandon()
    found = step(world.two, rows)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=world.tolerance)
    assert found.num_samples == wanted.num_samples


def test_a_nan_on_one_rank_is_no_step_on_any(world: World) -> None:
    [[first, second], last] = halves(samples_of(0))
    for sample in second.samples:
        sample.logprobs[:] = np.nan
    found = step(world.two, [[first, second], last])
    assert found.statistics.guarded["old_logprobs"] > 0
    assert found.applied  # those terms are left out, on the other rank
    assert found.num_samples == 8


def test_a_rank_that_cannot_write_fails_the_checkpoint(world: World, tmp_path: Path) -> None:
    (tmp_path / "rank-00001.safetensors").mkdir()
    with pytest.raises(OSError, match=r"rank 1: .*rectory"):
        world.two.snapshot().write(tmp_path)
    (tmp_path / "rank-00001.safetensors").rmdir()
    assert world.two.snapshot().write(tmp_path).keys() == {
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    }


def test_a_published_file_is_read_where_rank_0_is(world: World, tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    world.two.write_weights(path)
    wanted = world.two.perturbed_logprobs(path, ROWS)
    if world.nodes == 1:
        return
    with path.open("rb") as file:
        only_here = Path(f"/proc/self/fd/{file.fileno()}")  # other processes have none of that name
        np.testing.assert_array_equal(world.two.perturbed_logprobs(only_here, ROWS), wanted)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 50])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_of_ranks_are_those_of_torchs_chunks(num_rows: int, size: int) -> None:
    rows = torch.arange(num_rows)
    chunks = [chunk.tolist() for chunk in rows.chunk(size)]
    chunks += [[]] * (size - len(chunks))
    assert [rows[local_rows(num_rows, Group(rank, size))].tolist() for rank in range(size)] == (
        chunks
    )


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"^trainer\.ranks: 2 ranks need a GPU each, and 1 "):
        choose_device("auto", rank=0, size=2)
