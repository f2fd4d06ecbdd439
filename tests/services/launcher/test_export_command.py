from pathlib import Path

import pytest

from services.common.errors import UserError
from services.launcher import export_command
from services.launcher.tables import console
from tests.services.trainer.folders import make_folder
from tests.services.trainer.test_export import run_of


def test_a_run_is_found_by_its_folder_and_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    model = make_folder(tmp_path / "model")
    run_of(runs / "demo", model, "float32")
    (runs / "demo" / "recipe.toml").write_text(
        f'run = "demo"\n[model]\npath = "{model}"\n[data]\nfile = "prompts.jsonl"\nepochs = 1.0\n'
    )
    for number, run in enumerate(("demo", str(runs / "demo"))):
        out = tmp_path / f"out-{number}"
        export_command.write(run, out, folder=runs, step=None, console=console())
        assert (out / "model.safetensors").is_file()
        assert f"wrote {out}: step 2, float32, of " in capsys.readouterr().out


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    def write(run: str) -> None:
        export_command.write(run, tmp_path / "out", folder=tmp_path, step=None, console=console())

    with pytest.raises(UserError, match="neither a folder demo nor a run of that name"):
        write("demo")
    (tmp_path / "demo").mkdir()
    with pytest.raises(UserError, match=r"no recipe\.toml"):
        write("demo")
