"""Replicas that fetch real files over loopback and send them to each other, and a trainer that
counts what it sends and can be made to spoil it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from headrace.v1 import policy_pb2_grpc
from safetensors.numpy import save_file

from services.common import grpc_kit
from services.common.config import Network
from services.common.lifecycle import Lifecycle, cancel
from services.common.recorder import Recorder
from services.generator.weight_peers import PeerServicer
from services.generator.weights import Announcement, PolicyClient
from services.trainer.delta_maker import DeltaMaker, Wanted
from services.trainer.policy import PolicyServicer
from services.trainer.published import Published
from tests.services.common import safetensors_bytes
from tests.services.generator.fakes import recorder
from tests.services.generator.trainers import Trainer, trainer, weights_of

Spoil = Callable[["Sending", Any, Any], Any]
"""Called with the sender, a piece on its way and the call's context; what is sent, None ends it."""


class Sending(PolicyServicer):
    """A policy service that notes each piece that it sends: by digest and offset."""

    def __init__(self, spoil: Spoil | None = None) -> None:
        super().__init__(recorder())
        self.sent: Counter[tuple[str, int]] = Counter()
        self.spoil = spoil

    async def FetchWeights(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for piece in super().FetchWeights(request, context):
            offset = piece.offset
            if self.spoil is not None:
                piece = self.spoil(self, piece, context)
                if asyncio.iscoroutine(piece):
                    piece = await piece
                if piece is None:
                    return
            self.sent[request.sha256, offset] += 1
            yield piece

    def chunks(self, published: Published) -> list[int]:
        """How often each chunk of the whole file was sent."""
        pieces = published.file.pieces
        return [self.sent[pieces.sha256, pieces.bounds(piece)[0]] for piece in range(pieces.num)]


@dataclass
class Replica:
    """One that fetches, and sends to others."""

    client: PolicyClient
    recorder: Recorder
    port: int
    served: Any
    path: Path | None = None

    async def fetch(self, version: int = 1) -> Path:
        self.path = await self.client.fetch(await self.client.newer_than(version - 1))
        return self.path

    async def announced(self, suits: Callable[[Announcement], bool]) -> Announcement:
        """The latest announcement, once it suits."""
        return await self.client._latest_that(suits)

    async def serve(self, version: int) -> None:
        """Say that what was fetched is served, as after a load."""
        assert self.path is not None
        self.client.keep_only(self.path)
        await self.client.report(version=version, pause_s=0.0, canary_gap=0.0)


@dataclass
class Fleet:
    """A trainer and its replicas."""

    trainer: Trainer
    sending: Sending
    stack: AsyncExitStack
    network: Network
    replicas: list[Replica] = field(default_factory=list)

    async def publish(
        self, arrays: "dict[str, np.ndarray[Any, Any]]", *, step: int = 1
    ) -> Published:
        """Publish float32 tensors as a file."""
        save_file(arrays, self.trainer.store.next_path())
        return await self._publish(dtype="float32", step=step)

    async def publish_words(self, words: "np.ndarray[Any, Any]", *, step: int) -> Published:
        """Publish bfloat16 tensors of these bits, as two."""
        halves = dict(zip("ab", np.split(words, [len(words) // 2]), strict=True))
        tensors = {name: half.tobytes() for name, half in halves.items()}
        safetensors_bytes.write(self.trainer.store.next_path(), tensors)
        return await self._publish(dtype="bfloat16", step=step)

    async def _publish(self, *, dtype: str, step: int) -> Published:
        values = weights_of(1)
        return await self.trainer.store.publish(
            step=step,
            num_tensors=1,
            dtype=dtype,
            canary_logprobs=values,
            perturbed_logprobs=None,
        )

    async def make_delta(self, published: Published) -> None:
        """Have the difference to the version before made and announced."""
        before = self.trainer.store.before(published.version)
        assert before is not None
        maker = DeltaMaker(self.sending._recorder, announce=self.trainer.store.add_delta)
        maker.make(
            Wanted(
                published.version,
                published.path,
                published.file.pieces,
                before.version,
                before.sha256,
                before.path,
            )
        )
        await asyncio.gather(*maker._tasks)

    async def join(self, *, port: int | None = None, network: Network | None = None) -> Replica:
        """A replica that watches; `port` is where it says it sends from, by default a real one."""
        number, measured = len(self.replicas), recorder()
        network = network or self.network
        peers = PeerServicer()
        add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
        served = await grpc_kit.serve(
            network, Lifecycle("generator"), [(add, peers, "headrace.v1.PolicyService")]
        )
        self.stack.push_async_callback(served.stop, 0)
        network = network.model_copy(update={"trainer": f"127.0.0.1:{self.trainer.port}"})
        channel = grpc_kit.channel(network.trainer, network)
        client = PolicyClient(
            channel,
            generator=f"generator-{number}",
            network=network,
            recorder=measured,
            port=served.port if port is None else port,
        )
        peers.open(client.find_file)
        watch = asyncio.create_task(client.watch())
        self.stack.push_async_callback(channel.close, None)
        self.stack.push_async_callback(client.close)
        self.stack.push_async_callback(cancel, watch)
        made = Replica(client, measured, served.port, served)
        self.replicas.append(made)
        return made


@asynccontextmanager
async def fleet(
    folder: Path,
    *,
    spoil: Spoil | None = None,
    max_staleness: int = 2,
    network: Network | None = None,
) -> AsyncIterator[Fleet]:
    sending = Sending(spoil)
    async with (
        trainer(
            folder, servicer=lambda: sending, max_staleness=max_staleness, network=network
        ) as made,
        AsyncExitStack() as stack,
    ):
        yield Fleet(made, sending, stack, network or Network())


def floats(num_bytes: int, seed: int = 0) -> "dict[str, np.ndarray[Any, Any]]":
    """A tensor of about so many bytes."""
    return {"w": np.random.default_rng(seed).random(num_bytes // 4, dtype=np.float32)}


def words(num: int, seed: int = 0) -> "np.ndarray[Any, Any]":
    """Bits of bfloat16 weights as of a model: normal, small."""
    values = np.random.default_rng(seed).standard_normal(num).astype(np.float32) * 0.02
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def stepped(before: "np.ndarray[Any, Any]", *, share: float, seed: int) -> "np.ndarray[Any, Any]":
    """The words after a step that moves a share of them by one bit."""
    moved = np.random.default_rng(seed).random(len(before)) < share
    return before + moved.astype(np.uint16)
