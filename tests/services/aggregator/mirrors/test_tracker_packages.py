"""What Weights & Biases (offline) and trackio themselves have stored, with their real packages.

They are in a folder of their own (requirements/trackers.txt), so a process of its own imports them.
"""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
PACKAGES = ROOT / ".venv" / "trackers"

READ_WANDB = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record
data, at = open(sys.argv[1], "rb").read(), 7
while at + 7 <= len(data):
    size = int.from_bytes(data[at + 4 : at + 6], "little")
    assert data[at + 6] == 1, "a record in parts"
    record = Record.FromString(data[at + 7 : at + 7 + size])
    at += 7 + size
    if record.HasField("run"):
        run = record.run
        print(json.dumps([run.entity, run.project, run.run_id, run.run_group]))
    if record.HasField("history"):
        items = record.history.item
        print(json.dumps({"/".join(i.nested_key) or i.key: i.value_json for i in items}))
"""
"""W&B's offline file: 7 bytes, then records behind 7 bytes each (checksum, size, kind)."""

pytestmark = pytest.mark.skipif(
    not PACKAGES.exists(), reason=f"no {PACKAGES}: make puts wandb and trackio there"
)


def environ() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (PACKAGES, ROOT))),
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
    }


def run(*arguments: str, **more: str) -> str:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environ() | more,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trackers")
    run(
        *("-m", "tests.services.aggregator.mirrors.tracker_run", str(folder)),
        TRACKIO_DIR=str(folder / "trackio"),
    )
    return folder


def of_wandb(folder: Path, name: str) -> list[Any]:
    """Who the run is, then its steps, as W&B's own file has them."""
    [path] = folder.rglob(f"run-{name}.wandb")
    return [json.loads(line) for line in run("-c", READ_WANDB, str(path)).splitlines()]


def test_wandb_keeps_the_steps_of_each_line(folder: Path) -> None:
    who, *steps = of_wandb(folder, "demo-1")
    assert who == ["team", "grpo", "demo-1", "demo"]
    kept = [(step["_step"], step["loss"], step["rewards/exact"]) for step in steps]
    assert kept == [("3", "1.5", "1"), ("4", "2", "1")]
    _, *again = of_wandb(folder, "demo-2")
    assert [(step["_step"], step["loss"]) for step in again] == [("4", "2")]


def test_trackio_keeps_them_too_and_nothing_of_its_own(folder: Path) -> None:
    with sqlite3.connect(folder / "trackio" / "grpo.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id")
        kept = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
        system = database.execute("SELECT COUNT(*) FROM system_metrics").fetchone()
    assert kept == [
        ("demo-1", 3, {"loss": 1.5, "rewards/exact": 1.0}),
        ("demo-1", 4, {"loss": 2.0, "rewards/exact": 1.0}),
        ("demo-2", 4, {"loss": 2.0, "rewards/exact": 1.0}),
    ]
    assert system == (0,)
