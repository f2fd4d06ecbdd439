"""What a pipeline is made of on disk: model, prompts, recipe. One folder each.

FOLDER/recipe.toml  rows.jsonl  pace  witness.jsonl  scored.txt
FOLDER/runs/RUN/    what the services keep     FOLDER/queue/  the queue server's data
"""

import json
import math
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import config
from services.common.config import Recipe
from tests.chaos import words
from tests.chaos.rewards import KILLS_SCORER, NO_SIGNAL

MAX_COMPLETION_TOKENS = 6

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass(frozen=True)
class Plan:
    """How a pipeline is set up."""

    seed: int = 0
    run: str = "chaos"
    num_rows: int = 40
    epochs: float = 2.0
    groups_per_step: int = 2
    max_staleness: int = 3
    ranks: int = 1
    checkpoint_every_steps: int = 3
    claim_after_s: float = 1.5
    max_work_s: float = 20.0
    max_deliveries: int = 3
    max_tries: int = 2
    max_stale_tries: int = 8
    num_generators: int = 2
    num_scorers: int = 2
    num_failing: int = 1
    """Rows whose conversations always fail."""
    num_generator_killers: int = 0
    """Rows that kill each generator that takes them."""
    num_scorer_killers: int = 0
    num_without_signal: int = 1
    seconds_a_completion: float = 0.5

    @property
    def num_prompts(self) -> int:
        """Prompts of all epochs."""
        return math.ceil(round(self.epochs * self.num_rows, 9))


@dataclass(frozen=True)
class Ports:
    """Where the services of a pipeline listen, and what workers are told."""

    trainer: int
    """Of the proxy before whichever trainer is the run's."""
    aggregator: int
    http: int
    queue: int
    """Of the proxy before the queue server."""


def pace_of(recipe: Recipe) -> Path:
    """The file with the mean seconds of a completion."""
    return Path(recipe.folder).parent / "pace"


def witness_of(recipe: Recipe) -> Path:
    """The file of the trainers' witness."""
    return Path(recipe.folder).parent / "witness.jsonl"


def scored_of(recipe: Recipe) -> Path:
    """The file with a row's number for each call of the reward function."""
    return Path(recipe.folder).parent / "scored.txt"


def set_pace(folder: Path, seconds: float) -> None:
    """From now on a completion lasts so long, on average."""
    fresh = folder / f".pace.{os.getpid()}"
    fresh.write_text(str(seconds))
    fresh.rename(folder / "pace")


def make_model(folder: Path) -> Path:
    """The tests' tiny model with a chat template; made once for many pipelines."""
    # Imports torch, which the harness needs for nothing else.
    from tests.services.trainer.folders import make_folder

    made = make_folder(folder)
    (made / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return made


def rows_of(plan: Plan) -> list[dict[str, Any]]:
    """The dataset; which rows are traps is drawn by the seed."""
    positions = list(range(plan.num_rows))
    random.Random(f"rows {plan.seed}").shuffle(positions)
    traps: dict[int, tuple[str, str]] = {}
    for number, word, trap in (
        (plan.num_failing, words.FAILS, ""),
        (plan.num_generator_killers, words.KILLS_GENERATOR, ""),
        (plan.num_scorer_killers, "", KILLS_SCORER),
        (plan.num_without_signal, "", NO_SIGNAL),
    ):
        for _ in range(number):
            traps[positions.pop()] = (word, trap)
    return [
        {"prompt": words.prompt(number, word), "number": number, "trap": trap}
        for number, (word, trap) in enumerate(
            traps.get(each, ("", "")) for each in range(plan.num_rows)
        )
    ]


def make_world(
    plan: Plan,
    folder: Path,
    *,
    model: Path,
    ports: Ports,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Recipe:
    """Write everything that the services read; the recipe. `changes` are keys of its sections."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of(plan)))
    set_pace(folder, plan.seconds_a_completion)
    sections: dict[str, Any] = {
        "run": plan.run,
        "folder": str(folder / "runs"),
        "model": {"path": str(model)},
        "data": {"file": str(rows), "epochs": plan.epochs, "seed": plan.seed},
        "generation": {
            "num_generations": 2,
            "max_completion_tokens": MAX_COMPLETION_TOKENS,
            "timeout_s": 15.0,
        },
        # Two groups at a time, so that some wait in the stream.
        "generator": {"max_model_len": 16, "max_inflight": 4},
        "rewards": {
            "functions": [
                {
                    "function": "tests.chaos.rewards:counted",
                    "params": {"path": str(folder / "scored.txt")},
                },
                {"function": "tests.chaos.rewards:survived"},
            ],
            "workers": 1,
            "timeout_s": 10.0,
        },
        "optimizer": {"learning_rate": 1e-3},
        "trainer": {
            "groups_per_step": plan.groups_per_step,
            "max_staleness": plan.max_staleness,
            "ranks": plan.ranks,
            "device": "cpu",
            "exit_when_done": True,
        },
        "checkpoint": {"every_steps": plan.checkpoint_every_steps, "keep": 2},
        "evaluation": {"enabled": False},
        "queue": {
            "url": f"redis://127.0.0.1:{ports.queue}/0",
            "claim_after_s": plan.claim_after_s,
            "max_work_s": plan.max_work_s,
            "max_deliveries": plan.max_deliveries,
            "max_tries": plan.max_tries,
            "max_stale_tries": plan.max_stale_tries,
        },
        "recorder": {"flush_s": 0.5},
        "aggregator": {"http_port": ports.http},
        "network": {
            "trainer": f"127.0.0.1:{ports.trainer}",
            "aggregator": f"127.0.0.1:{ports.aggregator}",
        },
    }
    for name, keys in (changes or {}).items():
        sections[name] = {**sections.get(name, {}), **keys}
    recipe = Recipe.model_validate(sections)
    (folder / "recipe.toml").write_text(config.dump_toml(recipe))
    return recipe
