"""Metrics that a recipe declares: what is taken, and what is refused in which words."""

from pathlib import Path

import pytest

from services.common.config import Recipe, RecipeError, dump_toml, load
from services.common.custom_metrics import CustomMetric

BASE = """
[data.reasoning_gym]
task = "chain_sum"
[trainer]
max_steps = 80
"""

DECLARED = """
[metrics."custom/answer_chars"]
instrument = "observation"
unit = "characters"
reduce = "p95"
meaning = "Length of an answer."

[metrics."custom/tests/run"]
instrument = "count"
meaning = "Tests that were run."
"""

HOW = (
    "a key of your own begins with custom/, and goes on with letters, digits and . _ : + - between "
    "slashes"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recipe.toml"


def read(path: Path, text: str, *overrides: str) -> Recipe:
    path.write_text(BASE + text)
    return load(path, overrides=overrides, environ={})


def refused(path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read(path, text, *overrides)
    return str(caught.value).replace(str(path), "recipe.toml")


def test_a_recipe_declares_metrics_by_their_keys(path: Path) -> None:
    recipe = read(path, DECLARED)
    assert recipe.metrics == {
        "custom/answer_chars": CustomMetric(
            instrument="observation",
            unit="characters",
            reduce="p95",
            meaning="Length of an answer.",
        ),
        "custom/tests/run": CustomMetric(instrument="count", meaning="Tests that were run."),
    }
    defaults = [each.default for each in recipe.metrics.values()]
    assert defaults == ["p95", "sum"]
    assert recipe.metrics["custom/tests/run"].unit == "1"
    assert read(path, "").metrics == {}


def test_a_dumped_recipe_declares_the_same(path: Path) -> None:
    recipe = read(path, DECLARED)
    path.write_text(dump_toml(recipe))
    assert load(path, environ={}) == recipe


def test_measuring_is_no_part_of_the_experiment(path: Path) -> None:
    assert read(path, DECLARED).identity() == read(path, "").identity()


@pytest.mark.parametrize(
    ("key", "body", "says"),
    [
        (
            "reward",
            'instrument = "count"\nmeaning = "M."',
            f'recipe.toml: metrics."reward": {HOW}',
        ),
        (
            "custom/{tool}",
            'instrument = "count"\nmeaning = "M."',
            'recipe.toml: metrics."custom/{tool}": ' + HOW,
        ),
        (
            "custom/other",
            'instrument = "count"\nmeaning = "M."',
            'recipe.toml: metrics."custom/other": this one is kept for what comes after too many '
            "custom keys",
        ),
        (
            "custom/x",
            'instrument = "count"\nmeaning = "M."\nreduce = "p95"',
            "recipe.toml: metrics.custom/x.reduce = 'p95': not for count; choose one of sum, rate",
        ),
        (
            "custom/x",
            'instrument = "gauge"\nmeaning = "M."\nreduce = "p95"',
            "recipe.toml: metrics.custom/x.instrument = 'gauge': input should be 'count', "
            "'observation' or 'ratio'",
        ),
        (
            "custom/x",
            'instrument = "count"',
            "recipe.toml: metrics.custom/x.meaning is missing",
        ),
        (
            "custom/x",
            'instrument = "count"\nmeaning = "M."\nunits = "s"',
            "recipe.toml: unknown key metrics.custom/x.units; did you mean metrics.custom/x.unit?",
        ),
    ],
)
def test_a_mistake_is_one_line_with_file_and_key(
    path: Path, key: str, body: str, says: str
) -> None:
    assert refused(path, f'[metrics."{key}"]\n{body}\n') == says


def test_a_table_without_a_key_of_its_own_is_refused(path: Path) -> None:
    says = refused(path, '[metrics]\ninstrument = "count"\n')
    assert says == "recipe.toml: metrics.instrument = 'count': must be a table of keys"


def test_an_override_reaches_a_declaration(path: Path) -> None:
    recipe = read(path, DECLARED, "metrics.custom/answer_chars.unit=1")
    assert recipe.metrics["custom/answer_chars"].unit == "1"
    says = refused(path, DECLARED, "metrics.custom/answer_chars.reduce=sum")
    assert says == (
        "--set metrics.custom/answer_chars.reduce: metrics.custom/answer_chars.reduce = 'sum': not "
        "for observation; choose one of mean, min, max, p50, p95, p99, last, sum_last"
    )
