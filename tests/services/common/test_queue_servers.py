"""Queue servers of several processes, real ones: their failures seen from the parties of a run, and
the rules of delivery on a cluster.
"""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common import queue
from services.common.errors import UserError
from services.common.partials import Count
from services.common.queue import QueueClient
from services.common.queue_servers import MAX_CONNECTIONS
from services.launcher import embedded_queue
from services.trainer.run_queue import RunQueue
from tests.conftest import free_port, redis_7
from tests.services.common import test_streams
from tests.services.common.queue_nodes import PASSWORD, Cluster, Node, Watched
from tests.services.common.test_streams import SETTINGS, connected, recorder, stage, started, take
from tests.services.trainer import test_run_queue
from tests.services.trainer.folders import make_folder
from tests.services.trainer.river import flowing, recipe_of
from tests.services.trainer.test_training import check_balance
from tests.waiting import until


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("cluster"))
    yield found
    found.close()


@pytest.fixture
def cluster(nodes: Cluster) -> Cluster:
    """Emptied."""
    nodes.emptied()
    return nodes


@pytest.fixture
def queue_url(cluster: Cluster) -> str:
    """For the streams' own tests, below."""
    return cluster.url


@pytest.fixture
def valkey_url(cluster: Cluster) -> str:
    """For the trainer's own tests, below."""
    return cluster.url


OF_ONE_SERVER = {
    "test_groups_come_back_after_the_server_lost_everything",
    "test_an_evicting_server_is_refused",
}
"""They talk to the server beside the client."""

for _module in (test_streams, test_run_queue):
    for _name, _test in list(vars(_module).items()):
        if _name.startswith("test_") and _name not in OF_ONE_SERVER:
            globals()[_name.replace("test_", "test_cluster_", 1)] = _test


def unavailable_s(client: QueueClient) -> float:
    """What has been recorded of it."""
    assert client.recorder is not None
    found = client.recorder.snapshot().items()
    return sum(
        partial.sum
        for (key, *_), partial in found
        if key == "queue/unavailable_s" and isinstance(partial, Count)
    )


async def run_through(client: QueueClient, run: RunQueue, group: str, *, step: int) -> None:
    """One group from dispatch to settlement."""
    generator, scorer = stage(client), stage(client, "groups", "s")
    await run.dispatch(group, b"request")
    [entry] = await take(generator, 1)
    assert await generator.hand_off(entry, data=b"group", n=1) == "done"
    [entry] = await take(scorer, 1)
    assert await scorer.hand_off(entry, data=b"samples", n=1) == "done"
    [delivery] = await run.take(1)
    assert delivery.group_id == group
    await run.settle([(delivery.entry_id, group)], step=step)


