"""Real queue servers of several processes: a primary and its replica with a Sentinel, and a cluster
of three.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from services.launcher import embedded_queue
from tests.conftest import free_port

RUN_SLOT = key_slot(b"r")
"""Of the keys of a run named r."""

SLOTS = 16384
PASSWORD = "se/cret@1"
PATIENCE_S = 30.0


def wait_until(condition: Callable[[], object]) -> None:
    """Return once `condition()` is true; a server that does not answer yet is none."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(redis.ConnectionError, redis.ReadOnlyError):
            if condition():
                return
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


class Node:
    """A Valkey (or another server) in a folder of its own, that can be ended and started again."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        password: str | None = None,
        binary: str | Path | None = None,
    ) -> None:
        self.folder, self.port = folder, free_port()
        folder.mkdir()
        self._binary = str(binary or embedded_queue.binary())
        self._arguments, self._password = arguments, password
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        address = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command = [self._binary, *self._config(), *address, *self._arguments]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        with self.admin() as client:
            wait_until(lambda: self._running() and client.ping())

    def _config(self) -> list[str]:
        return []

    def _running(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()
        return True

    def kill(self) -> None:
        """SIGKILL; nothing where it has ended before."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    @contextmanager
    def admin(self) -> Iterator[Any]:
        """A client of just this server."""
        with redis.Redis(port=self.port, password=self._password) as client:
            yield client


class _SentinelNode(Node):
    def _config(self) -> list[str]:
        return [str(self.folder / "sentinel.conf")]

    def __init__(self, folder: Path, *, primary: int) -> None:
        """A Sentinel that alone decides about the primary at that port."""
        self._primary = primary
        super().__init__(folder, "--sentinel", password=PASSWORD)

    def start(self) -> None:
        lines = [
            f"sentinel monitor water 127.0.0.1 {self._primary} 1",
            f"sentinel auth-pass water {PASSWORD}",
            "sentinel down-after-milliseconds water 400",
            "sentinel failover-timeout water 2000",
            f"requirepass {PASSWORD}",
        ]
        (self.folder / "sentinel.conf").write_text("".join(f"{line}\n" for line in lines))
        super().start()


class Watched:
    """A primary, its replica, and a Sentinel that watches them as `water`."""

    def __init__(self, folder: Path) -> None:
        secret = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
        settings = ("--save", "", "--repl-diskless-sync-delay", "0", *secret)
        self._nodes: list[Node] = []
        self.primary = self._add(Node(folder / "a", *settings, password=PASSWORD))
        replica = ("--replicaof", f"127.0.0.1 {self.primary.port}")
        self.replica = self._add(Node(folder / "b", *settings, *replica, password=PASSWORD))
        self.sentinel = self._add(_SentinelNode(folder / "s", primary=self.primary.port))
        with self.sentinel.admin() as client:
            wait_until(lambda: client.sentinel_slaves("water"))
        self.in_step()

    def _add(self, node: Node) -> Node:
        self._nodes.append(node)
        return node

    @property
    def url(self) -> str:
        """With a seed that nobody listens at, since Sentinels may be away, too."""
        hosts = f"127.0.0.1:{free_port()},127.0.0.1:{self.sentinel.port}"
        secret = "se%2Fcret%401"
        return f"redis+sentinel://:{secret}@{hosts}/water/0?sentinel_password={secret}"

    def in_step(self) -> None:
        """Wait until the replica has everything."""
        with self.primary.admin() as client:
            offset = client.info("replication")["master_repl_offset"]

            def has_all() -> bool:
                told = client.info("replication")
                return bool(told["connected_slaves"] and told["slave0"]["offset"] >= offset)

            wait_until(has_all)

    def cut(self) -> None:
        """From now on the replica receives nothing more."""
        with self.replica.admin() as client:
            client.replicaof("127.0.0.1", free_port())

    def close(self) -> None:
        """End them all."""
        for node in self._nodes:
            node.kill()


class Cluster:
    """Three nodes that share the slots; `home` has those of a run named r."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[Node] = []
        for number in range(3):
            settings = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1500")
            kept = ("--appendonly", "yes", "--save", "", "--cluster-port", str(free_port()))
            self.nodes.append(Node(folder / str(number), *settings, *kept))
        first, *_ = self.nodes
        for number, node in enumerate(self.nodes):
            with node.admin() as client:
                begin, end = number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER ADDSLOTSRANGE", begin, end)
                bus = client.config_get("cluster-port")["cluster-port"]
            with first.admin() as client:
                client.execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)
        for node in self.nodes:
            wait_until(lambda node=node: self._whole(node))  # type: ignore[misc]
        self.home = self.nodes[RUN_SLOT * 3 // SLOTS]
        self.other = next(node for node in self.nodes if node is not self.home)

    def _whole(self, node: Node) -> bool:
        with node.admin() as client:
            state = client.execute_command("CLUSTER INFO")["cluster_state"]
            return state == "ok" and len(client.execute_command("CLUSTER SLOTS")) == 3

    @property
    def url(self) -> str:
        """Of all three nodes."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}"

    def emptied(self) -> str:
        """Its URL, without anything in it."""
        for node in self.nodes:
            with node.admin() as client:
                client.flushall()
        return self.url

    def begin_moving(self, *, to: Node) -> list[bytes]:
        """The run's slot is on its way to `to`; the keys that are yet to move."""
        with self.home.admin() as source, to.admin() as target:
            names = [client.execute_command("CLUSTER MYID") for client in (source, target)]
            ids = [name.decode() if isinstance(name, bytes) else name for name in names]
            target.execute_command("CLUSTER SETSLOT", RUN_SLOT, "IMPORTING", ids[0])
            source.execute_command("CLUSTER SETSLOT", RUN_SLOT, "MIGRATING", ids[1])
            keys: list[bytes] = source.execute_command("CLUSTER GETKEYSINSLOT", RUN_SLOT, 100)
        return keys

    def move(self, keys: list[bytes], *, to: Node) -> None:
        """Move some of the keys."""
        with self.home.admin() as source:
            source.execute_command(*("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS"), *keys)

    def end_moving(self, *, to: Node) -> None:
        """All keys are there: it is their home now."""
        with to.admin() as target:
            name = target.execute_command("CLUSTER MYID")
        for node in (to, *(each for each in self.nodes if each is not to)):
            with node.admin() as client:
                client.execute_command("CLUSTER SETSLOT", RUN_SLOT, "NODE", name)
        self.home, self.other = to, self.home

    def close(self) -> None:
        """End them all."""
        for node in self.nodes:
            node.kill()
