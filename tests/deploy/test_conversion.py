"""The cpu overlay as documents that podman plays: nothing of what a pod is gets lost."""

import copy
from typing import Any

import pytest

from tests.deploy.containers import conversion
from tests.deploy.containers.conversion import MEMORY, Workload, workloads
from tests.deploy.manifests import ROOT, SERVICES, render

Documents = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rendered() -> Documents:
    return render(ROOT / "deploy" / "k8s" / "overlays" / "cpu")


@pytest.fixture(scope="module")
def found(rendered: Documents) -> dict[str, Workload]:
    return workloads(rendered)


def played(workload: Workload, **environment: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Documents of its first pod, by kind and name."""
    documents: dict[str, dict[str, dict[str, Any]]] = {}
    for document in workload.played(workload.pod_name(0), environment):
        documents.setdefault(document["kind"], {})[document["metadata"]["name"]] = document
    return documents


def pod_of(workload: Workload, **environment: str) -> dict[str, Any]:
    return played(workload, **environment)["Pod"][workload.pod_name(0)]


def test_everything_that_runs_is_found(found: dict[str, Workload]) -> None:
    assert set(found) == {*SERVICES, "queue"}
    assert {name: w.replicas for name, w in found.items()} == dict.fromkeys(found, 1)


def test_pods_are_called_as_their_services_are(found: dict[str, Workload]) -> None:
    assert found["queue"].names == ("queue",)
    assert set(found["aggregator"].names) == {"aggregator", "aggregator-rest"}


def test_pods_of_a_stateful_set_have_names_and_claims_of_their_own(
    found: dict[str, Workload],
) -> None:
    queue = found["queue"]
    assert queue.pod_name(0) == "queue-0"
    claim = played(queue)["PersistentVolumeClaim"]["data-queue-0"]
    assert claim["spec"] == queue.claims[0]["spec"]
    volumes = {volume["name"]: volume for volume in pod_of(queue)["spec"]["volumes"]}
    assert volumes["data"] == {
        "name": "data",
        "persistentVolumeClaim": {"claimName": "data-queue-0"},
    }
    assert found["generator"].pod_name(0) == "generator-1"


@pytest.mark.parametrize("name", ["queue", "aggregator", "trainer"])
def test_volumes_belong_to_the_group_of_the_pod(found: dict[str, Workload], name: str) -> None:
    group = str(found[name].pod["spec"]["securityContext"]["fsGroup"])
    (claim,) = played(found[name])["PersistentVolumeClaim"].values()
    annotations = claim["metadata"]["annotations"]
    assert annotations == {"volume.podman.io/uid": group, "volume.podman.io/gid": group}


@pytest.mark.parametrize("name", [*SERVICES, "queue"])
def test_a_pod_is_as_confined_and_limited_as_in_a_cluster(
    found: dict[str, Workload], name: str
) -> None:
    template, pod = found[name].pod["spec"], pod_of(found[name])["spec"]
    assert pod["securityContext"] == template["securityContext"]
    given = template.get("initContainers", []) + template["containers"]
    made = pod.get("initContainers", []) + pod["containers"]
    for before, after in zip(given, made, strict=True):
        for key in ("securityContext", "resources", "volumeMounts", "args", "command", "envFrom"):
            assert after.get(key) == before.get(key)
        assert after["image"] == f"localhost/{before['image']}"


@pytest.mark.parametrize("name", [*SERVICES, "queue"])
def test_whoever_plays_a_pod_gets_its_probes(found: dict[str, Workload], name: str) -> None:
    workload = found[name]
    assert set(workload.probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
    container = pod_of(workload)["spec"]["containers"][0]
    assert not set(container) & {*conversion.PROBES, "ports"}
    assert workload.grace_s == workload.pod["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", [*SERVICES, "queue"])
def test_everything_that_a_pod_refers_to_is_with_it(found: dict[str, Workload], name: str) -> None:
    documents = played(found[name])
    spec = pod_of(found[name])["spec"]
    for container in spec.get("initContainers", []) + spec["containers"]:
        for source in container.get("envFrom", []):
            assert source["configMapRef"]["name"] in documents["ConfigMap"]
        assert {m["name"] for m in container["volumeMounts"]} <= {
            volume["name"] for volume in spec["volumes"]
        }
    for volume in spec["volumes"]:
        if "configMap" in volume:
            assert volume["configMap"]["name"] in documents["ConfigMap"]
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            assert claim in documents["PersistentVolumeClaim"]


def test_memory_is_memory(found: dict[str, Workload]) -> None:
    trainer = found["trainer"]
    folder = f"{MEMORY}/trainer-1/shm"
    assert trainer.memory_folders("trainer-1") == [folder]
    volumes = {volume["name"]: volume for volume in pod_of(trainer)["spec"]["volumes"]}
    assert volumes["shm"] == {"name": "shm", "hostPath": {"path": folder}}
    assert "emptyDir" in volumes["tmp"]


def test_what_is_set_holds_against_what_the_manifest_says(found: dict[str, Workload]) -> None:
    pod = pod_of(found["trainer"], TOKENIZERS_PARALLELISM="true", HEADRACE_TRAINER__MAX_STEPS="7")
    environment = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
    assert environment["TOKENIZERS_PARALLELISM"] == "true"
    assert environment["HEADRACE_TRAINER__MAX_STEPS"] == "7"
    assert environment["OMP_NUM_THREADS"] is None, "a reference to the container's limit, kept"


def test_what_replaces_pods_is_as_the_strategy_says(found: dict[str, Workload]) -> None:
    surge = {name: workload.surge for name, workload in found.items()}
    assert surge["scorer"]
    assert not surge["trainer"], "a second trainer would fence the first"
    assert not surge["queue"]
    assert not surge["aggregator"]


def test_templates_stay_as_they_are(found: dict[str, Workload]) -> None:
    before = copy.deepcopy(found["trainer"].pod)
    found["trainer"].played("trainer-1", {"A": "b"})
    assert found["trainer"].pod == before


def test_an_unknown_kind_is_not_passed_over(rendered: Documents) -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "once"}}
    with pytest.raises(ValueError, match="Job/once"):
        workloads([*rendered, job])
