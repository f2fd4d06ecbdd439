"""The recipe's section `weights`."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.common.config import Recipe


def recipe(**sections: Any) -> Recipe:
    trainer = {"max_steps": 1, **sections.pop("trainer", {})}
    return Recipe.model_validate({"data": {"file": "p.jsonl"}, "trainer": trainer, **sections})


def test_versions_are_fetched_by_default() -> None:
    assert recipe().weights.transport == "grpc"
    nccl = recipe(weights={"transport": "nccl", "nccl_replicas": 3, "nccl_timeout_s": 5.0})
    assert (nccl.weights.nccl_replicas, nccl.weights.nccl_timeout_s) == (3, 5.0)


@pytest.mark.parametrize(
    ("sections", "mistake"),
    [
        ({"weights": {"nccl_replicas": 2}}, "weights.nccl_replicas: 2 has no meaning"),
        (
            {"weights": {"transport": "nccl"}, "trainer": {"lora": {}}},
            'weights.transport: "nccl" is for whole weights',
        ),
        (
            {"weights": {"transport": "nccl"}, "trainer": {"device": "cpu"}},
            'weights.transport: "nccl" sends from a GPU',
        ),
    ],
)
def test_what_contradicts_itself_is_refused(sections: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ValidationError, match=mistake):
        recipe(**sections)


def test_the_way_of_weights_makes_no_other_experiment() -> None:
    assert recipe().identity() == recipe(weights={"transport": "nccl"}).identity()
