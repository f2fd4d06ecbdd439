"""The Kubernetes manifests render, are valid, hang together, and say what the services read."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.manifests import (
    ROOT,
    SERVICES,
    WORKLOADS,
    containers,
    of_kind,
    recipe,
    render,
)

OVERLAYS = sorted(
    path.parent.name for path in ROOT.glob("deploy/k8s/overlays/*/kustomization.yaml")
)
MINORS = ("1.35", "1.36", "1.37")
"""The newest minors that kubernetes-validate has schemas of."""

Documents = list[dict[str, Any]]


@pytest.fixture(scope="module", params=OVERLAYS)
def documents(request: pytest.FixtureRequest) -> Documents:
    return render(ROOT / "deploy" / "k8s" / "overlays" / request.param)


@pytest.mark.parametrize("minor", MINORS)
def test_every_document_is_valid_to_the_letter(documents: Documents, minor: str) -> None:
    assert len(documents) >= 12
    for document in documents:
        kubernetes_validate.validate(document, minor, strict=True)


def test_minors_are_the_newest() -> None:
    assert kubernetes_validate.latest_version().startswith(MINORS[-1])


def test_everything_but_the_namespace_is_in_the_namespace(documents: Documents) -> None:
    (namespace,) = of_kind(documents, "Namespace")
    for document in documents:
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == namespace


def test_selectors_match_their_own_pods_and_no_others(documents: Documents) -> None:
    pods = {
        d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"]
        for d in documents
        if d["kind"] in WORKLOADS
    }

    def selected(selector: dict[str, str]) -> list[str]:
        return [name for name, labels in pods.items() if selector.items() <= labels.items()]

    for document in documents:
        name = document["metadata"]["name"]
        if document["kind"] in WORKLOADS:
            assert selected(document["spec"]["selector"]["matchLabels"]) == [name]
        if document["kind"] == "Service":
            assert selected(document["spec"]["selector"]) == [name.removesuffix("-rest")]
        if document["kind"] == "StatefulSet":
            assert document["spec"]["serviceName"] in of_kind(documents, "Service")


def test_every_reference_exists(documents: Documents) -> None:
    maps, claims = of_kind(documents, "ConfigMap"), of_kind(documents, "PersistentVolumeClaim")
    for container in containers(documents):
        for source in container.spec.get("envFrom", []):
            assert source["configMapRef"]["name"] in maps, str(container)
        volumes = {volume["name"] for volume in container.pod["volumes"]}
        templates = container.workload["spec"].get("volumeClaimTemplates", [])
        volumes |= {template["metadata"]["name"] for template in templates}
        assert {mount["name"] for mount in container.spec["volumeMounts"]} <= volumes
        for volume in container.pod["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps, str(container)
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims, str(container)


def test_service_ports_are_container_ports(documents: Documents) -> None:
    ports: dict[str, set[int]] = {}
    for container in containers(documents):
        ports.setdefault(container.workload["metadata"]["name"], set()).update(container.ports)
    for name, service in of_kind(documents, "Service").items():
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports[name.removesuffix("-rest")]


def test_grpc_services_are_headless_and_rest_has_one_address(documents: Documents) -> None:
    # A ClusterIP balances connections, not calls: gRPC clients must see every pod.
    for name, service in of_kind(documents, "Service").items():
        assert (service["spec"].get("clusterIP") == "None") == (name != "aggregator-rest")


def test_the_trainer_is_never_two(documents: Documents) -> None:
    spec = of_kind(documents, "Deployment")["trainer"]["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")


def test_images_are_pinned(documents: Documents) -> None:
    for container in containers(documents):
        name, separator, tag = container.spec["image"].rpartition(":")
        assert separator, str(container)
        assert name, str(container)
        assert tag[0].isdigit(), str(container)


def test_pods_meet_the_restricted_standard(documents: Documents) -> None:
    for container in containers(documents):
        pod, own = container.pod["securityContext"], container.spec["securityContext"]
        assert pod["runAsNonRoot"] is True, str(container)
        assert pod["runAsUser"] > 0, str(container)
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, str(container)
        assert own["allowPrivilegeEscalation"] is False, str(container)
        assert own["readOnlyRootFilesystem"] is True, str(container)
        assert own["capabilities"] == {"drop": ["ALL"]}, str(container)
        assert container.pod["automountServiceAccountToken"] is False, str(container)
        # A Service named headrace-x would else put HEADRACE_X_* into the environment: unknown keys.
        assert container.pod["enableServiceLinks"] is False, str(container)


def test_requests_and_limits_are_given(documents: Documents) -> None:
    for container in containers(documents):
        for kind in ("requests", "limits"):
            assert set(container.spec["resources"][kind]) == {"cpu", "memory"}, str(container)


def test_services_are_probed_on_their_health_port(documents: Documents, tmp_path: Path) -> None:
    for container in containers(documents):
        if container.spec["name"] not in SERVICES:
            continue
        port = recipe(documents, container, tmp_path).network.health_port
        assert container.spec["readinessProbe"]["grpc"] == {"port": port, "service": ""} or (
            container.spec["readinessProbe"]["grpc"] == {"port": port}
        )
        for probe in ("startupProbe", "livenessProbe"):
            assert container.spec[probe]["grpc"] == {"port": port, "service": "liveness"}


def test_every_service_finds_the_others(documents: Documents, tmp_path: Path) -> None:
    services, seen = of_kind(documents, "Service"), set()
    for container in containers(documents):
        if container.spec["name"] not in SERVICES:
            continue
        seen.add(container.spec["name"])
        loaded = recipe(documents, container, tmp_path)
        assert loaded.network.host == "0.0.0.0"
        expected = {loaded.network.grpc_port, loaded.network.health_port}
        if container.spec["name"] == "aggregator":
            expected.add(loaded.aggregator.http_port)
        assert container.ports == expected
        for peer in (loaded.network.trainer, loaded.network.aggregator, loaded.queue.url or ""):
            scheme, _, rest = peer.partition("://")
            host, _, port = rest.strip("/").partition("/")[0].partition(":")
            assert scheme in {"dns", "redis"}, peer
            assert int(port) in [p["port"] for p in services[host]["spec"]["ports"]], peer
        folder = loaded.run_folder
        mounts = [mount["mountPath"] for mount in container.spec["volumeMounts"]]
        if container.spec["name"] in {"trainer", "aggregator"}:
            assert any(folder.is_relative_to(mount) for mount in mounts), str(container)
    assert seen == set(SERVICES)


def test_the_queue_keeps_everything(documents: Documents) -> None:
    maps = of_kind(documents, "ConfigMap")
    (text,) = (m["data"]["valkey.conf"] for m in maps.values() if "valkey.conf" in m["data"])
    lines = text.splitlines()
    assert "maxmemory-policy noeviction" in lines
    assert "appendonly yes" in lines


def test_the_recipe_is_the_demo() -> None:
    copy, original = ROOT / "deploy/k8s/overlays/cpu/recipe.toml", ROOT / "recipes/arithmetic.toml"
    assert copy.read_text() == original.read_text(), f"cp {original} {copy}"
