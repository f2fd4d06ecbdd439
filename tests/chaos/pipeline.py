"""A whole pipeline of real processes: queue server behind a proxy, aggregator, trainer behind a
proxy, scorers, and generators on the tests' engine.

    async with Pipeline(Plan(seed=1), folder, model=model) as pipeline:
        await pipeline.start()
        pipeline.generators[0].signal(signal.SIGKILL)
        status = await pipeline.over(patience_s=120)

Whatever dies is started again after a moment (keeper.py). The trainer's proxy stands for the name
by which a cluster finds the present trainer: `second_trainer` points it at another one.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from services.common.config import ENVIRONMENT_PREFIX, Recipe
from services.common.queue import Keys
from tests.chaos import clock, witness
from tests.chaos.keeper import Guard, Keeper
from tests.chaos.proxy import Proxy
from tests.chaos.queue_server import QueueServer
from tests.chaos.world import Plan, Ports, make_world, set_pace
from tests.conftest import free_port

POLL_S = 0.1
"""How often is looked whether the run goes on."""

CLIENT_TRIES = 100
"""Of the harness's own calls: the server may just be coming back."""

MODULES = {
    "aggregator": "services.aggregator",
    "trainer": "tests.chaos.trainer",
    "scorer": "services.scorer",
    "generator": "tests.chaos.generator",
}


