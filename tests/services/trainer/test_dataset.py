import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import config
from services.common.config import Recipe
from services.common.errors import UserError
from services.trainer import dataset

SUMS = {
    "task": "chain_sum",
    "size": 50,
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


def load(data: dict[str, Any], **evaluation: Any) -> dataset.Dataset:
    return dataset.load(
        Recipe.model_validate(
            {"data": data, "evaluation": evaluation, "trainer": {"max_steps": 1}}, strict=False
        )
    )


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_generated_task_has_question_answer_and_metadata() -> None:
    found = load({"reasoning_gym": SUMS}, size=7)
    assert (len(found.training), len(found.evaluation)) == (50, 7)
    row = found.training[0]
    assert row.messages == [{"role": "user", "content": row.columns["question"]}]
    assert row.columns["metadata"]["source_dataset"] == "chain_sum"
    assert row == load({"reasoning_gym": SUMS}, size=7).training[0]
    assert json.loads(json.dumps(row.columns)) == row.columns


def test_a_system_prompt_stands_before_texts_only(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": messages}])
    rows = list(load({"file": path, "system_prompt": "Be brief."}, enabled=False).training)
    assert rows[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
    ]
    assert rows[1].messages == messages


def test_the_last_rows_of_a_file_are_for_evaluation_alone(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"q": f"text {n}", "n": n} for n in range(10)])
    found = load({"file": path, "prompt_column": "q"}, size=3)
    assert [row.columns["n"] for row in found.training] == list(range(7))
    assert [(row.index, row.columns["n"]) for row in found.evaluation] == [(7, 7), (8, 8), (9, 9)]
    assert sorted(found.order(0)) == list(range(7))
    assert len(load({"file": path, "prompt_column": "q"}, enabled=False).training) == 10


def test_every_expression_is_every_question_that_the_package_can_ask() -> None:
    found = load({"reasoning_gym": {**SUMS, "size": 4000}}, every_expression=True)
    assert len(found.evaluation) == 200

    def comparable(row: dataset.Row) -> dict[str, Any]:
        metadata = {**row.columns["metadata"], "source_index": None}
        return {**row.columns, "metadata": metadata}

    drawn = {row.columns["question"]: comparable(row) for row in found.training}
    assert {row.columns["question"]: comparable(row) for row in found.evaluation} == drawn


def test_the_demo_trains_and_is_evaluated_on_one_digit_sums() -> None:
    path = Path(__file__).parents[3] / "recipes" / "arithmetic.toml"
    found = dataset.load(config.load(path, environ={}))
    assert (len(found.training), len(found.evaluation)) == (10_000, 200)


@pytest.mark.parametrize(
    ("params", "number"),
    [
        ({"max_digits": 2}, 16_400),
        ({"max_digits": 1, "allow_negation": True}, 2 * 19 * 19),
        ({"min_digits": 2, "max_digits": 2, "allow_negation": True}, None),
    ],
)
def test_every_expression_follows_the_parameters(
    params: dict[str, Any], number: int | None
) -> None:
    spec = {**SUMS, "params": {"min_terms": 2, "max_terms": 2, **params}}
    if number is None:
        with pytest.raises(UserError, match="more than 20,000 expressions"):
            load({"reasoning_gym": spec}, every_expression=True)
        return
    rows = list(load({"reasoning_gym": spec}, every_expression=True).evaluation)
    assert len({row.columns["question"] for row in rows}) == len(rows) == number


def test_parquet_and_jsonl_mean_the_same(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"{n} + {n}"}], "answer": 2.0 * n, "tag": None}
        for n in range(5)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    jsonl = load({"file": write_jsonl(tmp_path / "rows.jsonl", rows)}, size=2)
    parquet = load({"file": str(tmp_path / "rows.parquet")}, size=2)
    assert list(parquet.training) == list(jsonl.training)
    assert list(parquet.evaluation) == list(jsonl.evaluation)


def test_columns_become_what_json_can_write(tmp_path: Path) -> None:
    import datetime
    import decimal

    table = pyarrow.table(
        {
            "prompt": ["a"],
            "day": [datetime.date(2026, 1, 2)],
            "price": [decimal.Decimal("1.50")],
            "score": [float("nan")],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (row,) = load({"file": str(tmp_path / "rows.parquet")}, enabled=False).training
    assert row.columns == {"prompt": "a", "day": "2026-01-02", "price": "1.50", "score": None}


def test_a_column_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a"], "image": [b"\x89PNG"]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="column 'image' of row 0 is a bytes"):
        load({"file": str(tmp_path / "rows.parquet")}, enabled=False)


@given(seed=st.integers(0, 2**31), epoch=st.integers(0, 1000))
def test_an_order_is_a_permutation_of_the_rows_and_of_seed_and_epoch_alone(
    seed: int, epoch: int
) -> None:
    rows = dataset.Rows(lambda _: {}, positions=range(23), prompt=dataset.Prompt("prompt", None))
    first, second = (
        dataset.Dataset(training=rows, evaluation=rows, shuffle=True, seed=seed) for _ in range(2)
    )
    assert sorted(first.order(epoch)) == list(range(23))
    assert first.order(epoch) == second.order(epoch) != first.order(epoch + 1)


def test_an_order_stays_what_it_was_when_checkpoints_were_written() -> None:
    rows = dataset.Rows(lambda _: {}, positions=range(6), prompt=dataset.Prompt("prompt", None))
    found = dataset.Dataset(training=rows, evaluation=rows, shuffle=True, seed=0)
    assert [found.order(0), found.order(1)] == [[3, 5, 1, 2, 0, 4], [5, 0, 1, 4, 3, 2]]
    still = dataset.Dataset(training=rows, evaluation=rows, shuffle=False, seed=0)
    assert still.order(3) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "column 'prompt' of row 1 is None; it must be a text or a list"),
        (7, "row 1 is 7"),
        ([], "row 1 is "),
        (["hello"], "row 1 has the message 'hello'"),
        ([{"role": "user"}], "it must be {role, content}"),
        ([{"role": "user", "content": "a", "name": "b"}], "it must be {role, content}"),
        ([{"role": "robot", "content": "a"}], "role 'robot'; roles are system, user"),
        ("\ud800", "half a surrogate pair"),
    ],
)
def test_a_prompt_that_is_none_is_found_before_the_run(
    tmp_path: Path, prompt: object, said: str
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "fine"}, {"prompt": prompt}])
    with pytest.raises(UserError, match=r"^data.prompt_column: ") as error:
        load({"file": path}, enabled=False)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"text": "b", "n": 1}])
    with pytest.raises(UserError, match="row 1 has no column 'prompt'; it has text, n"):
        load({"file": path}, enabled=False)
    with pytest.raises(UserError, match="row 0 has no column 'problem'; it has question, answer"):
        load({"reasoning_gym": SUMS, "prompt_column": "problem"})


def test_too_few_rows_and_seeds_that_overlap_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}] * 4)
    with pytest.raises(UserError, match=r"evaluation.size: 4 leaves nothing .* of the 4 rows"):
        load({"file": path}, size=4)
    with pytest.raises(UserError, match=r"data.file: .* has no rows"):
        load({"file": write_jsonl(tmp_path / "empty.jsonl", [])})
    with pytest.raises(UserError, match=r"evaluation.seed: 49 .* take 50 or more"):
        load({"reasoning_gym": SUMS}, seed=49)
    load({"reasoning_gym": SUMS}, seed=50)
