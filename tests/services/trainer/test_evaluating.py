"""Evaluations between steps, on a real queue server with a real (tiny) model."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from headrace.v1 import rollout_pb2, sample_pb2

from services.common.config import Recorder as RecorderSettings
from services.common.partials import Count, Observation, Partial, Ratio
from services.common.recorder import Recorder
from services.common.streams import Entry, Stage
from services.trainer.evaluation import Answers, Evaluation, record_evaluation
from tests.services.trainer.folders import make_folder
from tests.services.trainer.river import River, flowing, flowing_as, recipe_of
from tests.services.trainer.test_training import check_balance, check_drained
from tests.waiting import until

EVERY_TWO: dict[str, Any] = {
    "evaluation": {"enabled": True, "every_steps": 2},
    "checkpoint": {"every_steps": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def recorded(recorder: Recorder, key: str) -> dict[int, Partial]:
    """By step."""
    found = recorder.snapshot().items()
    return {step: partial for (name, _, step), partial in found if name == key}


def steps_of(report: dict[str, Any]) -> list[int]:
    return [each["step"] for each in report["evaluations"]]


def asked(river: River) -> Counter[str]:
    """How often which evaluation asked."""
    return Counter(r.group_id.split(".")[1] for r in river.requests if r.evaluation)


async def test_the_policy_is_evaluated_between_steps(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, **EVERY_TWO)
    async with flowing(recipe) as river:
        report = check_balance(await river.run())
    check_drained(river)
    assert [(e["step"], e["version"]) for e in report["evaluations"]] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (5, 6),
    ]
    # It is recorded under the step that is open, as its time is.
    for key in ("eval/reward", "eval/version", "perf/eval_s"):
        assert set(recorded(river.recorder, key)) == {0, 3, 5, 6}, key
    versions = recorded(river.recorder, "eval/version")
    assert {step: p.max for step, p in versions.items() if isinstance(p, Observation)} == {
        0: 1,
        3: 3,
        5: 5,
        6: 6,
    }
    rewards = recorded(river.recorder, "eval/reward").values()
    assert {(p.n, p.sum) for p in rewards if isinstance(p, Observation)} == {(2, 1.0)}
    assert river.counts("eval/failed_total") == {"": 0}
    details = river.lifecycle.details
    assert details["eval_before"] == details["eval_after"] == "0.0000"
    # None of it is in training's numbers or in the ledger.
    events = {event.group_id for event in river.recorder._events}
    assert not {group_id for group_id in events if group_id.startswith("eval")}
    assert report["trained_samples"] == 20


async def test_an_evaluation_in_between_is_part_of_the_step_that_waits_for_it(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(tmp_path, model, valkey_url, **EVERY_TWO)
    async with flowing(recipe) as river:
        await river.run()
    held, lengths = recorded(river.recorder, "perf/eval_s"), recorded(river.recorder, "perf/step_s")
    unaccounted = recorded(river.recorder, "perf/unaccounted_s")
    for step in (3, 5):
        all_s, eval_s, rest_s = lengths[step], held[step], unaccounted[step]
        assert isinstance(all_s, Observation)
        assert isinstance(eval_s, Observation)
        assert isinstance(rest_s, Observation)
        assert eval_s.sum + rest_s.sum < all_s.sum
        assert rest_s.sum >= 0


class Late(River):
    """Answers each row of evaluation with the policy of before first."""

    answered: Counter[int]

    async def _score_one(self, stage: Stage, entry: Entry) -> None:
        group = rollout_pb2.RolloutGroup.FromString(entry.data)
        if not entry.evaluation:
            await super()._score_one(stage, entry)
            return
        row, old = group.request.row_index, group.oldest_version - 1
        self.answered[row] += 1
        late = self.answered[row] == 1
        scored = sample_pb2.ScoredGroup(
            group_id=entry.group_id, oldest_version=old if late else group.oldest_version
        )
        scored.rollouts.add(reward=9.0 if late else 1.0, num_generated_tokens=3)
        await stage.hand_off(entry, data=scored.SerializeToString(), n=1)


async def test_an_answer_of_an_older_policy_is_asked_again_and_not_recorded(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    recipe = recipe_of(
        tmp_path, model, valkey_url, evaluation={"enabled": True}, trainer={"max_steps": 1}
    )
    async with flowing_as(Late, recipe) as river:
        river.answered = Counter()
        report: Any = await river.run()
    assert asked(river) == {"0-0": 2, "0-1": 2, "1-0": 2}
    assert report["eval_before"] == report["eval_after"] == 1.0
    found = recorded(river.recorder, "eval/reward")[0]
    assert isinstance(found, Observation)
    assert (found.n, found.max) == (2, 1.0)
    length = recorded(river.recorder, "eval/mean_length")[0]
    assert isinstance(length, Ratio)
    assert (length.numerator, length.denominator) == (6, 2)


async def test_a_run_that_goes_on_neither_repeats_nor_skips_an_evaluation(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """Killed in the fourth step: the checkpoint of step 2 holds the evaluation after it."""
    recipe = recipe_of(tmp_path, model, valkey_url, **EVERY_TWO)
    async with flowing(recipe) as first:
        running = asyncio.create_task(first.run())
        await until(lambda: first.lifecycle.details.get("step") == "4" or running.done())
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert asked(first) == {"0-0": 2, "1-0": 2}
    async with flowing(recipe) as river:
        report = check_balance(await river.run())
    assert asked(river) == {"2-0": 2, "3-0": 2}
    assert steps_of(report) == [0, 2, 4, 5]
    assert report["attempts"] == 2


async def test_an_evaluation_that_was_cut_off_is_made_by_the_next_attempt(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    class Mute(River):
        """Answers the first evaluation only."""

        async def _score_one(self, stage: Stage, entry: Entry) -> None:
            if entry.evaluation and not entry.group_id.startswith("eval.0-"):
                return
            await super()._score_one(stage, entry)

    recipe = recipe_of(tmp_path, model, valkey_url, **EVERY_TWO)
    async with flowing_as(Mute, recipe) as first:
        running = asyncio.create_task(first.run())
        await until(lambda: asked(first)["1-0"] == 2 or running.done())
        # Training's groups go on meanwhile, as far as pacing allows.
        full = recipe.max_outstanding
        await until(lambda: len(first.training._book.outstanding) == full or running.done())
        first.lifecycle.stopping.set()
        assert await running is None
    async with flowing(recipe) as river:
        report = check_balance(await river.run())
    assert steps_of(report) == [0, 2, 4, 5]
    assert set(recorded(river.recorder, "eval/reward")) == {3, 5, 6}


async def test_the_same_weights_are_not_evaluated_again_at_the_end(
    valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """All prompts are given up after the evaluation before training."""
    recipe = recipe_of(
        tmp_path,
        model,
        valkey_url,
        evaluation={"enabled": True},
        data={"epochs": 0.2},
        trainer={"max_steps": None},
    )
    async with flowing(recipe, decide=lambda *_: "failed") as river:
        report: Any = await river.run()
    assert (report["steps"], steps_of(report)) == (0, [0])
    assert report["eval_before"] == report["eval_after"] == 0.0


def test_values_of_an_evaluation() -> None:
    answers, recorder = (
        Answers(),
        Recorder(
            run="r", producer="t", service="trainer", settings=RecorderSettings(), channel=None
        ),
    )
    first = sample_pb2.ScoredRollout(reward=1.5, num_generated_tokens=4)
    first.functions.add(name="exact", reward=1.0)
    first.functions.add(name="brief", reward=0.5)
    second = sample_pb2.ScoredRollout(reward=1.0, num_generated_tokens=16, clipped=True)
    second.functions.add(name="exact", reward=1.0)
    second.functions.add(name="brief")
    unscored = sample_pb2.ScoredRollout(num_generated_tokens=1)
    unscored.functions.add(name="exact")
    for rollout in (first, second, unscored):
        answers.add(rollout)
    found = Evaluation(
        accuracy=1.0, reward=1.25, rows=3, failed=answers.num_failed, version=7, seconds=1.0
    )
    record_evaluation(recorder, found, answers, step=12)
    values: dict[str, Any] = {}
    for (key, _, step), partial in recorder.snapshot().items():
        assert step == 12
        if isinstance(partial, Observation):
            values[key] = (partial.n, partial.sum)
        elif isinstance(partial, Ratio):
            values[key] = (partial.numerator, partial.denominator)
        elif isinstance(partial, Count):
            values[key] = partial.sum
    assert values == {
        "eval/reward": (2, 2.5),
        "eval/rewards/exact": (2, 2.0),
        "eval/rewards/brief": (1, 0.5),
        "eval/mean_length": (21, 3),
        "eval/clipped_ratio": (1, 3),
        "eval/failed_total": 1,
        "eval/version": (1, 7),
    }
