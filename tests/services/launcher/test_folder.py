import os
from pathlib import Path

import pytest

from services.common.errors import UserError
from services.launcher import folder
from services.launcher.folder import RunFolder


def test_a_new_run_gets_a_folder_that_no_other_launcher_can_take(tmp_path: Path) -> None:
    place = RunFolder(tmp_path / "runs" / "demo")
    hold = folder.claim(place, fresh=False)
    assert place.logs.is_dir()
    for fresh in (True, False):
        with pytest.raises(UserError, match="a run of this name is going on; stop it first"):
            folder.claim(place, fresh=fresh)
    os.close(hold)


def test_a_stopped_run_is_taken_as_it_is(tmp_path: Path) -> None:
    place = RunFolder(tmp_path / "demo")
    os.close(folder.claim(place, fresh=False))
    (place.path / "mark").touch()
    assert place.kept_recipe() is None
    hold = folder.claim(place, fresh=False)
    assert (place.path / "mark").exists()
    with pytest.raises(UserError, match="a run of this name is going on"):
        folder.claim(place, fresh=False)
    os.close(hold)


def test_fresh_moves_earlier_runs_aside(tmp_path: Path) -> None:
    place = RunFolder(tmp_path / "demo")
    for number in range(3):
        os.close(folder.claim(place, fresh=True))
        (place.path / "mark").write_text(str(number))
    assert (tmp_path / "demo.1" / "mark").read_text() == "0"
    assert (tmp_path / "demo.2" / "mark").read_text() == "1"
    assert (tmp_path / "demo" / "mark").read_text() == "2"


def test_a_run_is_complete_once_its_summary_says_so(tmp_path: Path) -> None:
    place = RunFolder(tmp_path)
    assert not place.complete()
    place.summary.write_text('{"complete": fal')
    assert not place.complete()
    place.summary.write_text('{"complete": true}')
    assert place.complete()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("")
    with pytest.raises(UserError, match="demo: not a folder"):
        folder.claim(RunFolder(tmp_path / "demo"), fresh=True)
