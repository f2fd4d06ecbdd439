import json
from typing import Any

import pytest
import reasoning_gym as gym

from services.scorer.builtin_rewards import environment, exact_match, reasoning_gym


def rows_of(task: str, number: int, **params: Any) -> list[dict[str, Any]]:
    """Rows as they come out of a request: through JSON."""
    return json.loads(json.dumps(list(gym.create_dataset(task, size=number, seed=3, **params))))  # type: ignore[no-any-return]


def columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in ("question", "answer", "metadata")}


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "spell_backward"])
def test_reasoning_gym_gives_its_own_scorers_value(task: str) -> None:
    rows = rows_of(task, 4)
    score = gym.get_score_answer_fn(task)
    texts = [rows[0]["answer"], f" {rows[1]['answer']}\n", f"It is {rows[2]['answer']}.", "no"]
    given = reasoning_gym(texts=texts, **columns(rows))
    expected = [score(text.strip(), row) for text, row in zip(texts, rows, strict=True)]
    assert given == expected
    assert given[:2] == [1.0, 1.0]
    assert given[3] < 1.0


def test_reasoning_gym_reads_metadata_kept_as_text_and_a_tag() -> None:
    rows = rows_of("chain_sum", 2)
    for row in rows:
        row["metadata"] = json.dumps(row["metadata"])
    texts = [f"hm <answer>{rows[0]['answer']}</answer>", rows[1]["answer"]]
    assert reasoning_gym(texts=texts, tag="answer", **columns(rows)) == [1.0, 0.0]


def test_reasoning_gym_names_a_task_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="no_such_task"):
        reasoning_gym(
            texts=["1"], question=[""], answer=["1"], metadata=[{"source_dataset": "no_such_task"}]
        )


def test_exact_match_compares_stripped_text() -> None:
    texts = [" 7\n", "7.0", "", "7"]
    assert exact_match(texts=texts, answer=["7"] * 4) == [1, 0, 0, 1]
    assert exact_match(texts=texts, answer=[7] * 4) == [1, 0, 0, 1]
    assert exact_match(texts=["b"], column="gold", answer=["a"], gold=[" b "]) == [1]
    with pytest.raises(KeyError, match="the column 'gold'"):
        exact_match(texts=["b"], column="gold", answer=["a"])


def test_environment_gives_what_there_is() -> None:
    assert environment(environment_rewards=[0.5, None, 0.0]) == [0.5, None, 0.0]
