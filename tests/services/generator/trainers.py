"""The trainer's end of the policy, for tests: the real PolicyService over the real store, on
loopback, with weights that are one small matrix."""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from headrace.v1 import policy_pb2_grpc, transfer_pb2_grpc
from safetensors.numpy import save_file

from services.common import canary, grpc_kit
from services.common.config import Network
from services.common.lifecycle import Lifecycle
from services.common.recorder import Recorder
from services.generator.weights import PolicyClient
from services.launcher import tiny_tokenizer
from services.trainer import transfer_calls
from services.trainer.policy import PolicyServicer, PolicyStore
from services.trainer.published import Published
from services.trainer.transfer_calls import TransferServicer
from services.trainer.weight_group import WeightGroup
from tests.services.generator.fakes import recorder

VOCABULARY = 50
SHAPE = (canary.ROWS, canary.ROW_TOKENS - 1)
"""Of the weights `w`: a model whose log-probabilities of the canary are `w` itself."""


def weights_of(seed: int) -> "np.ndarray[Any, Any]":
    return -np.random.default_rng(seed).random(SHAPE, dtype=np.float32)


@dataclass
class Trainer:
    """One attempt of a trainer."""

    store: PolicyStore
    servicer: PolicyServicer
    port: int = 0

    async def publish(self, seed: int, *, provable: bool = True) -> Published:
        """Publish weights_of(seed) with their canary; without the proof's values as between two
        steps, when no generator is new."""
        weights = weights_of(seed)
        save_file({"w": weights}, self.store.next_path())
        return await self.store.publish(
            step=seed,
            num_tensors=1,
            dtype="float32",
            canary_logprobs=weights,
            perturbed_logprobs=perturbed(weights) if provable else None,
        )


def perturbed(weights: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    moved: np.ndarray[Any, Any] = weights * canary.factors("w", weights.shape)
    return moved


def model_folder(path: Path) -> Path:
    """A folder with what generators need besides weights."""
    if not path.exists():
        tiny_tokenizer.build_tokenizer().save_pretrained(path)
        (path / "config.json").write_text('{"model_type": "qwen3"}\n')
    return path


ServicerOf = Callable[[], PolicyServicer]
GroupOf = Callable[[PolicyServicer], WeightGroup]


@asynccontextmanager
async def trainer(
    folder: Path,
    *,
    attempt: int = 1,
    max_staleness: int = 2,
    network: Network | None = None,
    servicer: ServicerOf = lambda: PolicyServicer(recorder()),
    group_of: GroupOf | None = None,
) -> AsyncIterator[Trainer]:
    """A trainer that listens, with its checkpoints in `folder`, as a restarted one has them too;
    with `group_of` it broadcasts versions, too."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    chosen = servicer()
    group = chosen.group = None if group_of is None else group_of(chosen)
    store = PolicyStore(
        checkpoints=checkpoints,
        attempt=attempt,
        vocab_size=VOCABULARY,
        max_staleness=max_staleness,
        group=group,
    )
    made = Trainer(store, chosen)
    made.servicer.open(store, model_folder(folder / "model"))
    add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
    register: list[tuple[Any, Any, str]] = [(add, made.servicer, "headrace.v1.PolicyService")]
    if group is not None:
        add = transfer_pb2_grpc.add_TransferServiceServicer_to_server
        register.append((add, TransferServicer(group), transfer_calls.SERVICE))
    served = await grpc_kit.serve(network or Network(), Lifecycle("trainer"), register)
    made.port = served.port
    try:
        yield made
    finally:
        await served.stop(0)
        if group is not None:
            await group.close()
        store.close()


@asynccontextmanager
async def client_of(
    port: int,
    *,
    name: str = "generator-0",
    token_file: Path | None = None,
    measured: Recorder | None = None,
) -> AsyncIterator[PolicyClient]:
    """A replica's view of the trainer on `port`."""
    network = Network(
        trainer=f"127.0.0.1:{port}", token_file=None if token_file is None else str(token_file)
    )
    channel = grpc_kit.channel(network.trainer, network)
    client = PolicyClient(channel, generator=name, network=network, recorder=measured or recorder())
    try:
        yield client
    finally:
        await client.close()
        with contextlib.suppress(grpc.RpcError):
            await channel.close(None)
