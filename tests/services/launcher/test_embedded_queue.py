import asyncio
import os
from pathlib import Path

import pytest
import redis

from services.common.errors import UserError
from services.launcher import embedded_queue, plan, ports
from services.launcher.children import RestartPolicy, Supervisor
from services.launcher.folder import RunFolder
from tests.services.launcher.processes import PATIENCE_S


async def test_it_starts_keeps_everything_and_survives_being_killed(tmp_path: Path) -> None:
    place = RunFolder(tmp_path / "a run")
    (port,) = ports.choose(1, host="127.0.0.1")
    url = f"redis://127.0.0.1:{port}/0"
    async with Supervisor(RestartPolicy(base_s=0.05)) as supervisor:
        child = supervisor.start(plan.queue_spec(place, port=port, environ=os.environ))
        async with asyncio.timeout(PATIENCE_S):
            assert await embedded_queue.answers(url)
        with redis.Redis.from_url(url) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            client.set("kept", "1")
        assert child.process is not None
        child.process.kill()
        await child.process.wait()
        async with asyncio.timeout(PATIENCE_S):
            assert await embedded_queue.answers(url)
        with redis.Redis.from_url(url) as client:
            assert client.get("kept") == b"1"
        await supervisor.stop(plan.QUEUE, grace_s=PATIENCE_S)
    assert (place.queue / "appendonlydir").is_dir()
    assert "Ready to accept connections" in place.log("queue").read_text()


def test_only_the_keys_of_the_run_are_deleted(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        for key in ("hr:{demo}:clock", "hr:{demo}:requests", "hr:{demo2}:clock", "demo"):
            client.set(key, "1")
        assert embedded_queue.has_keys(valkey_url, run="demo")
        assert embedded_queue.delete_keys(valkey_url, run="demo") == 2
        assert not embedded_queue.has_keys(valkey_url, run="demo")
        assert sorted(client.keys()) == [b"demo", b"hr:{demo2}:clock"]


def test_a_server_that_answers_is_reachable(valkey_url: str) -> None:
    embedded_queue.check(valkey_url, run="demo")


def test_an_absent_server_is_named_without_its_password() -> None:
    (port,) = ports.choose(1, host="127.0.0.1")
    with pytest.raises(UserError) as caught:
        embedded_queue.check(f"redis://:secret@127.0.0.1:{port}/0", run="demo")
    message = str(caught.value)
    assert message.startswith(
        f"queue.url: no queue server answers at redis://:***@127.0.0.1:{port}/0"
    )
    assert "secret" not in message
    assert "\n" not in message


def test_a_url_that_is_none_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"queue\.url: 'localhost:6379' is not a Redis URL"):
        embedded_queue.check("localhost:6379", run="demo")
