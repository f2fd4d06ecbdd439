"""A cluster of one machine: pods of the converted workloads on one podman network, probed as a node
probes them, scaled and replaced as controllers do it.
"""

import asyncio
import contextlib
import os
import shutil
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.containers.conversion import MEMORY, Workload
from tests.deploy.containers.engine import NETWORK, Engine, ToolFailed
from tests.deploy.containers.health import Health, Probe, is_serving, watch

POLL_S = 2.0
"""Between two looks at a container that is not ready yet."""

Say = Callable[[str], None]


class NotReady(Exception):
    """A pod would have been killed by its probes, or has ended, before it was ready."""


@dataclass
class Pod:
    """One that is played."""

    name: str
    workload: Workload
    host: str
    """Its address on the network."""
    played_s: float
    """By the monotonic clock."""
    health: Health = field(default_factory=Health)
    ready_after_s: float | None = None
    memory: Path | None = None
    """Where the kernel tells the most memory that its container has had."""
    peak_mib: int | None = None
    """As it was when last looked at."""
    watching: asyncio.Task[None] | None = None

    @property
    def container(self) -> str:
        """Of its service, as podman names it."""
        return f"{self.name}-{self.workload.container['name']}"


@dataclass(frozen=True)
class Ended:
    """How a pod that was told to stop has ended."""

    pod: str
    status: int
    """Of the service's process; 137: it was killed when the grace period was over."""
    seconds: float
    """From asking podman, which takes a while itself, to the process's end."""
    grace_s: int

    @property
    def well(self) -> bool:
        """By itself, in time."""
        return self.status == 0


