"""A whole run with all that keeps others out: mutual TLS, a token, a least user of the queue over
TLS, a password of the database. It trains, refuses strangers everywhere, and shows no secret.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psycopg
import pytest
import redis
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from headrace.v1 import status_pb2, status_pb2_grpc

from services.common import config, grpc_kit
from services.common.certificates import certificates_of, client_context
from services.common.config import Network, Recipe
from tests.certificates import Authority, keys_of, network_of
from tests.chaos.keeper import ROOT, Guard, Keeper
from tests.chaos.pipeline import MODULES, environment
from tests.chaos.proxy import Proxy
from tests.chaos.world import Plan, Ports, make_model, make_world
from tests.conftest import free_port, redis_7
from tests.probes import read_ports
from tests.services.aggregator import postgres
from tests.services.common.test_queue_access import acl, denied

DEADLINE_S = 30.0

PATIENCE_S = 400.0
"""For a start, or an outage that is noticed: far more than they take on a busy machine."""

TOKEN, QUEUE, DATABASE = "t0ken-Zq8vK2", "queue-Wm4xR7", "database-Hd9bT3"
WRONG = {"token": "t0ken-Wrong5", "queue": "queue-Wrong6", "database": "database-Wrong7"}

SECRETS = (TOKEN, QUEUE, DATABASE, *WRONG.values())

EXEMPT = ("/healthz", "/readyz", "/docs", "/docs/metrics", "/openapi.json")

PLAN = Plan(
    run="secured",
    num_rows=4,
    epochs=1,
    num_generators=1,
    num_scorers=1,
    num_failing=0,
    num_without_signal=0,
    seconds_a_completion=0.2,
    claim_after_s=5,
)


@dataclass
class Run:
    """One secured run, and all that was seen of it."""

    folder: Path
    recipe: Recipe
    keepers: dict[str, Keeper]
    proxy: Proxy
    admin: redis.Redis
    database: str
    seen: dict[str, bytes] = field(default_factory=dict)
    """What anybody could read, by where it was."""

    @property
    def ports(self) -> dict[str, dict[str, int]]:
        return {name: read_ports(self.folder / f"{name}.json") for name in self.keepers}

    @property
    def rest(self) -> str:
        return f"https://127.0.0.1:{self.ports['aggregator-0']['http_port']}"

    def client(self, token: str | None = TOKEN) -> httpx.AsyncClient:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        context = client_context(self.recipe.network)
        assert context is not None
        return httpx.AsyncClient(
            base_url=self.rest, headers=headers, verify=context, timeout=DEADLINE_S, trust_env=False
        )

    def saw(self, where: str, what: bytes | str) -> None:
        self.seen[where] = what.encode() if isinstance(what, str) else what


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, str]]:
    """A folder of certificates and secrets, a queue server's port and a database's URL."""
    binary, programs = redis_7(), postgres.binaries()
    if binary is None or programs is None:
        pytest.skip("no redis-server 7 or PostgreSQL (Debian: redis-server, postgresql)")
    folder = tmp_path_factory.mktemp("secured")
    Authority().write(folder / "tls")
    for name, secret in (("token", TOKEN), ("queue", QUEUE), ("database", DATABASE)):
        (folder / name).write_text(f"{secret}\n")
        (folder / f"wrong-{name}").write_text(f"{WRONG[name]}\n")
    port, tls = free_port(), folder / "tls"
    rules = " ".join(acl()[1:]).replace(acl()[1], f">{QUEUE}")
    (folder / "redis.conf").write_text(
        f"port 0\ntls-port {port}\ntls-cert-file {tls}/tls.crt\ntls-key-file {tls}/tls.key\n"
        f"tls-ca-cert-file {tls}/ca.crt\ndir {folder}\nsave ''\n"
        f"user headrace on {rules}\nuser default off\nuser admin on >admin ~* &* +@all\n"
    )
    with (
        (folder / "redis.log").open("wb") as log,
        postgres.server(programs, password=DATABASE) as url,
    ):
        process = subprocess.Popen([binary, str(folder / "redis.conf")], stdout=log, stderr=log)
        try:
            with psycopg.connect(_plain(url) + "/postgres", autocommit=True) as connection:
                connection.execute("CREATE DATABASE secured")
            yield folder, port, f"{url}/secured"
        finally:
            process.terminate()
            process.wait(10)


def _plain(url: str) -> str:
    """For the tests themselves."""
    return url.replace("+psycopg", "").replace("tests@", f"tests:{DATABASE}@")


@contextlib.asynccontextmanager
async def running(servers: tuple[Path, int, str], folder: Path) -> AsyncIterator[Run]:
    secrets, queue_port, database = servers
    tls = secrets / "tls"
    ports = Ports(trainer=free_port(), aggregator=free_port(), http=free_port(), queue=free_port())
    make_world(PLAN, folder, model=make_model(folder / "model"), ports=ports)
    shown = f"ssl_ca_certs={tls}/ca.crt&ssl_certfile={tls}/tls.crt&ssl_keyfile={tls}/tls.key"
    settings = {
        "queue.url": f"rediss://headrace@127.0.0.1:{ports.queue}/0?{shown}",
        "queue.password_file": secrets / "queue",
        "aggregator.database": database,
        "aggregator.database_password_file": secrets / "database",
        "network.token_file": secrets / "token",
        "trainer.exit_when_done": "false",
    }
    settings |= {f"network.{key}": Path(value) for key, value in keys_of(tls).items()}
    path = folder / "recipe.toml"
    recipe = config.load(path, overrides=[f"{k}={v}" for k, v in settings.items()], environ={})
    path.write_text(config.dump_toml(recipe))
    guard, keepers = Guard(), {}
    for service, port in (
        ("aggregator", ports.aggregator),
        ("trainer", ports.trainer),
        ("scorer", 0),
        ("generator", 0),
    ):
        name = f"{service}-0"
        argv = [sys.executable, "-m", MODULES[service], str(path)]
        argv += ["--set", f"network.grpc_port={port}", "--replica", "0"]
        keepers[name] = Keeper(
            name,
            [*argv, "--announce", str(folder / f"{name}.json")],
            log=folder / f"{name}.log",
            environ=environment(),
            guard=guard,
        )
    admin = redis.Redis.from_url(f"rediss://admin:admin@127.0.0.1:{queue_port}/0?{shown}")
    try:
        async with Proxy(ports.queue, target=queue_port) as proxy:
            for keeper in keepers.values():
                keeper.start()
            yield Run(folder, recipe, keepers, proxy, admin, database)
            await asyncio.gather(*(keeper.stop() for keeper in keepers.values()))
    finally:
        await asyncio.gather(*(keeper.kill() for keeper in keepers.values()))
        admin.close()
        guard.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_secured_run_trains_refuses_strangers_and_shows_no_secret(
    servers: tuple[Path, int, str], tmp_path: Path
) -> None:
    async with running(servers, tmp_path) as run:
        await _phase(run, "trainer-0", "complete")
        await _ledger_is_complete(run)
        for name in run.keepers:
            await _refuses_strangers(run, name)
        await _refuses_strangers_by_rest(run)
        _look_at_arguments(run)
        # Beside the proxy, which lives in this loop.
        await asyncio.to_thread(_fail, run, servers[0])
        await _queue_is_away(run)
        await _look_around(run)
        refused = denied(run.admin)
    assert refused == {"auth", "AUTH"} & refused, "commands that the least user lacks"
    _look_at_files(run)
    shown = {
        (where, secret)
        for where, what in run.seen.items()
        for secret in SECRETS
        if secret.encode() in what
    }
    assert shown == set()
    # The search had something to search, and found what stands in a password's place.
    assert sum(where.endswith(".log") for where in run.seen) == 4
    assert any(b":***@" in what for what in run.seen.values())
    assert all(keeper.crashes == [] for keeper in run.keepers.values())


async def _status(run: Run, name: str) -> Any:
    channel = grpc_kit.channel(f"127.0.0.1:{run.ports[name]['grpc_port']}", run.recipe.network)
    async with channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        return await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=DEADLINE_S)


async def _phase(run: Run, name: str, phase: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if all((run.folder / f"{each}.json").exists() for each in run.keepers):
                status = await _status(run, name)
                if status.phase == phase:
                    return
            assert all(not keeper.ends for keeper in run.keepers.values()), _logs(run)
            await asyncio.sleep(0.2)


async def _ledger_is_complete(run: Run) -> None:
    async with asyncio.timeout(PATIENCE_S), run.client() as client:
        while True:
            ledger = (await client.get(f"/api/v1/runs/{PLAN.run}/ledger")).json()
            if ledger["balanced"] and ledger["trained"] == PLAN.num_prompts:
                return
            await asyncio.sleep(0.2)


def _logs(run: Run) -> str:
    return "\n".join(path.read_text()[-2000:] for path in run.folder.glob("*.log"))


# Strangers


async def _methods(channel: grpc.aio.Channel) -> dict[str, tuple[bool, bool]]:
    """All methods of a server by reflection: (client streams, server streams)."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask(**request: str) -> Any:
        asked = iter([reflection_pb2.ServerReflectionRequest(**request)])
        # Channels add the token to calls with one request alone.
        token = (("authorization", f"Bearer {TOKEN}"),)
        answers = stub.ServerReflectionInfo(asked, timeout=DEADLINE_S, metadata=token)
        [answer] = [answer async for answer in answers]
        return answer

    found = {}
    for service in (await ask(list_services="")).list_services_response.service:
        answer = await ask(file_containing_symbol=service.name)
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(raw)
            for each in file.service:
                for method in each.method:
                    path = f"/{file.package}.{each.name}/{method.name}"
                    found[path] = (method.client_streaming, method.server_streaming)
    return found


