from pathlib import Path

import pytest

from services.trainer import journal
from services.trainer.journal import Journal, Record, records_since
from tests.services.trainer.full_disk import no_file_above

TRAINED = Record("trained", "0.1.1.0", "no signal", 3)


def ids(folder: Path, attempt: int, step: int) -> list[str]:
    return [record.group_id for record in records_since(folder, (attempt, step))]


def test_what_was_written_since_a_checkpoint_is_read_in_order(tmp_path: Path) -> None:
    first = Journal(tmp_path, moment=(1, 0))
    first.write(Record("dispatched", "a"))
    first.rotate((1, 50))
    first.write(TRAINED)
    first.rotate((1, 100))
    first.write(Record("dispatched", "c"))
    # Not closed: the trainer was killed. The next one goes on from step 50.
    second = Journal(tmp_path, moment=(2, 50))
    second.write(Record("dropped", "d", "stale"))
    assert next(iter(records_since(tmp_path, (1, 50)))) == TRAINED
    assert ids(tmp_path, 0, 0) == ["a", "0.1.1.0", "c", "d"]
    assert ids(tmp_path, 1, 50) == ["0.1.1.0", "c", "d"]
    assert ids(tmp_path, 1, 100) == ["c", "d"]
    assert ids(tmp_path, 2, 51) == []
    journal.prune(tmp_path, before=(1, 100))
    assert ids(tmp_path, 0, 0) == ["c", "d"]
    first.close()
    second.close()


def test_a_line_that_a_machine_cut_off_is_skipped(tmp_path: Path) -> None:
    book = Journal(tmp_path, moment=(1, 0))
    book.write(TRAINED)
    book.close()
    with (tmp_path / "1-0.jsonl").open("ab") as file:
        file.write(b'["trained","0.2')
    assert list(records_since(tmp_path, (0, 0))) == [TRAINED]


def test_lines_wait_for_room_on_a_full_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book = Journal(tmp_path, moment=(1, 0))
    book.write(Record("dispatched", "a"))
    with no_file_above((tmp_path / "1-0.jsonl").stat().st_size + 5):
        book.write(Record("dispatched", "b"))
        book.write(Record("dispatched", "c"))
    assert "the journal cannot be written" in capsys.readouterr().out
    book.write(Record("dispatched", "d"))
    assert ids(tmp_path, 0, 0) == ["a", "b", "c", "d"]
    book.close()
