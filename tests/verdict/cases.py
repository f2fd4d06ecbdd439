"""What is slowed on purpose, what the verdict on it has to say, and what is made faster then.

Each step has 4 groups of 2 conversations. A case sets its sleeps so that the stage that is slow
takes about one and a half seconds a step, and every other about a fifth of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.aggregator.rules import Name
from tests.verdict.world import reward

QUICK = {"completion": 0.2, "spread": 0.3, "training": 0.1, "judge": 0.02}
"""Of the stages that are not to blame."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    name: str
    says: Name
    """The verdict."""
    knob: tuple[str, ...]
    """What its knob has to name."""
    culprit: str | None = None
    replica: str | None = None
    seconds: Mapping[str, float]
    """Sleeps beside QUICK."""
    speed_up: float | None = None
    """That is asked for and then applied; None: what is to blame is removed."""
    then: Mapping[str, float] = field(default_factory=dict)
    """Sleeps, once it is applied."""
    then_recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys of the recipe, with which trainer and workers are started again."""
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_generators: int = 2
    num_scorers: int = 1
    max_staleness: int = 4
    window: int = 6
    """Steps of one verdict: a multiple of three, for what comes every third step."""

    @property
    def predicts(self) -> bool:
        """Whether anything is made faster."""
        return bool(self.then or self.then_recipe)

    @property
    def sleeps(self) -> dict[str, float]:
        """All of them."""
        return {**QUICK, **self.seconds}


def _half(**seconds: float) -> dict[str, Any]:
    """Sleeps, and what they become when what is to blame is twice as fast."""
    return {
        "seconds": seconds,
        "speed_up": 2.0,
        "then": {name: value / 2 for name, value in seconds.items()},
    }


def _named(seconds: Mapping[str, float], **beside: float) -> dict[str, Any]:
    """The same for names that are no identifiers; `beside` stay as they are."""
    made = _half(**seconds)
    return {**made, "seconds": {**made["seconds"], **beside}}


CASES = (
    Case(
        name="generator",
        says="generation-bound",
        knob=("generator.replicas", "generator.max_inflight"),
        # Scorers have something to do, and could do four times as much.
        **_named({"completion": 3.2}, judge=0.8),
    ),
    Case(
        name="one generator of three",
        says="generation-bound",
        knob=("look at generator-1 first", "generator.replicas"),
        replica="generator-1",
        num_generators=3,
        # Else all that it makes is late, and it is stragglers that are waited for.
        max_staleness=16,
        window=12,
        **_named({"completion": 3.6, "completion/generator-1": 10.0}),
    ),
    Case(
        name="scorer",
        says="scoring-bound",
        knob=("scorer.replicas", "rewards.workers"),
        sections={"rewards": {"functions": [reward("grader"), reward("checker")], "workers": 1}},
        **_half(checker=0.4),
    ),
    Case(
        name="one scorer of three",
        says="scoring-bound",
        knob=("look at scorer-1 first", "scorer.replicas"),
        replica="scorer-1",
        num_scorers=3,
        sections={"scorer": {"max_groups": 1}},
        max_staleness=16,
        window=12,
        **_named({"grader": 0.8, "scorer-1": 1.6}),
    ),
    Case(
        name="one reward function",
        says="scoring-bound",
        knob=("make the reward function judge faster",),
        culprit="the reward function judge",
        sections={"scorer": {"max_groups": 4}},
        **_half(judge=1.6),
    ),
    Case(
        name="one tool",
        says="environment-bound",
        knob=("make the tool search faster",),
        culprit="the tool search",
        sections={
            "tools": {"functions": [f"tests.verdict.stages:{name}" for name in ("search", "clock")]}
        },
        **_named({"tool/search": 2.8}, **{"tool/clock": 0.2, "completion": 0.15}),
    ),
    Case(
        name="one environment",
        says="environment-bound",
        knob=("make the environment sandbox faster",),
        culprit="the environment sandbox",
        sections={
            "environments": {
                "classes": [
                    {"environment": "tests.verdict.stages:Sandbox", "name": "sandbox"},
                    {"environment": "tests.verdict.stages:Board", "name": "board"},
                ],
                "column": "where",
            }
        },
        max_staleness=8,
        window=12,
        **_named({"environment/sandbox": 6.0}, **{"environment/board": 0.2, "completion": 0.1}),
    ),
    Case(
        name="trainer",
        says="training-bound",
        knob=("trainer.token_budget", "devices for the trainer"),
        **_half(training=1.6),
    ),
    Case(
        name="weight sync: publishing",
        says="sync-bound",
        knob=("trainer.weight_sync_steps",),
        **_half(publish=1.4),
    ),
    Case(
        name="weight sync: every third step",
        says="sync-bound",
        knob=("trainer.weight_sync_steps",),
        sections={"trainer": {"weight_sync_steps": 3}},
        max_staleness=2,
        **_half(publish=4.2),
    ),
    Case(
        name="weight sync: loading",
        says="sync-bound",
        knob=("trainer.weight_sync_steps",),
        **_named({"load": 1.0}, completion=0.8),
    ),
    Case(
        name="stragglers",
        says="straggler-bound",
        knob=("generation.max_completion_tokens", "trainer.max_staleness", "trainer.stale"),
        seconds={"tail": 6.0, "tail_frac": 0.05, "completion": 0.4, "training": 0.6},
        then={"tail_frac": 0.0},
        sections={"generator": {"max_inflight": 16}},
        max_staleness=2,
        # In six steps a generator may have all of the tails, and looks slow.
        window=12,
    ),
    Case(
        name="staleness 0",
        says="pacing-bound",
        knob=("trainer.max_staleness", "trainer.groups_per_step"),
        seconds={"completion": 0.8, "spread": 0.0, "training": 0.8},
        max_staleness=0,
        then_recipe={"trainer": {"max_staleness": 2}},
    ),
    Case(
        name="nothing",
        says="balanced",
        knob=("none",),
        # Few slots, which are free again often: groups do not come in waves.
        seconds={"completion": 0.8, "spread": 0.2, "training": 1.35},
        sections={"generator": {"max_inflight": 2}},
        window=24,
    ),
)

BY_NAME = {case.name: case for case in CASES}
