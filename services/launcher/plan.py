"""From a recipe to the processes of a run: command lines, environments, cores, addresses.

Every service reads the resolved recipe of the run's folder; what only the launcher can know
(addresses, the model's folder, the embedded queue's URL) comes as `--set`.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.config import ENVIRONMENT_PREFIX, Recipe
from services.launcher import embedded_queue, ports
from services.launcher.children import ChildSpec
from services.launcher.folder import RunFolder

WORKERS, AGGREGATOR, QUEUE = 0, 1, 2
"""Tiers: the order in which processes are stopped. The aggregator takes the workers' last metrics.
"""

LOOPBACK = "127.0.0.1"

ANY_ADDRESS = ("0.0.0.0", "::", "")
"""Listening on these, a service is found at the loopback address."""

GPU_DEVICES = ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")
"""Device files of NVIDIA, AMD and WSL; one of them means that engines do not run on the CPU."""

QUEUE_NAME = "queue"

KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
}
"""glibc gives freed tensors back to the kernel and faults them in again at each step; keeping them
saves 15 to 20 % of a small model's step."""

FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""glibc gives each new thread another heap, up to eight a core: a generator that fetches a version
a second grew by 60 MB an hour, and with two heaps it does not."""

ServiceArgv = Callable[[str], Sequence[str]]
"""From a service's name to the beginning of its command line."""


@dataclass(frozen=True)
class Addresses:
    """Where the processes of a run find each other."""

    trainer_port: int
    aggregator_port: int
    http_port: int
    """REST, docs and the page."""
    queue_url: str
    queue_port: int | None
    """Of the embedded queue server; None with a server of the user's."""
    host: str
    tls: bool = False
    """Whether REST is HTTPS."""

    @property
    def page(self) -> str:
        """The aggregator's URL for people."""
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.http_port}"


@dataclass(frozen=True)
class Machine:
    """What the run may use."""

    cores: tuple[int, ...]
    """Numbers of the CPU cores that this process may run on."""
    gpu: bool


def this_machine() -> Machine:
    """The machine that we are on."""
    if hasattr(os, "sched_getaffinity"):
        cores = tuple(sorted(os.sched_getaffinity(0)))
    else:
        cores = tuple(range(os.cpu_count() or 1))
    return Machine(cores=cores, gpu=any(Path(device).exists() for device in GPU_DEVICES))


def choose_addresses(recipe: Recipe) -> Addresses:
    """Free ports for what others must find, the recipe's where it gives them."""
    network = recipe.network
    trainer, aggregator, http, queue = ports.choose(4, host=network.host)
    url = recipe.queue.url
    return Addresses(
        trainer_port=trainer,
        aggregator_port=aggregator,
        http_port=recipe.aggregator.http_port or http,
        queue_url=url if url is not None else f"redis://{LOOPBACK}:{queue}/0",
        queue_port=None if url is not None else queue,
        host=LOOPBACK if network.host in ANY_ADDRESS else network.host,
        tls=network.tls_cert_file is not None,
    )


def python_module(service: str) -> tuple[str, ...]:
    """`python -m services.SERVICE`, by the interpreter that runs us."""
    return (sys.executable, "-m", f"services.{service}")


def queue_spec(folder: RunFolder, *, port: int, environ: Mapping[str, str]) -> ChildSpec:
    """The embedded queue server; writes its configuration."""
    config = embedded_queue.write_config(folder.queue, port=port)
    return ChildSpec(
        name=QUEUE_NAME,
        argv=(str(embedded_queue.binary()), str(config)),
        env=dict(environ),
        log=folder.log(QUEUE_NAME),
        tier=QUEUE,
    )


def service_specs(
    recipe: Recipe,
    folder: RunFolder,
    *,
    model: Path,
    addresses: Addresses,
    machine: Machine,
    environ: Mapping[str, str],
    argv_of: ServiceArgv = python_module,
) -> list[ChildSpec]:
    """The four services with all their replicas, the aggregator first."""
    host = addresses.host
    common = {
        "model.path": str(model),
        "network.trainer": f"{host}:{addresses.trainer_port}",
        "network.aggregator": f"{host}:{addresses.aggregator_port}",
        "network.health_port": 0,
    }
    if addresses.queue_port is not None:
        common["queue.url"] = addresses.queue_url
    own: dict[str, dict[str, str | int | bool]] = {
        "aggregator": {
            "network.grpc_port": addresses.aggregator_port,
            "aggregator.http_port": addresses.http_port,
        },
        "trainer": {
            "network.grpc_port": addresses.trainer_port,
            "trainer.exit_when_done": True,
        },
    }
    counts = {
        "aggregator": 1,
        "scorer": recipe.scorer.replicas,
        "trainer": 1,
        "generator": recipe.generator.replicas,
    }
    specs = []
    for service, count in counts.items():
        settings = common | {"network.grpc_port": 0} | own.get(service, {})
        for replica in range(count):
            name = f"{service}-{replica}"
            arguments = [str(folder.recipe)]
            for key, value in settings.items():
                arguments += ["--set", f"{key}={json.dumps(value, ensure_ascii=False)}"]
            arguments += ["--replica", str(replica), "--announce", str(folder.announce(name))]
            specs.append(
                ChildSpec(
                    name=name,
                    argv=(*argv_of(service), *arguments),
                    env=environment(
                        recipe, service, replica=replica, machine=machine, environ=environ
                    ),
                    log=folder.log(name),
                    tier=AGGREGATOR if service == "aggregator" else WORKERS,
                    announce=folder.announce(name),
                    ends_run=service == "trainer",
                )
            )
    return specs


def environment(
    recipe: Recipe, service: str, *, replica: int, machine: Machine, environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment of one process: ours, with threads, telemetry and hub settings where the user
    set none.

    Example: two generators on cores (0, 1) without a GPU are bound to core 0 and 1, and the trainer
    gets OMP_NUM_THREADS = max(1, 2 - 2) = 1. Without the binding vLLM puts all replicas on the same
    cores.
    """
    # The resolved recipe says it all; a variable that overrides it again would undo the launcher's
    # settings.
    inherited = {k: v for k, v in environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    settings = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    } | FEW_ARENAS
    cores = machine.cores
    match service:
        case "generator":
            settings |= {
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            }
            if not machine.gpu:
                settings["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[replica % len(cores)])
                settings["OMP_NUM_THREADS"] = "1"
        case "trainer":
            threads = len(cores) if machine.gpu else max(1, len(cores) - recipe.generator.replicas)
            settings |= {"OMP_NUM_THREADS": str(threads)} | KEEP_MEMORY
            if recipe.data.dataset is None or Path(recipe.data.dataset).exists():
                settings["HF_HUB_OFFLINE"] = "1"
        case _:
            settings["OMP_NUM_THREADS"] = "1"
    return settings | inherited
