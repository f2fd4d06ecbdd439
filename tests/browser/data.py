"""An invented run, taken by the real Ingest, and the real application that answers for it.

`python -m tests.browser.data FOLDER` serves it on a loopback port and goes on making steps, to be
looked at; `--steps 0` makes none.
"""

import argparse
import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from headrace.v1 import metrics_pb2, trace_pb2

from services.aggregator import alert_book, recipes
from services.aggregator.api.app import create_app
from services.aggregator.api.backend import Backend
from services.aggregator.catalogue import CATALOGUE
from services.aggregator.ingest import Ingest
from services.aggregator.series import find_run
from services.aggregator.store import Store
from services.common.config import Recipe
from services.common.tokens import Tokens
from tests.services.aggregator import traced
from tests.services.aggregator.making import Producer, count, event, observed, ratio

STEP_S = 3.1
GROUPS = 32
"""Groups of a step."""
SECRET = "swordfish-41c7"
"""In a recipe; shown nowhere."""


class InventedRun:
    """A generation-bound run of two generators, a scorer and a trainer."""

    def __init__(self, name: str, *, seed: int = 0, begin_s: float) -> None:
        self.name = name
        self.now_s = begin_s
        """When the next step begins, in seconds since 1970."""
        self.step = 0
        self.attempt = 1
        self._random = random.Random(seed)
        self._ordinal = 0
        self._lost: list[str] = []
        self._boot()

    def _boot(self) -> None:
        boot = f"boot-{self.attempt}"
        self._trainer = Producer("trainer-0", run=self.name, boot_id=boot)
        self._scorer = Producer("scorer-0", run=self.name, service="scorer", boot_id=boot)
        self._generators = [
            Producer(f"generator-{each}", run=self.name, service="generator", boot_id=boot)
            for each in range(2)
        ]

    def restart(self, *, step: int) -> None:
        """A new attempt of the trainer that goes on from a checkpoint."""
        self._lost = [f"0.{self._ordinal + index}.{self.attempt}.1" for index in range(8)]
        self.attempt, self.step = self.attempt + 1, step
        self.now_s += 40
        self._boot()

    def advance(self, ingest: Ingest) -> None:
        """One step, with all that is said of it."""
        noise = self._random.gauss
        progress = 1 - math.exp(-self.step / 120)
        wait_s = max(0.2, 1.9 + noise(0, 0.15))
        parts = {
            "perf/rollout_wait_s": wait_s,
            "perf/data_s": 0.05 + abs(noise(0, 0.01)),
            "perf/fwd_bwd_s": 0.88 + noise(0, 0.03),
            "perf/optimizer_s": 0.12 + noise(0, 0.005),
            "perf/weight_sync_s": 0.08 + abs(noise(0, 0.01)),
            "perf/checkpoint_s": 0.7 if self.step % 50 == 49 else 0.0,
            "perf/unaccounted_s": 0.03 + abs(noise(0, 0.01)),
        }
        length_s = sum(parts.values())
        self.now_s += length_s
        place: dict[str, Any] = {
            "step": self.step,
            "attempt": self.attempt,
            "duration_s": length_s,
            "now_s": self.now_s,
        }
        reward = 0.2 + 0.5 * progress + noise(0, 0.05)
        self._trainer.send(
            ingest,
            [
                *((key, observed([value])) for key, value in parts.items()),
                ("perf/step_s", observed([length_s])),
                ("loss", observed([0.05 * (1 - progress) + noise(0, 0.01)])),
                ("grad_norm", observed([0.8 + abs(noise(0, 0.2))])),
                ("learning_rate", observed([1e-5 * min(1, (self.step + 1) / 20)])),
                ("kl", ratio(abs(noise(0.003, 0.001)) * 9000, 9000)),
                ("entropy", ratio((1.6 - 0.5 * progress) * 9000, 9000)),
                ("batch/groups_per_step", observed([GROUPS])),
                ("batch/row_fill_frac", ratio(0.93, 1)),
                ("queue/waiting/requests", observed([12 + self._random.randrange(4)])),
                ("queue/fill_frac/requests", ratio(14, 64)),
                ("queue/waiting/groups", observed([self._random.randrange(2)])),
                ("queue/fill_frac/groups", ratio(1, 64)),
                ("queue/waiting/samples", observed([3 + self._random.randrange(2)])),
                ("queue/fill_frac/samples", ratio(4, 128)),
                ("queue/oldest_wait_s/samples", observed([0.4])),
                ("pace/outstanding_frac", ratio(0.7, 1)),
                ("sample/staleness_mean", observed([1.2])),
                ("perf/weight_sync_lag_s", observed([0.8 + abs(noise(0, 0.1))])),
                *(
                    [("eval/reward", observed([0.25 + 0.5 * progress]))]
                    if self.step % 50 == 0
                    else []
                ),
            ],
            events=self._trained(),
            **place,
        )
        self._scorer.send(
            ingest,
            [
                (
                    "reward",
                    observed([min(1, max(0, reward + noise(0, 0.2))) for _ in range(GROUPS)]),
                ),
                ("rewards/correct", observed([min(1, max(0, reward - 0.05))])),
                ("rewards/format", observed([min(1, 0.6 + 0.4 * progress)])),
                ("rollout/score_s", observed([0.02] * GROUPS)),
                ("rollout/scorer_busy_frac", ratio(0.09 * length_s, length_s)),
            ],
            **place,
        )
        for number, generator in enumerate(self._generators):
            generator.send(
                ingest,
                [
                    ("rollout/generated_tok_s", count(2450 * length_s * (1 - 0.1 * number))),
                    ("rollout/inflight", observed([15 + number])),
                    ("rollout/duration_s", observed([4 + abs(noise(0, 1)) for _ in range(GROUPS)])),
                    ("rollout/request_wait_s", observed([0.4] * (GROUPS // 2))),
                    ("rollout/slots_busy_frac", ratio(0.97 * length_s, length_s)),
                    ("rollout/slots_starved_frac", ratio(0.01 * length_s, length_s)),
                    ("perf/generator_paused_frac", ratio(0.01 * length_s, length_s)),
                    ("completions/mean_length", ratio((180 + 40 * progress) * 100, 100)),
                    ("policy/served_version", observed([self.step])),
                ],
                **place,
            )
        self.step += 1

    def _trained(self) -> list[metrics_pb2.GroupEvent]:
        said = [
            event(name, "given_up", age_s=6, reason="trainer restarted", worker="trainer-0")
            for name in self._lost
        ]
        self._lost = []
        for index in range(GROUPS):
            name, row = f"0.{self._ordinal}.{self.attempt}.1", self._ordinal % 1000
            self._ordinal += 1
            worker = f"generator-{index % 2}"
            said += [
                event(name, "dispatched", row_index=row, age_s=7, worker="trainer-0"),
                event(name, "generating", row_index=row, age_s=6.2, worker=worker),
                event(name, "generated", row_index=row, age_s=2.5, worker=worker),
                event(name, "scoring", row_index=row, age_s=2.4, worker="scorer-0"),
                event(name, "scored", row_index=row, age_s=2.38, worker="scorer-0"),
            ]
            if index == 7 and self.step % 20 == 3:
                said.append(event(name, "dropped", row_index=row, age_s=0.2, reason="stale"))
            else:
                said.append(event(name, "trained", row_index=row, age_s=0.1, step=self.step))
        for index in range(8):
            name = f"0.{self._ordinal + index}.{self.attempt}.1"
            said.append(event(name, "dispatched", row_index=index, age_s=0.1, worker="trainer-0"))
        return said


def fill(store: Store, *, steps: int = 300, now_s: float | None = None) -> InventedRun:
    """A store with two runs that end at `now_s`: "demo", whose trainer has restarted, and
    "baseline". Returns the first, to go on with.
    """
    end_s = time.time() if now_s is None else now_s
    ingest = Ingest(store)
    begin_s = end_s - steps * STEP_S - 60
    baseline = InventedRun("baseline", seed=1, begin_s=begin_s - 3600)
    for _ in range(steps // 2):
        baseline.advance(ingest)
    run = InventedRun("demo", begin_s=begin_s)
    for _ in range(steps // 2 + 20):
        run.advance(ingest)
    run.restart(step=steps // 2)
    while run.now_s < end_s - STEP_S and run.step < steps:
        run.advance(ingest)
    recipes.remember(store, _recipe("baseline"), now_s=baseline.now_s - 3600)
    recipes.remember(store, _recipe("demo", learning_rate=1e-5), now_s=begin_s)
    recipes.remember(store, _recipe("demo", learning_rate=1e-5, max_steps=400), now_s=end_s - 60)
    traced.send(ingest, *(_conversation(index) for index in range(12)), now_s=end_s)
    _alert(store, end_s)
    return run


def _recipe(run: str, *, learning_rate: float = 5e-6, max_steps: int = 200) -> Recipe:
    """What such a run could have been started with."""
    return Recipe.model_validate(
        {
            "run": run,
            "model": {"path": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"},
            "data": {"reasoning_gym": {"task": "chain_sum", "params": {"max_terms": 3}}},
            "generator": {"replicas": 2, "max_inflight": 16},
            "generation": {"num_generations": 8 if run == "demo" else 4},
            "rewards": {
                "functions": [
                    {"function": "reasoning_gym", "name": "correct"},
                    {"function": "rewards:format", "weight": 0.2, "params": {"api_key": SECRET}},
                ]
            },
            "optimizer": {"learning_rate": learning_rate},
            "trainer": {"groups_per_step": GROUPS, "max_steps": max_steps},
        }
    )


def _conversation(index: int) -> trace_pb2.RolloutTrace:
    """Two turns with a tool between them; every third is wrong."""
    right = index % 3 != 0
    trace = traced.trace_of(
        f"0.{index}.1.1/{index % 4}",
        version=index // 4,
        row_index=index,
        rewards={"correct": float(right), "format": 0.5},
        reward=0.8 if right else 0.1,
        end="stop" if index % 5 else "length",
        tools=["calculator"],
        text=f"{index} times 17 is {index * 17 if right else index * 17 + 1}.",
        age_s=30.0 - index,
    )
    answer = trace.rollout.completion.pop()
    call = trace.rollout.completion.add(
        role="assistant", content="I multiply.", reasoning="A product of two numbers."
    )
    call.tool_calls.add(
        id="1", name="calculator", arguments_json=f'{{"expression": "{index} * 17"}}'
    )
    trace.rollout.completion.add(
        role="tool", name="calculator", tool_call_id="1", content=str(index * 17)
    )
    trace.rollout.completion.append(answer)
    del trace.prompt[:]
    trace.prompt.add(role="system", content="Answer with one number.")
    trace.prompt.add(role="user", content=f"What is {index} times 17?")
    return trace


def _alert(store: Store, end_s: float) -> None:
    """One alert that has ended and one that fires."""
    with store.engine.begin() as connection:
        run = find_run(connection, "demo")
        assert run is not None
        for name, sentence in (("stall", "no step has ended for 310 s"), ("drops", "12 % dropped")):
            alert_book.fire(
                connection,
                run.id,
                name=name,
                severity="error" if name == "stall" else "warning",
                sentence=sentence,
                value=0.12,
                step=40,
                now_s=end_s - 200,
                tell=False,
            )
        alert_book.end(
            connection, run.id, name="stall", because="a step ended", now_s=end_s - 150, tell=False
        )


@contextmanager
def serving(store: Store, *, tokens: Tokens | None = None) -> Iterator[str]:
    """The application on a loopback port; yields its address."""
    with ThreadPoolExecutor(1) as writer, socket.create_server(("127.0.0.1", 0)) as listening:
        backend = Backend(store, CATALOGUE, writer)
        app = create_app(backend, tokens=tokens)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            backend.draining.set()
            server.should_exit = True
            thread.join()


def main() -> None:
    """Serve an invented run until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="steps that it begins with")
    parser.add_argument("--seconds", type=float, default=3600, help="how long it goes on")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    store = Store.open(f"sqlite:///{options.folder / 'metrics.sqlite'}")
    run = fill(store, steps=options.steps) if options.steps else None
    ingest, end_s = Ingest(store), time.time() + options.seconds
    with serving(store) as address:
        print(address, flush=True)
        while time.time() < end_s:
            if run is not None and run.now_s + STEP_S < time.time():
                run.advance(ingest)
            time.sleep(0.2)
    store.close()


if __name__ == "__main__":
    main()
