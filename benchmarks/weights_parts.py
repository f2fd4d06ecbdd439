"""The parts of benchmarks/weights.py: processes that publish and fetch as services do, what they
are compared with.
"""

import asyncio
import contextlib
import multiprocessing
import socket
import threading
import time
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from headrace.v1 import policy_pb2_grpc

from services.common import grpc_kit
from services.common.config import Network
from services.common.config import Recorder as Settings
from services.common.lifecycle import Lifecycle, cancel
from services.common.recorder import Recorder
from services.generator.weight_peers import PeerServicer
from services.generator.weights import PolicyClient
from services.trainer.policy import PolicyServicer, PolicyStore

SERVICE = "headrace.v1.PolicyService"
BLOCK_BYTES = 1 << 20


class Started:
    """A process and the pipe to it."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        # It has children of its own, where it runs an engine.
        self.process = context.Process(target=target, args=(other, *arguments))
        self.process.start()
        other.close()  # so that the end of the process is heard

    @cached_property
    def first(self) -> Any:
        """What it says when it is ready."""
        return self.pipe.recv()

    def hear(self, patience_s: float) -> Any:
        """What it says next; TimeoutError when it says nothing, EOFError when it has ended."""
        if not self.pipe.poll(patience_s):
            raise TimeoutError(f"nothing from {self.process.name} in {patience_s:g} s")
        return self.pipe.recv()

    def end(self) -> None:
        """Have it return."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()


def recorder(service: str) -> Recorder:
    """One that sends nothing."""
    return Recorder(
        run="bench", producer=service, service=service, settings=Settings(), channel=None
    )


def trainer(pipe: Connection, folder: str, size_bytes: int) -> None:
    """A process with a policy service: told "publish", it publishes `size_bytes` and answers when
    that began, when it was announced, and what it has sent so far."""
    asyncio.run(_trainer(pipe, Path(folder), size_bytes))


async def _trainer(pipe: Connection, folder: Path, size_bytes: int) -> None:
    store = PolicyStore(checkpoints=folder, attempt=1, vocab_size=50, max_staleness=1)
    servicer = PolicyServicer(recorder("trainer"))
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    servicer.open(store, folder)
    add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
    served = await grpc_kit.serve(Network(), Lifecycle("trainer"), [(add, servicer, SERVICE)])
    pipe.send(served.port)
    rows = store.canary_rows
    values = np.zeros((rows.shape[0], rows.shape[1] - 1), np.float32)
    block = np.random.default_rng(0).bytes(BLOCK_BYTES)
    step = 0
    try:
        while await asyncio.to_thread(pipe.recv) == "publish":
            step += 1
            with store.next_path().open("wb") as file:
                file.write(step.to_bytes(8, "little"))
                for _ in range(size_bytes // BLOCK_BYTES):
                    file.write(block)
            begin_s = time.monotonic()
            await store.publish(
                step=step,
                num_tensors=1,
                dtype="float32",
                canary_logprobs=values,
                perturbed_logprobs=None,
            )
            pipe.send((begin_s, time.monotonic(), servicer.sent_bytes))
    finally:
        await served.stop(0)
        store.close()


def replica(pipe: Connection, name: str, port: int) -> None:
    """A process that fetches the version it is told and answers when it had it whole; other
    replicas may have it from here. Told "keep N" it deletes others than version N."""
    asyncio.run(_replica(pipe, name, port))


async def _replica(pipe: Connection, name: str, port: int) -> None:
    peers, network = PeerServicer(), Network(trainer=f"127.0.0.1:{port}")
    add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
    served = await grpc_kit.serve(network, Lifecycle("generator"), [(add, peers, SERVICE)])
    channel = grpc_kit.channel(network.trainer, network)
    client = PolicyClient(
        channel,
        generator=name,
        network=network,
        recorder=recorder("generator"),
        port=served.port,
    )
    peers.open(client.find_file)
    begin_s = time.monotonic()
    watch = asyncio.create_task(client.watch())
    pipe.send("ready")
    try:
        while version := await asyncio.to_thread(pipe.recv):
            target = await client.newer_than(version - 1)
            path = await client.fetch(target)
            pipe.send((begin_s, time.monotonic()))
            client.keep_only(path)
            await client.report(version=version, pause_s=0.0, canary_gap=0.0)
    finally:
        await cancel(watch)
        await client.close()
        await channel.close(None)
        await served.stop(0)


def raw_copy_s(source: Path, target: Path) -> float:
    """Seconds to copy a file by reading and writing blocks."""
    begin_s = time.monotonic()
    buffer = bytearray(BLOCK_BYTES)
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        while num := read.readinto(buffer):
            write.write(memoryview(buffer)[:num])
    return time.monotonic() - begin_s


def raw_tcp_s(source: Path, target: Path) -> float:
    """Seconds to send a file over one TCP connection on loopback by sendfile, and write it."""
    server = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        connect = socket.create_connection
        with server, connect(server.getsockname()) as connection, source.open("rb") as file:
            connection.sendfile(file)

    sending = threading.Thread(target=send)
    begin_s = time.monotonic()
    sending.start()
    connection, _ = server.accept()
    buffer = bytearray(BLOCK_BYTES)
    with connection, target.open("wb", buffering=0) as file:
        while num := connection.recv_into(buffer):
            file.write(memoryview(buffer)[:num])
    sending.join()
    return time.monotonic() - begin_s
