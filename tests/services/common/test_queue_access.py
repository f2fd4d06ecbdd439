"""The queue as a user with the least rights, by a password from a file, and over TLS."""

import asyncio
import re
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from services.common import queue, secret_keys
from services.common.config import Queue
from services.common.errors import UserError
from services.launcher import embedded_queue
from tests.certificates import Authority
from tests.conftest import free_port, redis_7
from tests.services.common import test_dead_letters as dead_letters
from tests.services.common import test_streams as streams
from tests.services.common import test_together as together
from tests.waiting import until

DOCUMENT = Path(__file__).parents[3] / "docs" / "security.md"

SCRIPTS = Path(queue.__file__).parent / "scripts"

PASSWORD = "p@ss/w:rd"

AS_A_USER: list[Callable[[str], Awaitable[None]]] = [
    streams.test_a_group_goes_through_all_stages_and_leaves_nothing,
    streams.test_renewal_keeps_slow_work_and_a_stolen_claim_is_noticed,
    streams.test_tombstones_reach_the_trainer,
    streams.test_poison_goes_to_the_dead_letters_with_its_bytes,
    streams.test_dead_letters_are_bounded_by_count_and_bytes,
    streams.test_give_back_is_claimable_at_once_and_costs_no_delivery,
    streams.test_evaluation_comes_first_and_is_not_outstanding,
    streams.test_a_second_trainer_fences_the_first_and_inherits,
    streams.test_finish_empties_everything_and_workers_see_it,
    streams.test_gauge_sees_waiting_held_and_age,
    dead_letters.test_an_entry_goes_back_as_it_was,
    dead_letters.test_a_prompt_is_generated_anew,
    dead_letters.test_letters_are_discarded_and_their_bytes_no_longer_counted,
    together.test_results_and_tombstones_go_where_they_belong,
]
"""Tests of the delivery rules that are run as that user: all scripts, and all commands beside."""


