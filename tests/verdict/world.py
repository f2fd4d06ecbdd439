"""A pipeline that runs for ever, with the sleeps of a case and a tokenizer whose words can be calls
of tools."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from services.common import config
from services.common.config import Recipe
from tests.chaos import world
from tests.chaos.pipeline import MODULES, Pipeline
from tests.chaos.world import Plan, Ports
from tests.verdict import sleeps

CALLS = {"search": "w41", "clock": "w42", "act": "w43"}
"""By tool or method, the word of the tests' tokenizer whose place its call takes."""

GROUPS_PER_STEP = 4

PLAN = Plan(
    run="verdict",
    num_rows=40,
    epochs=1000.0,
    groups_per_step=GROUPS_PER_STEP,
    # As many groups are under way as all stages together can have in their hands.
    max_staleness=4,
    checkpoint_every_steps=10_000,
    claim_after_s=30.0,
    max_work_s=120.0,
    num_scorers=1,
    num_failing=0,
    num_without_signal=0,
)

Sections = Mapping[str, Mapping[str, Any]]


def reward(name: str) -> dict[str, str]:
    """One of this package's reward functions."""
    return {"function": f"tests.verdict.stages:{name}"}


SECTIONS: dict[str, dict[str, Any]] = {
    "generator": {"max_model_len": 32, "max_inflight": 8},
    "rewards": {"functions": [reward("grader"), reward("judge")], "timeout_s": 30.0},
    "generation": {
        "num_generations": 2,
        "max_completion_tokens": 12,
        "min_turn_tokens": 1,
        "timeout_s": 60.0,
    },
}
"""Beside what all pipelines of tests have."""


def make_model(folder: Path) -> Path:
    """The tests' tiny model, with some words that are calls."""
    # Imports of what the harness needs for nothing else.
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    made = world.make_model(folder)
    vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(made).get_vocab()
    for name, word in CALLS.items():
        text = f'<tool_call>{{"name":"{name}","arguments":{{}}}}</tool_call>'
        vocabulary[text] = vocabulary.pop(word)
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    # By spaces alone: what was said is the same tokens again when it is rendered.
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )
    fast.chat_template = world.CHAT_TEMPLATE
    fast.save_pretrained(made)
    return made


class SleepingPipeline(Pipeline):
    """A pipeline whose stages sleep as `sleep` says."""

    modules: ClassVar[Mapping[str, str]] = MODULES | {
        "trainer": "tests.verdict.trainer",
        "generator": "tests.verdict.generator",
    }

    def __init__(
        self,
        folder: Path,
        *,
        model: Path,
        sections: Sections,
        seconds: Mapping[str, float],
        num_generators: int = 2,
        num_scorers: int = 1,
        max_staleness: int = PLAN.max_staleness,
    ) -> None:
        plan = replace(
            PLAN,
            num_generators=num_generators,
            num_scorers=num_scorers,
            max_staleness=max_staleness,
        )
        self._sections = sections
        folder.mkdir(parents=True)
        self._sleeps = folder / "sleeps.json"
        self.seconds: dict[str, float] = {}
        self.sleep(seconds)
        super().__init__(plan, folder, model=model)

    def sleep(self, seconds: Mapping[str, float]) -> None:
        """From now on stages sleep so long; of those that are not named nothing changes."""
        self.seconds |= seconds
        sleeps.write(self._sleeps, self.seconds)

    def make_world(self, *, model: Path, ports: Ports) -> Recipe:
        """The recipe of the tests' pipelines, with the case's sections."""
        changes: dict[str, dict[str, Any]] = {**SECTIONS}
        for name, keys in self._sections.items():
            changes[name] = {**changes.get(name, {}), **keys}
        made = world.make_world(self.plan, self.folder, model=model, ports=ports, changes=changes)
        rows = self.folder / "rows.jsonl"
        read = [json.loads(line) for line in rows.read_text().splitlines()]
        places = itertools.cycle(["sandbox", "board"])
        rows.write_text("".join(json.dumps(row | {"where": next(places)}) + "\n" for row in read))
        return made

    def environ(self, name: str) -> dict[str, str]:
        """With the file of sleeps, and who it is."""
        return super().environ(name) | {sleeps.FILE: str(self._sleeps), sleeps.PROCESS: name}

    @retry(
        retry=retry_if_exception_type(httpx.RemoteProtocolError),
        wait=wait_fixed(0.1),
        stop=stop_after_attempt(5),
        reraise=True,
    )
    async def verdict(self, **parameters: float) -> dict[str, Any]:
        """What the aggregator says now. Asked again where it ended the connection, unused for some
        seconds, in the very moment."""
        answer: dict[str, Any] = await self.rest("verdict", **parameters)
        return answer

    async def restart(self, sections: Sections) -> None:
        """End trainer and workers, and start them again with other keys in the recipe: the same
        run, in its next attempt."""
        await self.wind_down()
        await self.trainer.stop()
        found: dict[str, Any] = self.recipe.model_dump()
        for name, keys in sections.items():
            found[name] |= keys
        self.recipe = Recipe.model_validate(found)
        (self.folder / "recipe.toml").write_text(config.dump_toml(self.recipe))
        for keeper in (self.trainer, *self.scorers, *self.generators):
            keeper.start()