async def _end(
    channel: grpc.aio.Channel, path: str, kind: tuple[bool, bool]
) -> tuple[grpc.StatusCode, str]:
    """How a call of a method ends, and why: with an empty message, or of a stream of them with
    none, since a client of gRPC that writes when it has been refused calls that INTERNAL."""
    many, answers = kind
    word = {True: "stream", False: "unary"}
    call = getattr(channel, f"{word[many]}_{word[answers]}")(path)
    request: Any = _silence() if many else b""
    try:
        if answers:
            async for _ in call(request, timeout=DEADLINE_S):
                pass
        else:
            await call(request, timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    return grpc.StatusCode.OK, ""


async def _silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def _refuses_strangers(run: Run, name: str) -> None:
    network = run.recipe.network
    port = run.ports[name]["grpc_port"]
    address, tls = f"127.0.0.1:{port}", Path(str(network.tls_cert_file)).parent
    async with grpc_kit.channel(address, network) as channel:
        methods = await _methods(channel)
    assert {path.split("/")[1] for path in methods} >= {
        "headrace.v1.StatusService",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert len(methods) >= 2 + (name != "aggregator-0")
    wrong = run.folder / "wrong"
    wrong.write_text(WRONG["token"])
    certificates = certificates_of(network)
    assert certificates is not None
    token = Path(str(network.token_file))
    without_token = grpc_kit.channel(address, network_of(tls))
    wrong_token = grpc_kit.channel(address, network_of(tls, token_file=wrong))
    without_certificate = grpc.aio.secure_channel(
        address,
        grpc.composite_channel_credentials(
            grpc.ssl_channel_credentials(certificates.current().ca),
            grpc.access_token_call_credentials(TOKEN),
        ),
    )
    without_tls = grpc_kit.channel(address, Network(token_file=str(token)))
    for channel, code in (
        (without_token, grpc.StatusCode.UNAUTHENTICATED),
        (wrong_token, grpc.StatusCode.UNAUTHENTICATED),
        (without_certificate, grpc.StatusCode.UNAVAILABLE),
        (without_tls, grpc.StatusCode.UNAVAILABLE),
    ):
        async with channel:
            for path, kind in methods.items():
                ended, why = await _end(channel, path, kind)
                assert ended is code, (name, path, why, _logs(run))


async def _refuses_strangers_by_rest(run: Run) -> None:
    async with run.client(None) as nobody, run.client(WRONG["token"]) as guesser:
        document = (await nobody.get("/openapi.json")).json()
        routes = [(path, method) for path, ways in document["paths"].items() for method in ways]
        assert len(routes) > 15
        for path, method in routes:
            given = path
            for each in document["paths"][path][method].get("parameters", []):
                given = given.replace(f"{{{each['name']}}}", "1")
            given = given.replace("{run}", PLAN.run)
            for client in (nobody, guesser):
                answer = await client.request(method, given)
                expected = 200 if path in EXEMPT else 401
                assert answer.status_code == expected, (method, path)
        for path in EXEMPT:
            assert (await nobody.get(path)).status_code == 200
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as plain:
        with pytest.raises(httpx.TransportError):
            await plain.get(run.rest.replace("https", "http") + "/healthz")


# Secrets


def _look_at_arguments(run: Run) -> None:
    """Command lines of all services and of what they have started."""
    groups = {keeper.pid for keeper in run.keepers.values()}
    assert None not in groups
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile
            if os.getpgid(int(entry.name)) in groups:
                run.saw(f"arguments of {entry.name}", (entry / "cmdline").read_bytes())
    assert sum(where.startswith("arguments") for where in run.seen) >= len(run.keepers)


def _fail(run: Run, secrets: Path) -> None:
    """Services and commands with wrong secrets, and with servers that are not there."""
    path = str(run.folder / "recipe.toml")
    token = ["--token-file", str(secrets / "token")]
    trusting = ["--ca-file", str(secrets / "tls" / "ca.crt")]
    cli = "services.launcher.cli"
    nowhere = f"postgresql+psycopg://tests@127.0.0.1:{free_port()}/secured"
    queue = str(run.recipe.queue.url)
    inline = queue.replace("headrace@", f"headrace:{WRONG['queue']}@")
    for module, arguments, overrides, status in (
        ("services.scorer", [path], {"queue.password_file": secrets / "wrong-queue"}, 2),
        ("services.aggregator", [path], {"aggregator.database": nowhere}, 2),
        (
            "services.aggregator",
            [path],
            {"aggregator.database_password_file": secrets / "wrong-database"},
            2,
        ),
        (MODULES["generator"], [path], {"network.token_file": secrets / "wrong-token"}, 2),
        (cli, ["check", path], {}, 0),
        (cli, ["check", path], {"queue.url": inline}, 2),
        (cli, ["dead-letters", "list", path], {}, 0),
        (cli, ["verdict", run.rest, PLAN.run, *token, *trusting], {}, 0),
        (cli, ["verdict", run.rest, PLAN.run, *token], {}, 2),
    ):
        argv = [sys.executable, "-m", module, *arguments]
        for key, value in overrides.items():
            argv += ["--set", f"{key}={value}"]
        if module != cli:
            argv += ["--set", "network.grpc_port=0", "--set", "aggregator.http_port=0"]
        done = subprocess.run(
            argv, env=environment(), cwd=ROOT, capture_output=True, check=False, timeout=PATIENCE_S
        )
        told = done.stdout + done.stderr
        assert done.returncode == status, told.decode()
        run.saw(f"what {argv[2:]} said", told)


async def _queue_is_away(run: Run) -> None:
    """An outage that all who use the queue notice."""
    await run.proxy.refuse()
    await _outage(run, lasts=True)
    for name in run.keepers:
        run.saw(f"status of {name} in an outage", str(await _status(run, name)))
    await run.proxy.accept()
    await _outage(run, lasts=False)


async def _outage(run: Run, *, lasts: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await _status(run, "scorer-0")
            if bool(status.details.get("queue")) is lasts:
                return
            await asyncio.sleep(0.1)


async def _look_around(run: Run) -> None:
    """What statuses and REST say, and what the database holds."""
    for name in run.keepers:
        run.saw(f"status of {name}", str(await _status(run, name)))
    async with run.client() as client:
        document = (await client.get("/openapi.json")).json()
        for path, ways in document["paths"].items():
            if "get" not in ways or "stream" in path:
                continue
            answer = await client.get(path.replace("{run}", PLAN.run))
            assert answer.status_code not in (401, 403)
            run.saw(f"GET {path}", answer.content)
    with psycopg.connect(_plain(run.database)) as connection:
        tables = connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
        ).fetchall()
        assert tables
        for (table,) in tables:
            rows = connection.execute(f'SELECT t::text FROM "{table}" AS t').fetchall()
            run.saw(f"table {table}", repr(rows))


def _look_at_files(run: Run) -> None:
    """All that was written: logs, recipe, checkpoints."""
    for path in run.folder.rglob("*"):
        if path.is_file() and path.name != "wrong":
            run.saw(str(path.relative_to(run.folder)), path.read_bytes())
