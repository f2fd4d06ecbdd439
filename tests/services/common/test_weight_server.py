"""What a server holds in memory while many fetch from it."""

import asyncio
import sys
from pathlib import Path

import grpc
from headrace.v1 import policy_pb2 as wire
from headrace.v1 import policy_pb2_grpc

from services.common import grpc_kit
from services.common.config import Network

SIZE_BYTES = 200 << 20
NUM_FETCHERS = 16
STREAMS = 4

SERVER = """
import asyncio, sys
from pathlib import Path
from headrace.v1 import policy_pb2_grpc
from services.common import grpc_kit
from services.common.config import Network
from services.common.lifecycle import Lifecycle
from services.common.weight_files import Held, describe
from services.generator.weight_peers import PeerServicer

async def main():
    path = Path(sys.argv[1])
    held = Held(path, describe(path, chunk_bytes=1 << 20), whole=True)
    peers = PeerServicer()
    peers.open(lambda sha256: held)
    add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
    register = [(add, peers, "headrace.v1.PolicyService")]
    served = await grpc_kit.serve(Network(), Lifecycle("generator"), register)
    print(served.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def memory_bytes(pid: int, key: str) -> int:
    """Of a process, as the kernel tells: VmRSS now, VmHWM at most so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


async def fetch(port: int) -> int:
    """Read a whole file as a fetch does, several ranges at a time, and keep nothing; the bytes."""
    network, share = Network(), SIZE_BYTES // STREAMS
    channels = [
        grpc_kit.channel(f"127.0.0.1:{port}", network, own_connection=True) for _ in range(STREAMS)
    ]

    async def read(channel: grpc.aio.Channel, offset: int) -> int:
        request = wire.FetchWeightsRequest(offset=offset, length=share)
        call = policy_pb2_grpc.PolicyServiceStub(channel).FetchWeights(request)
        return sum([len(piece.data) async for piece in call])

    try:
        return sum(
            await asyncio.gather(
                *(read(channel, share * number) for number, channel in enumerate(channels))
            )
        )
    finally:
        await asyncio.gather(*(channel.close(None) for channel in channels))


async def test_the_memory_of_a_server_does_not_grow_with_those_who_fetch(tmp_path: Path) -> None:
    """Sixteen at once want 0.2 GB each: 3.2 GB go through a server that grows by far less than
    one file."""
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(SIZE_BYTES)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, str(path)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        before = memory_bytes(process.pid, "VmRSS")
        fetched = await asyncio.gather(*(fetch(port) for _ in range(NUM_FETCHERS)))
        assert fetched == [SIZE_BYTES] * NUM_FETCHERS
        grown = memory_bytes(process.pid, "VmHWM") - before
        assert grown < SIZE_BYTES // 2, f"{grown >> 20} MiB"
        print(f"grown by {grown >> 20} MiB")
    finally:
        process.kill()
        await process.wait()