def environment() -> dict[str, str]:
    """What all services of a pipeline are started with."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    return kept | {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


class Pipeline:
    """One run and all its processes."""

    modules: ClassVar[Mapping[str, str]] = MODULES
    """By service, what is started."""

    def __init__(self, plan: Plan, folder: Path, *, model: Path) -> None:
        self.plan, self.folder = plan, folder
        ports = Ports(
            trainer=free_port(), aggregator=free_port(), http=free_port(), queue=free_port()
        )
        self.ports = ports
        self.recipe = self.make_world(model=model, ports=ports)
        self.keys = Keys(plan.run)
        self._guard = Guard()
        self.queue = QueueServer(folder / "queue", port=free_port(), guard=self._guard)
        self.queue_proxy = Proxy(ports.queue, target=self.queue.port)
        self.trainer_proxy = Proxy(ports.trainer, target=0)
        self.client = redis.asyncio.Redis.from_url(
            self.queue.url, retry=Retry(ConstantBackoff(0.1), CLIENT_TRIES)
        )
        """The harness's own, past the proxy."""
        self.aggregator = self._keeper("aggregator", 0, {"network.grpc_port": ports.aggregator})
        self._port_of: dict[str, int] = {}
        self.trainer = self._trainer(0)
        """The one that the run goes on with."""
        self.trainers = [self.trainer]
        """All, replaced ones included."""
        self.trainer_proxy.target = self._port_of[self.trainer.name]
        self.scorers = [self._keeper("scorer", n) for n in range(plan.num_scorers)]
        self.generators = [self._keeper("generator", n) for n in range(plan.num_generators)]
        self.retired: list[Keeper] = []
        """Workers that were scaled away."""
        self._born = {"scorer": plan.num_scorers, "generator": plan.num_generators}
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{ports.http}/api/v1/runs/{plan.run}/",
            timeout=30,
            trust_env=False,
        )
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._exit.enter_async_context(self.queue_proxy)
        await self._exit.enter_async_context(self.trainer_proxy)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Whatever is left is killed."""
        await asyncio.gather(*(keeper.abandon() for keeper in self.keepers))
        await self.client.aclose()
        await self._http.aclose()
        await self.queue.kill()
        await self._exit.aclose()
        self._guard.close()

    @property
    def keepers(self) -> list[Keeper]:
        """All processes that there ever were, the queue server apart."""
        workers = [*self.scorers, *self.generators, *self.retired]
        return [self.aggregator, *self.trainers, *workers]

    @property
    def deaths(self) -> int:
        """Processes that were killed, and not by `Keeper.signal`: their prompts did it."""
        killed = sum(keeper.ends.count(-signal.SIGKILL) for keeper in self.keepers)
        return max(0, killed - sum(keeper.kills for keeper in self.keepers))

    def make_world(self, *, model: Path, ports: Ports) -> Recipe:
        """Write what the services read."""
        return make_world(self.plan, self.folder, model=model, ports=ports)

    def environ(self, name: str) -> dict[str, str]:
        """What the process of this name is started with."""
        return environment()

    async def start(self) -> None:
        """Start the queue server and then everything at once."""
        await self.queue.start()
        for keeper in (self.aggregator, self.trainer, *self.scorers, *self.generators):
            keeper.start()

    # -- how it goes

    def witnessed(self) -> list[dict[str, Any]]:
        """What the trainers' witness has noted."""
        return witness.read(self.folder / "witness.jsonl")

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far, those that were lost included."""
        return sum("step" in line for line in self.witnessed())

    async def until_steps(self, number: int, *, patience_s: float = 120.0) -> None:
        """Wait until so many steps were made, all attempts together; or the run is over. Raises
        TimeoutError."""
        async with asyncio.timeout(patience_s):
            while self.num_steps < number and not self.trainer.over.is_set():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    async def over(self, *, patience_s: float) -> int:
        """The trainer's status once the run has come to its end. Raises TimeoutError."""
        async with asyncio.timeout(patience_s):
            while True:
                trainer = self.trainer
                await trainer.over.wait()
                if trainer is self.trainer:
                    return trainer.ends[-1]

    async def wind_down(self) -> dict[str, int | None]:
        """SIGTERM to the workers, whose last metrics the aggregator takes; their statuses."""
        workers = [*self.scorers, *self.generators]
        statuses = await asyncio.gather(*(worker.stop() for worker in workers))
        return {worker.name: status for worker, status in zip(workers, statuses, strict=True)}

    # -- what can be done to it

    def set_pace(self, seconds: float) -> None:
        """How long a completion lasts from now on, on average."""
        set_pace(self.folder, seconds)

    def add(self, service: str) -> Keeper:
        """One scorer or generator more, started."""
        workers = self.scorers if service == "scorer" else self.generators
        number, self._born[service] = self._born[service], self._born[service] + 1
        keeper = self._keeper(service, number)
        workers.append(keeper)
        return keeper.start()

    async def remove(self, keeper: Keeper) -> int | None:
        """SIGTERM a scorer or generator for good; its status."""
        for workers in (self.scorers, self.generators):
            if keeper in workers:
                workers.remove(keeper)
        self.retired.append(keeper)
        return await keeper.stop()

    def second_trainer(self) -> tuple[Keeper, Keeper]:
        """Start another trainer beside the present one and point the name at it: (old, new)."""
        old, new = self.trainer, self._trainer(len(self.trainers))
        self.trainers.append(new)
        self.trainer = new.start()
        self.trainer_proxy.target = self._port_of[new.name]
        return old, new

    def go_on_with(self, trainer: Keeper) -> None:
        """Point the name at this trainer."""
        self.trainer = trainer
        self.trainer_proxy.target = self._port_of[trainer.name]

    def switch_clock(self, keeper: Keeper, seconds: float) -> None:
        """Its next processes have a wall clock that is off by so much."""
        keeper.argv = clock.command(keeper.argv, seconds)

    async def rest(self, path: str, **parameters: Any) -> Any:
        """What the aggregator answers to GET /api/v1/runs/RUN/`path`."""
        answer = await self._http.get(path, params=parameters)
        answer.raise_for_status()
        return answer.json()

    # -- processes

    def _trainer(self, number: int) -> Keeper:
        name = f"trainer-{number}"
        self._port_of[name] = free_port()
        return self._keeper("trainer", number, {"network.grpc_port": self._port_of[name]})

    def _keeper(
        self, service: str, number: int, settings: Mapping[str, int] | None = None
    ) -> Keeper:
        name = f"{service}-{number}"
        argv = [sys.executable, "-m", self.modules[service], str(self.folder / "recipe.toml")]
        for key, value in (settings or {}).items():
            argv += ["--set", f"{key}={value}"]
        argv += ["--replica", str(number), "--announce", str(self.folder / f"{name}.json")]
        return Keeper(
            name,
            argv,
            log=self.folder / f"{name}.log",
            environ=self.environ(name),
            guard=self._guard,
        )
