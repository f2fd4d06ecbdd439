"""The reward functions that a recipe can name without a module. Written as any user's function
would be.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

TUPLE_TASKS = ("arc_agi", "rearc")
"""Tasks that compare tuples: rows travel as JSON, where tuples become lists, and the right answer
would score 0.05."""


def reasoning_gym(
    *,
    texts: list[str],
    question: list[str],
    answer: list[str],
    metadata: list[Any],
    tag: str | None = None,
) -> list[float]:
    """reasoning-gym's own scorer of the row's task, 0 to 1, for rows made by that package.

    Needs its columns `question`, `answer` and `metadata` (an object, or its JSON text), whose
    `source_dataset` names the task. With `tag` only what stands in the last <tag>…</tag> is scored,
    and 0 is given where there is none. Raises ValueError for tasks whose answers do not survive
    JSON.
    """
    rewards = []
    for text, *columns in zip(texts, question, answer, metadata, strict=True):
        entry = dict(zip(("question", "answer", "metadata"), columns, strict=True))
        if isinstance(entry["metadata"], str):
            entry["metadata"] = json.loads(entry["metadata"])
        said = text.strip() if tag is None else _tagged(text, tag)
        task = entry["metadata"]["source_dataset"]
        if task in TUPLE_TASKS:
            raise ValueError(f"reasoning_gym: {task} cannot be scored: its rows hold tuples")
        score = _scorer(task)
        rewards.append(float(score(said, entry)))
    return rewards


def exact_match(*, texts: list[str], column: str = "answer", **columns: list[Any]) -> list[float]:
    """1 where the text, stripped, is the row's `column`, stripped; else 0.

    A column that is not a text is compared as JSON writes it: 7 with "7".
    """
    if column not in columns:
        raise KeyError(
            f"exact_match compares with the column {column!r}, which the row does not have"
        )
    wanted = [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in columns[column]
    ]
    return [float(text.strip() == right.strip()) for text, right in zip(texts, wanted, strict=True)]


def environment(*, environment_rewards: list[float | None]) -> list[float | None]:
    """What each conversation's environment says of it; it abstains where that is nothing."""
    return environment_rewards


@functools.cache
def _scorer(task: str) -> Callable[[str | None, dict[str, Any]], float]:
    # Not at the top: the package takes a second and a half to import, and only workers need it.
    from reasoning_gym import get_score_answer_fn

    scorer: Callable[[str | None, dict[str, Any]], float] = get_score_answer_fn(task)
    return scorer


def _tagged(text: str, tag: str) -> str | None:
    from reasoning_gym.utils import extract_answer

    found: str | None = extract_answer(text, tag_name=tag)
    return found
