import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import Fenced, UserError
from services.trainer.attempts import Attempts
from services.trainer.checkpoint import CheckpointFailed, Checkpoints
from services.trainer.journal import Journal, Record, records_since
from services.trainer.rank_files import RankFiles
from services.trainer.ranks import Group
from services.trainer.tensor_files import Part, read_whole, shapes
from tests.services.trainer.full_disk import no_file_above


def tensors(value: float) -> RankFiles:
    return RankFiles(Group(), {name: Part(tensor) for name, tensor in plain(value).items()})


def plain(value: float) -> dict[str, torch.Tensor]:
    return {
        "master.a": torch.full((30, 40), value),
        "random.cpu.0": torch.arange(9).byte(),
        "num_applied": torch.tensor(7),
    }


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir() if path.name != "journal")


@pytest.fixture
def three(tmp_path: Path) -> Checkpoints:
    """Of steps 50, 100 and 150."""
    made = Checkpoints(tmp_path, keep=3)
    for step in (50, 100, 150):
        made.write((1, step), {"step": step}, tensors(step))
    return made


def test_the_newest_is_read_as_it_was_written(three: Checkpoints) -> None:
    found = three.newest()
    assert found is not None
    assert (found.moment, found.step, found.state["step"]) == ((1, 150), 150, 150)
    assert shapes(found.folder).keys() == plain(0).keys()
    read = read_whole(found.folder, plain(0))
    assert all(torch.equal(read[name], tensor) for name, tensor in plain(150).items())


def test_there_is_none_before_the_first(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", keep=1).newest() is None


def test_a_later_attempt_is_newer_whatever_its_step(three: Checkpoints) -> None:
    three.write((2, 60), {}, tensors(60))
    found = three.newest()
    assert found is not None
    assert found.moment == (2, 60)


def test_the_last_few_are_kept_and_the_journal_behind_them(three: Checkpoints) -> None:
    journal = Journal(three.journal, moment=(1, 50))
    journal.write(Record("dispatched", "a"))
    journal.rotate((1, 100))
    journal.write(Record("dispatched", "b"))
    three.write((1, 200), {}, tensors(200))
    assert names(three) == ["1-100", "1-150", "1-200"]
    assert [record.group_id for record in records_since(three.journal, (0, 0))] == ["b"]
    journal.close()


def truncated(path: Path) -> None:
    data = (path / "rank-00000.safetensors").read_bytes()
    (path / "rank-00000.safetensors").write_bytes(data[:-100])


def flipped(path: Path) -> None:
    data = bytearray((path / "rank-00000.safetensors").read_bytes())
    data[-50] ^= 1
    (path / "rank-00000.safetensors").write_bytes(data)


def half_a_state(path: Path) -> None:
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text[: len(text) // 2])


def without_tensors(path: Path) -> None:
    (path / "rank-00000.safetensors").unlink()


@pytest.mark.parametrize("damage", [truncated, flipped, half_a_state, without_tensors])
def test_a_broken_one_is_passed_over_loudly_and_never_taken_again(
    three: Checkpoints, damage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(three.folder / "1-150")
    found = three.newest()
    assert found is not None
    assert found.step == 100
    assert "BROKEN CHECKPOINT, the one before is taken" in capsys.readouterr().out
    assert names(three) == ["1-100", "1-50", "broken-1-150"]


def test_one_of_another_version_is_not_broken(three: Checkpoints) -> None:
    state = json.loads((three.folder / "1-150" / "state.json").read_text())
    (three.folder / "1-150" / "state.json").write_text(json.dumps(state | {"format": 3}))
    with pytest.raises(UserError, match=r"1-150 has format 3, and this version reads 2"):
        three.newest()
    assert "1-150" in names(three)


def test_what_a_killed_trainer_left_half_written_is_nothing(three: Checkpoints) -> None:
    half = three.folder / ".writing-1-200"
    half.mkdir()
    (half / "rank-00000.safetensors").write_bytes(b"half")
    found = three.newest()
    assert found is not None
    assert found.step == 150
    three.write((2, 200), {}, tensors(200))
    assert names(three) == ["1-100", "1-150", "2-200"]


def test_a_full_disk_leaves_the_one_before(three: Checkpoints) -> None:
    with (
        no_file_above(1000),
        pytest.raises(CheckpointFailed, match=r"1-200 cannot be written: .*(large|os error 27)"),
    ):
        three.write((1, 200), {}, tensors(200))
    assert names(three) == ["1-100", "1-150", "1-50"]
    found = three.newest()
    assert found is not None
    assert found.step == 150
    three.write((1, 200), {}, tensors(200))


def test_a_trainer_that_was_replaced_writes_none(three: Checkpoints) -> None:
    attempts = Attempts(three.folder)
    attempts.begin(2)
    with pytest.raises(Fenced, match="attempt 1 was replaced by attempt 2"):
        three.write((1, 200), {}, tensors(200))
    assert "1-200" not in names(three)
    three.write((2, 200), {}, tensors(200))


def test_an_attempt_begins_once(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    assert attempts.highest() == 0
    attempts.begin(1)
    attempts.begin(12)
    assert attempts.highest() == 12
    with pytest.raises(Fenced, match="attempt 12 was begun by another trainer"):
        attempts.begin(12)
