"""The manifests hang together, meet the restricted standard, and say what services read."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from services.common import plugins, queue_url
from tests.deploy.manifests import (
    K8S,
    ROOT,
    SERVICES,
    Container,
    Documents,
    containers,
    of_kind,
    overlays,
    pods,
    recipe,
    render,
    services,
)

OVERLAYS = overlays()
NAMES = [f"{path.parents[1].name}-{path.name}" for path in OVERLAYS]
OUR_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/part-of")
GRPC, HEALTH = 50051, 50061


@pytest.fixture(params=OVERLAYS, ids=NAMES)
def documents(request: pytest.FixtureRequest) -> Documents:
    return render(request.param)


def selected(documents: Documents, selector: dict[str, Any]) -> set[str]:
    """Names of the workloads whose pods a selector takes."""
    wanted = selector.get("matchLabels", {}).items()
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    return {
        workload["metadata"]["name"]
        for workload, template in pods(documents)
        if wanted <= (labels := labels_of(workload, template)).items()
        and all(labels.get(each["key"]) in each["values"] for each in expressions)
    }


def labels_of(workload: dict[str, Any], template: dict[str, Any]) -> dict[str, str]:
    """Of a pod; of a JobSet's, its first one, which is the trainer."""
    labels: dict[str, str] = template["metadata"]["labels"]
    is_first = {"batch.kubernetes.io/job-completion-index": "0"}
    return labels | (is_first if workload["kind"] == "JobSet" else {})


def workload_of(service: str) -> str:
    """Whose pods a Service stands for."""
    return service.removesuffix("-rest")


def test_everything_but_the_namespace_is_in_the_namespace(documents: Documents) -> None:
    (namespace,) = of_kind(documents, "Namespace")
    for document in documents:
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == namespace


def test_the_namespace_enforces_the_restricted_standard(documents: Documents) -> None:
    (namespace,) = of_kind(documents, "Namespace").values()
    labels = namespace["metadata"]["labels"]
    for mode in ("enforce", "audit", "warn"):
        assert labels[f"pod-security.kubernetes.io/{mode}"] == "restricted"


def test_selectors_match_their_own_pods_and_no_others(documents: Documents) -> None:
    for document in documents:
        name, spec = document["metadata"]["name"], document.get("spec", {})
        if document["kind"] in {"Deployment", "StatefulSet", "PodDisruptionBudget"}:
            assert selected(documents, spec["selector"]) == {name}, document["kind"]
        if document["kind"] == "Service":
            chosen = selected(documents, {"matchLabels": spec["selector"]})
            assert chosen == {workload_of(name)}
        if document["kind"] == "StatefulSet":
            assert spec["serviceName"] in of_kind(documents, "Service")
    for workload, template in pods(documents):
        for spread in template["spec"].get("topologySpreadConstraints", []):
            name = workload["metadata"]["name"]
            assert selected(documents, spread["labelSelector"]) == {name}


