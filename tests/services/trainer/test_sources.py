import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.config import ReasoningGym
from services.common.errors import UserError
from services.trainer import sources


def test_rows_are_made_when_read_and_by_seed_plus_index() -> None:
    spec = ReasoningGym(task="chain_sum")
    many = sources.reasoning_gym(spec, size=10**9, seed=3)
    shifted = sources.reasoning_gym(spec, size=1, seed=3 + 123_456_789)
    assert many.read(123_456_789)["question"] == shifted.read(0)["question"]


@pytest.mark.parametrize(
    ("task", "params", "said"),
    [
        ("chain_summ", {}, "data.reasoning_gym.task: .*did you mean chain_sum"),
        ("zzzzzzzz", {}, "data.reasoning_gym.task: .*one of .*chain_sum"),
        ("chain_sum", {"digits": 1}, "data.reasoning_gym.params: .*'digits'"),
        ("chain_sum", {"min_terms": 9}, "data.reasoning_gym.params: .*max_terms must be"),
        ("chain_sum", {"seed": 9}, "params.seed: write it as data.reasoning_gym.seed"),
    ],
)
def test_mistakes_in_a_generated_task(task: str, params: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        sources.reasoning_gym(ReasoningGym(task=task, params=params), size=1, seed=0)


def test_every_expression_wants_two_terms() -> None:
    with pytest.raises(UserError, match="they are 2 and 6"):
        sources.every_expression(ReasoningGym(task="chain_sum"))


def test_jsonl_takes_what_editors_and_texts_do_to_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"a": "one\u2028two"}\r\n\n{"a": 2}'.encode())
    source = sources.file(str(path))
    assert [source.read(index) for index in range(source.size)] == [{"a": "one\u2028two"}, {"a": 2}]
    assert list(source.column("b")) == [sources.MISSING] * 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", b'{"a": 1}\n{"a": \n', "line 2 is not JSON"),
        ("rows.jsonl", b"[1]\n", "line 1 is not a JSON object"),
        ("rows.jsonl", b'{"a": "\xff"}\n', "is not UTF-8"),
        ("rows.parquet", b"hello", "is not a Parquet file"),
        ("rows.csv", b"a\n1\n", r"must end in \.jsonl, \.ndjson, \.parquet"),
        ("none.jsonl", None, "no such file"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"^data.file: .*{said}"):
        sources.file(str(path))


DATASETS_SCRIPT = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError(f"the network was asked for {args}")

socket.getaddrinfo = socket.create_connection = refuse
from services.common.errors import UserError
from services.trainer import sources

files, saved, splits = (sources.dataset(name, split="train") for name in sys.argv[1:4])
for source in (files, saved, splits):
    assert source.size == 3, source.size
    assert source.read(2) == {"prompt": "text 2", "n": 2}, source.read(2)
    assert list(source.column("n")) == [0, 1, 2]
    assert list(source.column("m")) == [sources.MISSING] * 3
bad = ((sys.argv[1], "test"), (sys.argv[3], "test"), (sys.argv[4], "train"), ("./no", "train"))
for name, split in bad:
    try:
        sources.dataset(name, split=split)
    except UserError as error:
        print(error)
assert "torch" not in sys.modules
"""


def test_a_dataset_folder_is_read_without_network_or_torch(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": f"text {n}", "n": n} for n in range(3)]
    files, empty = tmp_path / "files", tmp_path / "empty"
    files.mkdir()
    empty.mkdir()
    one = datasets.Dataset.from_list(rows)
    one.to_json(files / "train.jsonl")
    one.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=one).save_to_disk(tmp_path / "splits")
    folders = [str(tmp_path / name) for name in ("files", "saved", "splits", "empty")]
    # In a process of its own: the library keeps its cache folder from its first import.
    done = subprocess.run(
        [sys.executable, "-c", DATASETS_SCRIPT, *folders],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    unknown, unsplit, no_data, missing = done.stdout.splitlines()
    assert unknown.startswith(f"data.dataset: {files} (split test) cannot be loaded")
    assert unsplit.startswith("data.split: ")
    assert no_data.startswith(f"data.dataset: {empty} (split train) cannot be loaded")
    assert missing == "data.dataset: no such folder: ./no"