class Cluster:
    """Pods by name. `async with` removes all of them, and their volumes, at the end."""

    def __init__(
        self, engine: Engine, workloads: Mapping[str, Workload], *, logs: Path, say: Say
    ) -> None:
        self._engine, self._workloads = engine, workloads
        self._logs, self._say = logs, say
        self._number: dict[str, int] = dict.fromkeys(workloads, 0)
        self.environment: dict[str, dict[str, str]] = {name: {} for name in workloads}
        """What is set beside the manifests, by workload."""
        self._claims: set[tuple[str, str]] = set()
        self.pods: dict[str, Pod] = {}
        self.every: list[Pod] = []
        """Those that are gone too."""
        self.ended: list[Ended] = []
        self.when_ready: Callable[[Pod], Awaitable[None]] | None = None
        """Called with each pod at the moment when it is seen to be ready."""

    async def __aenter__(self) -> "Cluster":
        await self._remove_all()
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *error: object) -> None:
        for pod in list(self.pods.values()):
            await self._unwatch(pod)
            with contextlib.suppress(ToolFailed):
                await self._keep_log(pod)
        await self._remove_all()

    def of(self, workload: str) -> list[Pod]:
        """Pods of a workload, the oldest first."""
        return [pod for pod in self.pods.values() if pod.workload.name == workload]

    async def apply(self) -> None:
        """Play all workloads with their replicas, at once, and return when all are ready."""
        names = [name for name, w in self._workloads.items() for _ in range(w.replicas)]
        await asyncio.gather(*(self.add(name) for name in names))

    async def add(self, workload: str) -> Pod:
        """Play one more pod; it is ready when this returns. NotReady."""
        pod = await self._play(self._workloads[workload])
        await self._ready(pod)
        return pod

    async def stop(self, pod: Pod) -> Ended:
        """SIGTERM, the grace period, SIGKILL; the pod is gone then, its volumes are not."""
        await self._unwatch(pod)
        pod.peak_mib = peak_mib(pod)
        begin_s = time.time()
        # The container, not the pod: podman stops pods one after another.
        await self._engine.asked("stop", "--time", str(pod.workload.grace_s), pod.container)
        found = await self._engine.inspected(pod.container)
        # "2026-01-31T12:00:00.123456789Z": to the millisecond is enough.
        end = datetime.fromisoformat(found["State"]["FinishedAt"][:23]).replace(tzinfo=UTC)
        seconds = max(0.0, end.timestamp() - begin_s)
        ended = Ended(pod.name, found["State"]["ExitCode"], seconds, pod.workload.grace_s)
        await self._keep_log(pod)
        await self._engine.asked("pod", "rm", "--force", pod.name)
        shutil.rmtree(f"{MEMORY}/{pod.name}", ignore_errors=True)
        del self.pods[pod.name]
        self.ended.append(ended)
        self._say(f"{pod.name} ended with {ended.status} after {seconds:.1f} s")
        return ended

    async def scale(self, workload: str, replicas: int) -> list[Ended]:
        """To so many pods. Down: the youngest go, as a ReplicaSet's do. Up: all are ready then."""
        pods = self.of(workload)
        if replicas > len(pods):
            await asyncio.gather(*(self.add(workload) for _ in range(replicas - len(pods))))
            return []
        return await asyncio.gather(*(self.stop(pod) for pod in pods[replicas:]))

    async def restart(self, workload: str) -> list[Ended]:
        """`kubectl rollout restart`, one pod after another."""
        ended = []
        for pod in self.of(workload):
            if pod.workload.surge:
                await self.add(workload)
                ended.append(await self.stop(pod))
            else:
                ended.append(await self.stop(pod))
                await self.add(workload)
        return ended

    async def restarts(self, pod: Pod) -> int:
        """How often its container has died and been started again."""
        return int((await self._engine.inspected(pod.container))["RestartCount"])

    async def run(self, pod: Pod, *command: str) -> str:
        """What a command prints inside the container. ToolFailed."""
        return await self._engine.asked("exec", pod.container, *command)

    async def inspected(self, pod: Pod) -> dict[str, Any]:
        """What podman knows of the container."""
        return await self._engine.inspected(pod.container)

    async def _play(self, workload: Workload) -> Pod:
        name = workload.pod_name(self._number[workload.name])
        # A StatefulSet's pod comes again under its name; a Deployment's never does.
        if workload.kind == "Deployment":
            self._number[workload.name] += 1
        for folder in workload.memory_folders(name):
            os.makedirs(folder, exist_ok=True)
            os.chmod(folder, 0o1777)
        # A claim is made once: its volume stays when its pod goes.
        documents = [
            document
            for document in workload.played(name, self.environment[workload.name])
            if (document["kind"], document["metadata"]["name"]) not in self._claims
        ]
        self._claims |= {
            (document["kind"], document["metadata"]["name"])
            for document in documents
            if document["kind"] == "PersistentVolumeClaim"
        }
        aliases = ",".join(f"alias={each}" for each in workload.names)
        begin_s = time.monotonic()
        await self._engine.asked(
            "kube",
            "play",
            "--network",
            f"{NETWORK}:{aliases}",
            "-",
            given=yaml.safe_dump_all(documents),
        )
        infra = await self._engine.asked("pod", "inspect", name, "--format={{.InfraContainerID}}")
        network = (await self._engine.inspected(infra.strip()))["NetworkSettings"]["Networks"]
        pod = Pod(name, workload, network[NETWORK]["IPAddress"], begin_s)
        state = (await self._engine.inspected(pod.container))["State"]
        process, pod.memory = int(state["Pid"]), _peak_file(state["CgroupPath"])
        self.pods[name] = pod
        self.every.append(pod)
        probes = {kind: Probe.of(kind, spec) for kind, spec in workload.probes.items()}

        async def ask(probe: Probe) -> bool:
            if probe.port is not None:
                return await is_serving(pod.host, probe)
            return await _succeeds_inside(process, workload, probe.command)

        pod.watching = asyncio.create_task(watch(pod.health, probes, ask))
        return pod

    async def _ready(self, pod: Pod) -> None:
        while not pod.health.ready:
            state = (await self._engine.inspected(pod.container))["State"]
            if pod.health.killed_by or not state["Running"]:
                await self._keep_log(pod)
                why = pod.health.killed_by or f"exit status {state['ExitCode']}"
                raise NotReady(f"{pod.name}: {why}. Its log: {self._log(pod)}")
            await asyncio.sleep(POLL_S)
        if self.when_ready is not None:
            await self.when_ready(pod)
        pod.ready_after_s = time.monotonic() - pod.played_s
        self._say(f"{pod.name} is ready after {pod.ready_after_s:.0f} s")

    async def _unwatch(self, pod: Pod) -> None:
        if pod.watching is not None:
            pod.watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pod.watching

    async def _keep_log(self, pod: Pod) -> None:
        found = await self._engine.inspected(pod.container)
        shutil.copy(found["HostConfig"]["LogConfig"]["Path"], self._log(pod))

    def _log(self, pod: Pod) -> Path:
        return self._logs / f"{pod.name}-{int(pod.played_s)}.log"

    async def _remove_all(self) -> None:
        await self._engine.asked("pod", "rm", "--all", "--force", "--time", "0")
        await self._engine.asked("volume", "prune", "--force")
        shutil.rmtree(MEMORY, ignore_errors=True)


def peak_mib(pod: Pod) -> int | None:
    """The most memory that its container has had, in MiB; None where the kernel does not tell."""
    if pod.memory is None or not pod.memory.exists():
        return pod.peak_mib
    return int(pod.memory.read_text()) >> 20


def _peak_file(group: str) -> Path | None:
    """Of a container's control group, by the first or the second version of these."""
    root = Path("/sys/fs/cgroup")
    both = (
        root / f"memory{group}" / "memory.max_usage_in_bytes",
        root / group.strip("/") / "memory.peak",
    )
    return next((path for path in both if path.exists()), None)


async def _succeeds_inside(process: int, workload: Workload, command: tuple[str, ...]) -> bool:
    """Whether a command ends with status 0 in the namespaces of a container's process, as the
    container's user. (`podman exec` would take seconds on a busy machine.)"""
    context = workload.pod["spec"]["securityContext"]
    where = ["--target", str(process), "--mount", "--net", "--ipc", "--uts", "--pid"]
    who = ["--setuid", str(context["runAsUser"]), "--setgid", str(context["runAsGroup"])]
    running = await asyncio.create_subprocess_exec(
        "nsenter", *where, *who, "--", *command, stdout=DEVNULL, stderr=DEVNULL
    )
    try:
        return await running.wait() == 0
    except asyncio.CancelledError:
        running.kill()
        await running.wait()
        raise