def test_monitors_select_one_service_with_that_port(documents: Documents) -> None:
    for monitor in of_kind(documents, "ServiceMonitor").values():
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        chosen = [
            service
            for service in of_kind(documents, "Service").values()
            if wanted <= service["metadata"]["labels"].items()
        ]
        assert [service["metadata"]["name"] for service in chosen] == ["aggregator-rest"]
        ports = {port["name"] for port in chosen[0]["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} == ports


def test_every_workload_has_the_recommended_labels(documents: Documents) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for workload, template in pods(documents):
        for labels in (workload["metadata"]["labels"], template["metadata"]["labels"]):
            assert labels["app.kubernetes.io/name"] == workload["metadata"]["name"]
            assert labels["app.kubernetes.io/part-of"] == "headrace"
            assert labels["app.kubernetes.io/component"]
        assert template["metadata"]["labels"]["app.kubernetes.io/version"] == version
        assert template["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "kustomize"


def test_everything_is_found_by_one_label(documents: Documents) -> None:
    for document in documents:
        labels = document["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "headrace", document["metadata"]["name"]


def test_what_may_never_change_holds_nothing_that_will(documents: Documents) -> None:
    # With a version in a selector or a volumeClaimTemplate the next one could not be applied.
    for document in documents:
        if document["kind"] in {"Deployment", "StatefulSet"}:
            assert set(document["spec"]["selector"]["matchLabels"]) == set(OUR_LABELS)
        for template in document.get("spec", {}).get("volumeClaimTemplates", []):
            assert set(template["metadata"]["labels"]) == set(OUR_LABELS)


def test_every_reference_exists(documents: Documents) -> None:
    maps, claims = of_kind(documents, "ConfigMap"), of_kind(documents, "PersistentVolumeClaim")
    accounts = of_kind(documents, "ServiceAccount")
    for container in containers(documents):
        assert container.pod["serviceAccountName"] in accounts, str(container)
        for source in container.spec.get("envFrom", []):
            assert source["configMapRef"]["name"] in maps, str(container)
        for item in container.spec.get("env", []):
            field = item.get("valueFrom", {}).get("resourceFieldRef")
            assert field is None or field["containerName"] == container.spec["name"]
        volumes = {volume["name"] for volume in container.pod["volumes"]}
        claimed = container.workload["spec"].get("volumeClaimTemplates", [])
        volumes |= {template["metadata"]["name"] for template in claimed}
        mounts = container.spec["volumeMounts"]
        assert {mount["name"] for mount in mounts} <= volumes, str(container)
        paths = [mount["mountPath"] for mount in mounts]
        assert len(set(paths)) == len(paths), str(container)
        for volume in container.pod["volumes"]:
            if "configMap" in volume:
                # `queue-ca` is the user's: component external-queue says so.
                assert volume["configMap"]["name"] in {*maps, "queue-ca"}, str(container)
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims, str(container)


def test_every_account_is_somebodys_and_mounts_no_token(documents: Documents) -> None:
    users = {container.pod["serviceAccountName"] for container in containers(documents)}
    accounts = of_kind(documents, "ServiceAccount")
    assert users == set(accounts)
    assert all(a["automountServiceAccountToken"] is False for a in accounts.values())


def test_no_volume_and_no_map_is_left_over(documents: Documents) -> None:
    used: set[str] = set()
    for _, template in pods(documents):
        pod = template["spec"]
        mounted: set[str] = set()
        for spec in pod.get("initContainers", []) + pod["containers"]:
            mounted |= {mount["name"] for mount in spec["volumeMounts"]}
            used |= {source["configMapRef"]["name"] for source in spec.get("envFrom", [])}
        assert {volume["name"] for volume in pod["volumes"]} <= mounted
        used |= {v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v}
    assert set(of_kind(documents, "ConfigMap")) <= used


def test_service_ports_are_container_ports(documents: Documents) -> None:
    ports: dict[str, set[int]] = {}
    for container in containers(documents):
        ports.setdefault(container.workload["metadata"]["name"], set()).update(container.ports)
    for name, service in of_kind(documents, "Service").items():
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports[workload_of(name)]


def test_grpc_services_are_headless_and_rest_has_one_address(documents: Documents) -> None:
    # A ClusterIP balances connections, not calls: gRPC clients must see every pod.
    for name, service in of_kind(documents, "Service").items():
        assert (service["spec"].get("clusterIP") == "None") == (name != "aggregator-rest")


def test_the_trainer_is_never_two(documents: Documents) -> None:
    deployments = of_kind(documents, "Deployment")
    if "trainer" in deployments:
        spec = deployments["trainer"]["spec"]
        assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")


def test_a_deployment_that_is_scaled_says_no_number(documents: Documents) -> None:
    # Else each `kubectl apply` would set the number that the manifest has.
    deployments = of_kind(documents, "Deployment")
    for scaled in of_kind(documents, "ScaledObject").values():
        target = deployments[scaled["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"]
        for trigger in scaled["spec"]["triggers"]:
            authentication = trigger["authenticationRef"]["name"]
            assert authentication in of_kind(documents, "TriggerAuthentication")
            scheme, host, path = re.match(
                r"(https?)://([\w-]+)\.headrace\.svc(/.*)", trigger["metadata"]["url"]
            ).groups()  # type: ignore[union-attr]
            (port,) = of_kind(documents, "Service")[host]["spec"]["ports"]
            assert port["name"] == scheme
            assert path == f"/api/v1/runs/-/scale/{scaled['metadata']['name']}"


def test_budgets_never_block_a_drain(documents: Documents) -> None:
    budgets = of_kind(documents, "PodDisruptionBudget")
    assert {"generator", "scorer"} <= set(budgets)
    for budget in budgets.values():
        # minAvailable: 1 of a single replica would.
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_images_are_pinned(documents: Documents) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for container in containers(documents):
        image: str = container.spec["image"]
        name, _, digest = image.partition("@sha256:")
        if digest:
            assert re.fullmatch(r"[0-9a-f]{64}", digest), str(container)
            continue
        name, separator, tag = image.rpartition(":")
        assert separator, str(container)
        assert tag[0].isdigit(), str(container)
        if "headrace/" in name:
            on_gpu = any(
                "nvidia.com/gpu" in c["resources"]["limits"] for c in container.pod["containers"]
            )
            assert tag == (f"{version}-gpu" if on_gpu else version), str(container)
        assert container.spec["imagePullPolicy"] == "IfNotPresent", str(container)


def test_pods_meet_the_restricted_standard(documents: Documents) -> None:
    for container in containers(documents):
        pod, own = container.pod["securityContext"], container.spec["securityContext"]
        assert pod["runAsUser"] >= 10_000, str(container)
        assert pod["fsGroup"] == pod["runAsGroup"] == pod["runAsUser"], str(container)
        for context in (pod, own):
            assert context["runAsNonRoot"] is True, str(container)
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}, str(container)
        assert own["allowPrivilegeEscalation"] is False, str(container)
        assert own["readOnlyRootFilesystem"] is True, str(container)
        assert own["capabilities"] == {"drop": ["ALL"]}, str(container)
        assert container.pod["automountServiceAccountToken"] is False, str(container)
        # A Service named headrace-x would else put HEADRACE_X_* into the environment: unknown keys.
        assert container.pod["enableServiceLinks"] is False, str(container)
        for volume in container.pod["volumes"]:
            assert "hostPath" not in volume, str(container)


UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def bytes_of(quantity: str) -> int:
    """Example: "1536Mi" is 1,610,612,736."""
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def test_requests_and_limits_are_given(documents: Documents) -> None:
    for container in containers(documents):
        requests, limits = (container.spec["resources"][k] for k in ("requests", "limits"))
        assert {"cpu", "memory", "ephemeral-storage"} <= set(requests) == set(limits)
        for kind in ("memory", "ephemeral-storage"):
            assert bytes_of(requests[kind]) <= bytes_of(limits[kind]), str(container)
        # Evicted, it would stop the run or be back after minutes. A scorer loses nothing.
        if not container.is_init and container.spec["name"] != "scorer":
            assert requests["memory"] == limits["memory"], str(container)


def test_every_empty_dir_has_a_limit_that_the_container_can_hold(documents: Documents) -> None:
    for container in containers(documents):
        limits = container.spec["resources"]["limits"]
        mounted = {mount["name"] for mount in container.spec["volumeMounts"]}
        sizes = {"memory": 0, "ephemeral-storage": 0}
        for volume in container.pod["volumes"]:
            if "emptyDir" in volume and volume["name"] in mounted and not container.is_init:
                in_memory = volume["emptyDir"].get("medium") == "Memory"
                size = bytes_of(volume["emptyDir"]["sizeLimit"])
                sizes["memory" if in_memory else "ephemeral-storage"] += size
        for kind, size in sizes.items():
            assert size < bytes_of(limits[kind]), f"{container}: {kind}"


def test_services_are_probed_on_their_health_port(documents: Documents, tmp_path: Path) -> None:
    for container in services(documents):
        port = recipe(documents, container, tmp_path).network.health_port
        assert port in container.ports
        assert container.spec["readinessProbe"]["grpc"] == {"port": port}, str(container)
        for probe in ("startupProbe", "livenessProbe"):
            assert container.spec[probe]["grpc"] == {"port": port, "service": "liveness"}
        # An event loop that holds its breath for a second is not dead.
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container.spec[probe]["timeoutSeconds"] >= 5, f"{container}: {probe}"


ENDS_BY = {
    "generator": ("generator/service.py", ("DRAIN_S", "GIVE_BACK_S")),
    "scorer": ("scorer/service.py", ("STOP_TAKING_S", "DRAIN_S", "GIVE_BACK_S")),
    "trainer": ("trainer/training.py", ("STEP_ENDS_WITHIN_S",)),
    "aggregator": ("aggregator/service.py", ("WRITES_WITHIN_S",)),
}
"""What a service may take to end: constants of its source, which is not imported: torch is slow."""
ALSO_S = {"trainer": 60.0, "aggregator": 10.0}
"""The trainer's checkpoint, at least; REST calls and gRPC calls in flight, 5 s each."""
LAST_WORDS_S = 10.0
"""For the recorder (5 s), the gRPC server (1 s) and the interpreter."""


def test_grace_periods_fit_the_drain(documents: Documents) -> None:
    for container in services(documents):
        name = container.spec["name"]
        file, constants = ENDS_BY[name]
        source = (ROOT / "services" / file).read_text()
        values = [
            float(value)
            for constant in constants
            for value in re.findall(rf"^{constant} = ([\d.]+)$", source, re.MULTILINE)
        ]
        assert len(values) == len(constants), file
        needed = sum(values) + LAST_WORDS_S + ALSO_S.get(name, 0.0)
        assert container.pod["terminationGracePeriodSeconds"] >= needed, str(container)


def peers(container: Container, documents: Documents, folder: Path) -> dict[str, str]:
    """What a service is told of others, as scheme://host:port by key."""
    loaded = recipe(documents, container, folder)
    return {
        "trainer": loaded.network.trainer,
        "aggregator": loaded.network.aggregator,
        "queue": loaded.queue.url or "",
    }


def test_every_service_finds_the_others(documents: Documents, tmp_path: Path) -> None:
    known, seen = of_kind(documents, "Service"), set()
    for container in services(documents):
        seen.add(container.spec["name"])
        loaded = recipe(documents, container, tmp_path)
        assert loaded.network.host == "0.0.0.0"
        assert (loaded.network.grpc_port, loaded.network.health_port) == (GRPC, HEALTH)
        expected = {GRPC, HEALTH}
        if container.spec["name"] == "aggregator":
            expected.add(loaded.aggregator.http_port)
        assert expected <= container.ports
        for peer in peers(container, documents, tmp_path).values():
            scheme, host, port = re.match(r"(\w+):/+(?:\w+@)?([\w.-]+):(\d+)", peer).groups()  # type: ignore[union-attr]
            assert scheme in {"dns", "redis", "rediss"}, peer
            if host.endswith(".example.com"):
                assert "queue" not in known, "an external queue stands in its place"
                continue
            assert int(port) in [p["port"] for p in known[host]["spec"]["ports"]], peer
        mounts = [mount["mountPath"] for mount in container.spec["volumeMounts"]]
        writes = {"trainer"} | ({"aggregator"} if loaded.aggregator.database is None else set())
        if container.spec["name"] in writes:
            assert any(loaded.run_folder.is_relative_to(m) for m in mounts), str(container)
    assert seen == set(SERVICES)


def test_files_that_the_recipe_names_are_mounted(documents: Documents, tmp_path: Path) -> None:
    for container in services(documents):
        loaded = recipe(documents, container, tmp_path)
        network, name = loaded.network, container.spec["name"]
        named = [network.token_file, network.tls_cert_file, network.tls_key_file]
        named.append(network.tls_ca_file)
        if name == "aggregator":
            named.append(loaded.aggregator.database_password_file)
        else:
            named.append(loaded.queue.password_file)
            named += re.findall(r"ssl_\w+=([^&]+)", loaded.queue.url or "")
        mounts = {m["mountPath"]: m["name"] for m in container.spec["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in container.pod["volumes"]}
        for file in filter(None, named):
            volume = volumes[mounts[str(Path(file).parent)]]
            if "secret" in volume:
                items = volume["secret"].get("items")
                held = [item["path"] for item in items or ()] or ["tls.crt", "tls.key", "ca.crt"]
                assert Path(file).name in held, f"{container}: {file}"
            else:
                assert "configMap" in volume, f"{container}: {file}"


def test_the_queues_url_is_one_that_services_read(documents: Documents, tmp_path: Path) -> None:
    for container in services(documents):
        url = recipe(documents, container, tmp_path).queue.url
        assert url is not None
        queue_url.read_url(url)


def test_user_code_is_found_where_services_look_for_it(documents: Documents) -> None:
    for container in containers(documents):
        for mount in container.spec["volumeMounts"]:
            if mount["name"] == "user-code":
                # The image's working directory.
                assert mount["mountPath"] == "/work"
                assert container.spec["name"] in {"scorer", "generator"}


def test_user_code_loads_as_it_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = render(ROOT / "tests/deploy/overlays/external")
    (scorer,) = (c for c in services(documents) if c.spec["name"] == "scorer")
    (volume,) = (v for v in scorer.pod["volumes"] if v["name"] == "user-code")
    work = tmp_path / "work"
    work.mkdir()
    for name, text in of_kind(documents, "ConfigMap")[volume["configMap"]["name"]]["data"].items():
        (work / name).write_text(text)
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the working directory is added
    (short,) = plugins.load_rewards(recipe(documents, scorer, tmp_path).rewards)
    assert short(["a" * 199, "a" * 200]) == [1.0, 0.0]
    del sys.modules["my_rewards"]


def test_the_model_is_fetched_once_and_only_a_whole_one_counts(tmp_path: Path) -> None:
    (fetch,) = (
        c for c in containers(render(K8S / "overlays" / "gpu")) if c.spec["name"] == "model"
    )
    hub, calls, folder = tmp_path / "hf", tmp_path / "calls", tmp_path / "model"
    folder.mkdir()
    env = {item["name"]: item["value"] for item in fetch.spec["env"]}
    env |= {"FOLDER": str(folder), "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def start(script: str) -> int:
        hub.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
        hub.chmod(0o755)
        return subprocess.run(fetch.spec["command"], env=env).returncode

    assert start("exit 1") == 1
    assert start("exit 0") == 0
    assert start("exit 1") == 0  # the hub is away, and nobody asks it
    said = calls.read_text().splitlines()
    assert said == [f"download Qwen/Qwen3-0.6B --revision main --local-dir {folder}"] * 2


def test_the_queue_keeps_everything() -> None:
    lines = (K8S / "base" / "valkey.conf").read_text().splitlines()
    assert "maxmemory-policy noeviction" in lines
    assert "appendonly yes" in lines
    # Rewriting the file forks: it may need all of it twice.
    (most,) = (line.split()[1] for line in lines if line.startswith("maxmemory "))
    assert most.endswith("mb")
    (queue,) = (
        c for c in containers(render(K8S / "overlays" / "cpu")) if c.spec["name"] == "valkey"
    )
    assert bytes_of(queue.spec["resources"]["limits"]["memory"]) >= 2 * int(most[:-2]) << 20


def test_the_recipe_is_the_demo() -> None:
    copy, original = K8S / "overlays/cpu/recipe.toml", ROOT / "recipes/arithmetic.toml"
    assert copy.read_text() == original.read_text(), f"cp {original} {copy}"


def test_components_and_overlays_are_all_rendered() -> None:
    used = "".join((path / "kustomization.yaml").read_text() for path in OVERLAYS)
    for component in (K8S / "components").iterdir():
        assert f"components/{component.name}\n" in used, f"no overlay has {component.name}"