def acl() -> list[str]:
    """The rules of the document's user, from `on` on."""
    [line] = re.findall(r"^ +ACL SETUSER headrace (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    return str(line).replace("PASSWORD", PASSWORD).split()


def denied(admin: Any) -> set[str]:
    """Commands that the user was refused, but for redis-py's introduction of itself."""
    entries = admin.execute_command("ACL LOG")
    names = {_field(entry, "object") for entry in entries}
    return {name for name in names if not name.startswith("client")}


def _field(entry: Any, name: str) -> str:
    fields = entry if isinstance(entry, dict) else dict(zip(entry[::2], entry[1::2], strict=True))
    value = fields.get(name, fields.get(name.encode()))
    return value.decode() if isinstance(value, bytes) else str(value)


@pytest.fixture
def user_url(queue_url: str) -> Iterator[str]:
    """The URL of an emptied server as its least user."""
    with redis.Redis.from_url(queue_url) as admin:
        admin.execute_command("ACL SETUSER", "headrace", "reset", *acl())
        admin.execute_command("ACL LOG", "RESET")
        try:
            yield queue_url
            assert denied(admin) == set()
        finally:
            admin.execute_command("ACL DELUSER", "headrace")


def with_user(url: str, folder: Path) -> str:
    file = folder / "password"
    file.write_text(PASSWORD + "\n")
    named = url.replace("://", "://headrace@")
    whole = secret_keys.queue_url(Queue(url=named, password_file=str(file)))
    assert whole is not None
    return whole


async def test_the_least_user_can_do_all_that_a_run_does(user_url: str, tmp_path: Path) -> None:
    url = with_user(user_url, tmp_path)
    with redis.Redis.from_url(user_url) as admin:
        for test in AS_A_USER:
            admin.flushall()
            admin.script_flush()
            await test(url)
        admin.set("others", 1)
    assert await asyncio.to_thread(embedded_queue.has_keys, url, run="r")
    await asyncio.to_thread(embedded_queue.delete_keys, url, run="r")
    assert not await asyncio.to_thread(embedded_queue.has_keys, url, run="r")


def test_the_least_user_can_do_no_more_than_that(queue_url: str) -> None:
    with redis.Redis.from_url(queue_url) as admin:
        admin.execute_command("ACL SETUSER", "headrace", "reset", *acl())
        admin.set("others", 1)
        try:
            user = queue_url.replace("://", "://headrace:p%40ss%2Fw%3Ard@")
            client: Any
            with redis.Redis.from_url(user) as client:
                for refused in (
                    lambda: client.get("others"),
                    lambda: client.set("hr:{r}:a", 1),
                    lambda: client.hset("others", "a", "1"),
                    lambda: client.eval("return redis.call('GET', KEYS[1])", 1, "others"),
                    lambda: client.flushall(),
                    lambda: client.keys("*"),
                    lambda: client.config_get("*"),
                    lambda: client.execute_command("ACL WHOAMI"),
                    lambda: client.script_flush(),
                    lambda: client.publish("channel", "text"),
                ):
                    with pytest.raises(
                        redis.exceptions.ResponseError, match=r"(?i)no.?perm|acl|access"
                    ):
                        refused()  # type: ignore[no-untyped-call]
        finally:
            admin.execute_command("ACL DELUSER", "headrace")


def test_no_command_is_granted_that_nobody_uses() -> None:
    used = set()
    for path in SCRIPTS.glob("*.lua"):
        for command, sub in re.findall(
            r"redis\.p?call\('(\w+)'(?:, '([A-Z]+)')?", path.read_text()
        ):
            own = command in ("XGROUP", "XINFO", "SCRIPT")
            used.add(f"{command}|{sub}".lower() if own else command.lower())
    # What clients send beside scripts; see the uses of `raw` and of redis-py's register_script.
    used |= {"ping", "info", "time", "exists", "scan", "unlink", "eval", "evalsha", "script|load"}
    used |= {"xreadgroup", "xrange", "xack", "xdel", "hgetall", "xclaim", "xpending"}
    granted = {rule[1:] for rule in acl() if rule.startswith("+")}
    assert granted == used


def test_the_clusters_own_queue_grants_the_same() -> None:
    text = (DOCUMENT.parents[1] / "deploy/k8s/components/auth/queue.yaml").read_text()
    granted = set(re.findall(r"\+[a-z]+(?:\|[a-z]+)?", text[text.index("name: COMMANDS") :]))
    assert granted == {rule for rule in acl() if rule.startswith("+")}


async def test_a_wrong_password_is_said_and_never_shown(user_url: str, tmp_path: Path) -> None:
    url = with_user(user_url, tmp_path).replace("p%40ss", "wr0ng")
    told: list[str] = []
    with pytest.raises(UserError, match=r"queue\.url: the queue server refuses the creden") as no:
        await queue.connect(url, run="r", claim_after_s=1, waiting=told.append)
    assert "wr0ng" not in f"{no.value} {told}"
    with redis.Redis.from_url(user_url) as admin:
        admin.execute_command("ACL LOG", "RESET")


# TLS


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The port of a Redis that speaks TLS and asks for certificates, and a client's folder."""
    binary = redis_7()
    if binary is None:
        pytest.skip("no redis-server 7 on the PATH (Debian: apt-get install redis-server)")
    authority = Authority()
    own, client = authority.write(tmp_path / "server"), authority.write(tmp_path / "client")
    port = free_port()
    settings = {
        "port": 0,
        "tls-port": port,
        "tls-cert-file": own / "tls.crt",
        "tls-key-file": own / "tls.key",
        "tls-ca-cert-file": own / "ca.crt",
        "requirepass": PASSWORD,
        "dir": tmp_path,
        "save": '""',
    }
    config = tmp_path / "redis.conf"
    config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([binary, str(config)], stdout=log, stderr=log)
    try:
        yield port, client
    finally:
        process.terminate()
        process.wait(10)


async def test_a_queue_over_mutual_tls(tls_server: tuple[int, Path], tmp_path: Path) -> None:
    port, client = tls_server
    await until(lambda: "Ready to accept" in (tmp_path / "log").read_text())
    file = tmp_path / "password"
    file.write_text(PASSWORD)

    def url(*options: str) -> str:
        bare = f"rediss://localhost:{port}/0?{'&'.join(options)}"
        whole = secret_keys.queue_url(Queue(url=bare, password_file=str(file)))
        assert whole is not None
        return whole

    trusting = f"ssl_ca_certs={client}/ca.crt"
    shown = (f"ssl_certfile={client}/tls.crt", f"ssl_keyfile={client}/tls.key")
    connected = await queue.connect(url(trusting, *shown), run="r", claim_after_s=1)
    await connected.close()
    for options in ((trusting,), shown):
        with pytest.raises(UserError, match="no queue server answers") as refused:
            await embedded_queue.reach(url(*options), run="r")
        assert "w%3Ard" not in str(refused.value)