async def test_the_parties_go_on_when_the_primary_is_killed(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    details: dict[str, str] = {}
    phases: list[str] = []
    client = await queue.connect(
        watched.url,
        run="r",
        claim_after_s=SETTINGS.claim_after_s,
        waiting=phases.append,
        details=details,
    )
    client.recorder = recorder()
    try:
        run = await started(client, "a", "b")
        generator, scorer = stage(client), stage(client, "groups", "s")
        async with generator, scorer:
            [a, b] = await take(generator, 2)
            assert await generator.hand_off(a, data=b"group", n=1) == "done"
            watched.in_step()
            watched.primary.kill()
            handing = asyncio.create_task(generator.hand_off(b, data=b"group", n=1))
            await until(lambda: "queue" in details and unavailable_s(client) > 0)
            assert await handing == "done"
            entries = await take(scorer, 2)
            assert {entry.group_id for entry in entries} == {"a", "b"}
            for entry in entries:
                assert await scorer.hand_off(entry, data=b"samples", n=1) == "done"
        deliveries = await run.take(2)
        await run.settle([(each.entry_id, each.group_id) for each in deliveries], step=1)
        await run_through(client, run, "c", step=2)
        assert await run.outstanding() == {}
        assert client.raw.connection_pool.connection_kwargs["finder"]._address == (
            "127.0.0.1",
            watched.replica.port,
        )
        await until(lambda: "queue" not in details)
        assert client.reconnects > 0
        assert run.forgotten == 0
    finally:
        await client.close()
    said = capsys.readouterr().out + "".join(phases)
    assert "queue server unavailable" in said
    assert "queue server back" in said
    assert PASSWORD not in said
    assert "se%2Fcret" not in said


async def test_a_run_ends_well_though_its_new_primary_is_behind(
    watched: Watched, tmp_path: Path
) -> None:
    """A whole trainer. The replica misses what happened between two moments: groups that were
    settled are there again, groups that were dispatched are not."""
    generated: list[str] = []

    def decide(group_id: str, tries: int) -> str:
        generated.append(group_id)
        if len(generated) == 4:
            watched.in_step()
            watched.cut()
        if len(generated) == 9:
            watched.primary.kill()
        return ""

    model = make_folder(tmp_path / "model")
    recipe = recipe_of(tmp_path, model, watched.url, trainer={"max_steps": 7})
    async with flowing(recipe, decide=decide) as river:
        report = check_balance(await river.run(), trained=14)
        assert report["groups"]["dropped"].get("lost", 0) > 0
        keys = river.client.keys
        assert river.trainers.reconnects > 0
    with watched.replica.admin() as client:
        assert [client.xlen(key) for key in keys.streams] == [0] * 6
        assert client.hlen(keys.outstanding) == 0
        assert client.hget(keys.clock, "state") == b"done"


async def test_a_demoted_primary_is_left_at_once(watched: Watched) -> None:
    """Nothing is killed: an operator asks for the failover. The old primary keeps its connections,
    and is a replica."""
    async with connected(watched.url) as client:
        run = await started(client)
        await run_through(client, run, "a", step=1)
        watched.in_step()
        with watched.sentinel.admin() as sentinel:
            sentinel.sentinel_failover("water")
        with watched.replica.admin() as replica:
            await until(lambda: replica.role()[0] == b"master")
        with watched.primary.admin() as primary:
            primary.replicaof("127.0.0.1", watched.replica.port)
        await run_through(client, run, "b", step=2)
        with watched.replica.admin() as replica:
            assert int(replica.hget(client.keys.clock, "step")) == 2


async def test_a_call_beyond_the_pool_waits_for_its_turn(watched: Watched) -> None:
    async with connected(watched.url) as client:
        hundred = [client.call(client.raw.ping) for _ in range(4 * MAX_CONNECTIONS)]
        assert await asyncio.gather(*hundred) == [True] * 4 * MAX_CONNECTIONS
        assert client.reconnects == 0
        with watched.primary.admin() as primary:
            assert primary.info("clients")["connected_clients"] <= MAX_CONNECTIONS + 10


async def test_a_node_of_the_cluster_restarts(cluster: Cluster) -> None:
    async with connected(cluster.url) as client:
        run = await started(client)
        await run_through(client, run, "a", step=1)
        cluster.home.kill()
        through = asyncio.create_task(run_through(client, run, "b", step=2))
        await until(lambda: client.outages.lasts)
        await asyncio.to_thread(cluster.home.start)
        await through
        assert run.forgotten == 0
        assert client.reconnects > 0


def test_the_launcher_finds_and_deletes_the_keys_of_a_run(cluster: Cluster) -> None:
    embedded_queue.check(cluster.url, run="r")
    with cluster.home.admin() as admin:
        for name in ("clock", "samples"):
            admin.set(f"hr:{{r}}:{name}", "x")
        assert embedded_queue.has_keys(cluster.url, run="r")
        assert not embedded_queue.has_keys(cluster.url, run="other")
        assert embedded_queue.delete_keys(cluster.url, run="r") == 2
        assert admin.dbsize() == 0


async def test_a_slot_moves_while_the_run_goes_on(cluster: Cluster) -> None:
    """Half of its keys are there, half are here: nobody does anything. Then all are there."""
    to = cluster.other
    async with connected(cluster.url) as client:
        run = await started(client)
        await run_through(client, run, "a", step=1)
        keys = cluster.begin_moving(to=to)
        assert len(keys) >= 7
        cluster.move(keys[:3], to=to)
        through = asyncio.create_task(run_through(client, run, "b", step=2))
        await until(lambda: client.outages.lasts)
        cluster.move(keys[3:], to=to)
        cluster.end_moving(to=to)
        await through
        assert await run.outstanding() == {}
        with to.admin() as admin:
            assert admin.hget(client.keys.clock, "step") == b"2"


async def test_one_node_of_a_cluster_will_do_if_it_is_the_right_one(cluster: Cluster) -> None:
    async with connected(f"redis://127.0.0.1:{cluster.home.port}") as client:
        assert await client.raw.exists(client.keys.requests)
    with pytest.raises(UserError, match=r"write redis\+cluster://"):
        await queue.connect(f"redis://127.0.0.1:{cluster.other.port}", run="r", claim_after_s=1)


async def test_what_is_no_sentinel_or_no_cluster_is_named(watched: Watched) -> None:
    primary, sentinel = watched.primary.port, watched.sentinel.port
    secret = "se%2Fcret%401"
    for url, why in (
        (f"redis+sentinel://127.0.0.1:{primary}/water?sentinel_password={secret}", "no Sentinel"),
        (f"redis+cluster://:{secret}@127.0.0.1:{primary}", "no node of a cluster"),
        (f"redis://:{secret}@127.0.0.1:{sentinel}", "a Sentinel answers there"),
        (f"redis+sentinel://:{secret}@127.0.0.1:{sentinel}/water", "refuses the credentials"),
    ):
        with pytest.raises(UserError, match=why) as caught:
            await queue.connect(url, run="r", claim_after_s=1)
        assert PASSWORD not in str(caught.value)
        assert secret not in str(caught.value)


async def test_a_primary_that_nobody_knows_is_waited_for(watched: Watched) -> None:
    details: dict[str, str] = {}
    url = watched.url.replace("/water/", "/wine/")
    connecting = asyncio.create_task(queue.connect(url, run="r", claim_after_s=1, details=details))
    await until(lambda: "no primary of the name wine" in details.get("queue", ""))
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting


async def test_with_tls(tmp_path: Path) -> None:
    """A cluster of one node that does not know its own address, and the node alone."""
    binary, openssl = redis_7(), shutil.which("openssl")
    if binary is None or openssl is None:
        pytest.skip("no redis-server 7 or no openssl on the PATH")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    name = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(key), "-out", str(certificate))
    form = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    make = [openssl, "req", *form, *name, *files]
    await asyncio.to_thread(subprocess.run, make, check=True, capture_output=True)
    port = free_port()
    node = Node(
        tmp_path / "n",
        *("--tls-port", str(port), "--tls-auth-clients", "no", "--tls-cluster", "yes"),
        *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
        *("--tls-ca-cert-file", str(certificate), "--cluster-enabled", "yes"),
        *("--cluster-port", str(free_port())),
        binary=binary,
    )
    try:
        with node.admin() as admin:
            admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            await until(lambda: admin.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        for scheme, group in (("rediss", "a"), ("rediss+cluster", "b")):
            url = f"{scheme}://127.0.0.1:{port}?ssl_ca_certs={certificate}"
            async with connected(url) as client:
                await run_through(client, await started(client), group, step=1)
        details: dict[str, str] = {}
        url = f"rediss+cluster://127.0.0.1:{port}"
        connecting = asyncio.create_task(
            queue.connect(url, run="r", claim_after_s=1, details=details)
        )
        await until(lambda: "certificate" in details.get("queue", "").lower())
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
    finally:
        node.kill()


async def test_a_socket_of_this_machine(tmp_path: Path) -> None:
    node = Node(tmp_path / "n", "--unixsocket", str(tmp_path / "socket"))
    try:
        async with connected(f"unix://{tmp_path}/socket") as client:
            await run_through(client, await started(client), "a", step=1)
    finally:
        node.kill()
