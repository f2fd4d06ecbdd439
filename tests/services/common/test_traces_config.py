"""`[traces]` of the recipe: bounds that fit each other."""

from pathlib import Path

import pytest

from services.common.config import RecipeError, load


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(
        "[data]\nfile = 'x.jsonl'\n[trainer]\nmax_steps = 1\n"
        f"[[rewards.functions]]\nfunction = 'a:b'\n{text}\n"
    )
    return path


def test_the_smallest_message_takes_the_default(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, "[network]\nmax_message_bytes = 1048576"))
    assert recipe.traces.max_bytes == 524288


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "[network]\nmax_message_bytes = 1048576\n[traces]\nmax_bytes = 524289",
            "traces.max_bytes: 524289 is more than half of network.max_message_bytes",
        ),
        (
            "[traces]\nmax_bytes = 2097152\nkeep_bytes = 1048576",
            "traces.keep_bytes: 1048576 is below traces.max_bytes",
        ),
        ("[traces]\nmax_bytes = 8388609", "traces.max_bytes"),
        ("[traces]\nevery_versions = 0", "traces.every_versions"),
    ],
)
def test_what_cannot_be_is_a_mistake_of_the_recipe(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        load(write(tmp_path, text))


def test_none_are_traced_where_none_are_wanted(tmp_path: Path) -> None:
    """Then their size is nobody's concern."""
    text = "[network]\nmax_message_bytes = 1048576\n[traces]\nper_version = 0\nmax_bytes = 600000"
    assert load(write(tmp_path, text)).traces.per_version == 0
