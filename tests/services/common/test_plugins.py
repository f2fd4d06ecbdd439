import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common import config, plugins
from services.common.errors import UserError

KEY = "rewards.functions[0].function"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory that is not on the path yet; modules imported from it are
    forgotten.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_of_the_working_directory_is_found(folder: Path) -> None:
    (folder / "mine_a.py").write_text(
        "class C:\n    @staticmethod\n    def f():\n        return 3\n"
    )
    assert plugins.load("mine_a:C.f", KEY)() == 3


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nothing", "not of the form module:function"),
        (":f", "not of the form module:function"),
        ("mine_b", "not of the form module:function"),
        ("no_such_mod:f", "there is no module no_such_mod"),
        ("mine_b.inner:f", "there is no module mine_b.inner"),
        ("mine_b:reward_fn", "mine_b has no reward_fn; did you mean reward"),
        ("mine_b:value", "is of type int, not a function"),
        ("broken:f", "broken.py, line 2: ZeroDivisionError"),
        ("wrong_syntax:f", "wrong_syntax.py, line 1: SyntaxError"),
        ("needs_more:f", "needs_more.py, line 1: ModuleNotFoundError: No module named 'absent'"),
        ("leaves:f", "leaves.py, line 1: SystemExit"),
    ],
)
def test_each_mistake_is_one_line_with_the_key(folder: Path, reference: str, message: str) -> None:
    (folder / "mine_b.py").write_text("def reward(): ...\nvalue = 7\n")
    (folder / "broken.py").write_text("x = 1\n1 / 0\n")
    (folder / "wrong_syntax.py").write_text("def (:\n")
    (folder / "needs_more.py").write_text("import absent\n")
    (folder / "leaves.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UserError) as caught:
        plugins.load(reference, KEY)
    text = str(caught.value)
    assert text.startswith(KEY)
    assert message in text
    assert "\n" not in text


def test_built_in_rewards_load_without_what_they_need() -> None:
    functions = [config.RewardFunction(function=name) for name in plugins.BUILTIN_REWARDS]
    loaded = plugins.load_rewards(config.Rewards(functions=tuple(functions)))
    names = [function.__name__ for function in loaded]
    assert names == ["reasoning_gym", "exact_match", "environment"]


def test_a_built_in_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    builtin = plugins.Builtin("services.scorer.builtin_rewards:exact_match", "no_such_package_xyz")
    monkeypatch.setitem(plugins.BUILTIN_REWARDS, "exact_match", builtin)
    entry = config.RewardFunction(function="exact_match")
    with pytest.raises(UserError, match="needs the package no_such_package_xyz"):
        plugins.load_rewards(config.Rewards(functions=(entry,)))
