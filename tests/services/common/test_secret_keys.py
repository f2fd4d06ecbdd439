"""Files with passwords, and the URLs that they belong to."""

from pathlib import Path

import pytest

from services.common import config, secret_keys
from services.common.config import RecipeError
from services.common.errors import UserError
from services.common.queue_url import read_url

RECIPE = """
run = "demo"
data.reasoning_gym = { task = "chain_sum" }
rewards.functions = [{ function = "exact_match" }]
trainer.max_steps = 1
"""


def recipe(folder: Path, *overrides: str) -> config.Recipe:
    path = folder / "recipe.toml"
    path.write_text(RECIPE)
    return config.load(path, overrides=overrides, environ={})


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["network.tls_cert_file=a"], "give network.tls_key_file, network.tls_ca_file, too"),
        (
            ["network.tls_key_file=a", "network.tls_ca_file=b"],
            "network.tls_key_file: TLS needs certificate, key and authorities: give "
            "network.tls_cert_file, too",
        ),
        (["queue.password_file=f"], "queue.password_file: it is the password of queue.url's user"),
        (
            ["queue.password_file=f", "queue.url=redis://u:pw@h"],
            "queue.password_file: queue.url has a password already",
        ),
        (
            ["queue.password_file=f", "queue.url=redis://h?password=pw"],
            "queue.password_file: queue.url has a password already",
        ),
        (
            ["aggregator.database_password_file=f"],
            "aggregator.database_password_file: it is the password of aggregator.database's user",
        ),
        (
            [
                "aggregator.database_password_file=f",
                "aggregator.database=postgresql+psycopg://u:pw@h/d",
            ],
            "aggregator.database_password_file: aggregator.database has a password already",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, overrides: list[str], says: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        recipe(tmp_path, *overrides)
    assert says in str(refused.value)
    assert "pw" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("redis://me@h:1/2", "redis://me:p%40%2Fs%3A%20s@h:1/2"),
        ("redis://me:@h:1/2", "redis://me:p%40%2Fs%3A%20s@h:1/2"),
        ("rediss://h?ssl_ca_certs=/a/b", "rediss://:p%40%2Fs%3A%20s@h?ssl_ca_certs=/a/b"),
        ("unix:///run/s?db=1", "unix://:p%40%2Fs%3A%20s@/run/s?db=1"),
        (
            "redis+sentinel://me@h1:1,h2/name/3?sentinel_password=x",
            "redis+sentinel://me:p%40%2Fs%3A%20s@h1:1,h2/name/3?sentinel_password=x",
        ),
        ("rediss+cluster://[::1]:7,h", "rediss+cluster://:p%40%2Fs%3A%20s@[::1]:7,h"),
    ],
)
def test_all_forms_of_a_queues_url_take_a_password(tmp_path: Path, url: str, whole: str) -> None:
    file = tmp_path / "password"
    file.write_text(" p@/s: s\n")
    given = recipe(tmp_path, f"queue.url={url}", f"queue.password_file={file}").queue
    assert secret_keys.queue_url(given) == whole
    assert read_url(whole).options["password"] == "p@/s: s"
    assert config.without_passwords(whole).count("***") == whole.count("sentinel_password") + 1
    assert "p%40" not in config.without_passwords(whole)


def test_without_a_file_a_url_is_what_it_was(tmp_path: Path) -> None:
    assert secret_keys.queue_url(recipe(tmp_path).queue) is None
    given = recipe(tmp_path, "queue.url=redis://u:pw@h").queue
    assert secret_keys.queue_url(given) == "redis://u:pw@h"


def test_a_url_with_a_password_may_come_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE + 'queue.url = "redis://h"\n')
    loaded = config.load(path, environ={"HEADRACE_QUEUE__URL": "redis://me:pw@h:6379/0"})
    assert secret_keys.queue_url(loaded.queue) == "redis://me:pw@h:6379/0"
    assert "pw" not in config.dump_toml(loaded, hide_passwords=True)


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), (b"\n", "is empty"), (b"s3\xff", "no UTF-8")]
)
def test_an_unusable_file_names_its_key(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    given = recipe(tmp_path, "queue.url=redis://h", f"queue.password_file={file}").queue
    with pytest.raises(UserError, match=rf"queue\.password_file: .*{says}") as refused:
        secret_keys.queue_url(given)
    assert "s3" not in str(refused.value)
