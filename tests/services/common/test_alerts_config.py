"""The recipe's [alerts] and [mirrors]: what is refused, and what is never shown."""

from pathlib import Path

import pytest

from services.common import config
from services.common.alerts_config import hidden_url, is_web_url
from services.common.config import RecipeError, dump_toml

BASE = """
[data]
file = "prompts.jsonl"
[trainer]
max_steps = 10
"""

RULE = """
[[alerts.rules]]
name = "low-reward"
key = "reward"
compare = "below"
threshold = 0.1
for_steps = 5
"""

SECRET = "https://hooks.example/services/T0/B0/key"


def load(folder: Path, text: str) -> config.Recipe:
    path = folder / "recipe.toml"
    path.write_text(BASE + text)
    return config.load(path, environ={})


def test_rules_and_switches_are_read(tmp_path: Path) -> None:
    recipe = load(tmp_path, RULE)
    (rule,) = recipe.alerts.rules
    assert (rule.name, rule.threshold, rule.for_steps, rule.severity) == (
        *("low-reward", 0.1, 5, "warning"),
    )
    off = load(tmp_path, '[alerts]\noff = ["stall", "lost-metrics"]\n')
    assert off.alerts.off == ("stall", "lost-metrics")
    assert not off.mirrors.tensorboard


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RULE + "for_s = 60.0\n", "alerts.rules.0: give exactly one of for_steps and for_s"),
        (RULE.replace("for_steps = 5", ""), "alerts.rules.0: give exactly one of"),
        (RULE + RULE, "alerts.rules.1.name: 'low-reward' is there twice"),
        (RULE.replace("low-reward", "stall"), "'stall' is a built-in alert"),
        (RULE.replace("low-reward", "Low Reward"), "use lower-case letters"),
        ('[alerts]\noff = ["stal"]\n', "alerts.off: there is no built-in alert 'stal'"),
        ('[alerts]\nwebhook = "hooks.example/x"\n', "alerts.webhook: it is no http"),
        (
            f'[alerts]\nwebhook = "{SECRET}"\nwebhook_file = "hook"\n',
            "alerts.webhook_file: alerts.webhook is given, too",
        ),
    ],
)
def test_mistakes_are_told_where_they_are(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load(tmp_path, text)
    assert said in str(refused.value)


def test_a_webhook_is_not_shown_with_the_recipe_but_kept_in_it(tmp_path: Path) -> None:
    recipe = load(tmp_path, f'[alerts]\nwebhook = "{SECRET}"\n')
    shown = dump_toml(recipe, hide_passwords=True)
    assert "services/T0" not in shown
    assert "https://hooks.example/***" in shown
    path = tmp_path / "whole.toml"
    path.write_text(dump_toml(recipe))
    assert config.load(path, environ={}) == recipe


def test_what_is_left_of_a_hidden_url() -> None:
    whole = "https://me:pw@hooks.example:8443/services/key?token=abc#part"
    assert hidden_url(whole) == "https://hooks.example:8443/***"


def test_what_can_be_posted_to() -> None:
    assert is_web_url("http://127.0.0.1:8080/hook")
    assert is_web_url(SECRET)
    for bad in ("ftp://host/x", "https:///x", "http://host:99999/", "http://host/a b", "", "://"):
        assert not is_web_url(bad), bad
