from pathlib import Path

import pytest

from services.common.config import Data, Recipe
from services.common.errors import UserError
from services.common.experiment import check_same, differences, plain
from services.common.training_config import Loss


def recipe(**changes: object) -> Recipe:
    return Recipe.model_validate({"run": "r", "data": Data(file="x", epochs=1)} | changes)


def test_differences_are_named_by_key() -> None:
    before = {"a": 1, "b": {"c": [1, 2], "d": {}}, "gone": None, "empty": []}
    now = {"a": 1, "b": {"c": [1, 3, 4], "d": {"e": "x"}}, "empty": []}
    assert differences(before, now) == [
        "b.c.1: 2 before, 3 now",
        "b.c.2: not given before, 4 now",
        "b.d: {} before, not given now",
        'b.d.e: not given before, "x" now',
        "gone: null before, not given now",
    ]
    assert differences(before, before) == []


def test_how_long_a_run_is_makes_it_no_other() -> None:
    longer = recipe(data=Data(file="x", epochs=2), trainer={"max_steps": 7})
    check_same(plain(recipe()), longer, place=Path("runs/r"))


def test_what_differs_is_said_in_one_line() -> None:
    other = recipe(loss=Loss(clip_low=0.1), data=Data(file="y"), trainer={"max_steps": 1})
    with pytest.raises(UserError) as refused:
        check_same(plain(recipe()), other, place=Path("runs/r"))
    assert str(refused.value) == (
        'run r in runs/r has another recipe (data.file: "x" before, "y" now; '
        "loss.clip_low: 0.2 before, 0.1 now); choose another run name, or start over with --fresh"
    )


def test_an_adapter_belongs_to_the_experiment_and_how_it_is_published_does_not() -> None:
    assert "lora" not in recipe().experiment()["trainer"]
    before = recipe(trainer={"lora": {"rank": 8}})
    merged = recipe(trainer={"lora": {"rank": 8, "publish": "merged"}})
    check_same(plain(before), merged, place=Path("runs/r"))
    for other in (recipe(), recipe(trainer={"lora": {"rank": 16}})):
        with pytest.raises(UserError, match=r"trainer\.lora.*has another|another recipe"):
            check_same(plain(before), other, place=Path("runs/r"))
