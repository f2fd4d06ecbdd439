"""`headrace export`: a run's policy as a Hugging Face folder."""

from pathlib import Path

from rich.console import Console

from services.common.errors import UserError
from services.launcher import tiny_model
from services.launcher.folder import RunFolder
from services.launcher.tables import say


def write(
    run: str,
    directory: Path,
    *,
    folder: Path,
    step: int | None,
    adapter_only: bool = False,
    console: Console,
) -> None:
    """Write the policy of a run (its folder, or its name in `folder`) into `directory`, or its
    adapter alone. Raises UserError."""
    place = find(run, folder=folder)
    recipe = place.kept_recipe()
    if recipe is None:
        raise UserError(f"{place.path}: it has no recipe.toml, so it is no run's folder")
    model = tiny_model.resolve(recipe.model.path)
    # Here, since it imports transformers, which takes seconds.
    from services.trainer.export import export

    made = export(
        place.path,
        directory,
        model=model,
        dtype=recipe.model.dtype,
        step=step,
        lora=recipe.trainer.lora,
        adapter_only=adapter_only,
    )
    say(console, f"wrote {made.folder}: step {made.step}, {recipe.model.dtype}, of {made.source}")


def find(run: str, *, folder: Path) -> RunFolder:
    """The run's folder by its path or name. Raises UserError when there is none."""
    for path in (Path(run), folder / run):
        if path.is_dir():
            return RunFolder(path)
    raise UserError(f"RUN: there is neither a folder {run} nor a run of that name in {folder}")
