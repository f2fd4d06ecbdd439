"""The manifests as tests read them: rendered by kubectl, and the recipe of each container."""

import functools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.k8s import render as rendering
from services.common import config

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
SERVICES = ("generator", "scorer", "trainer", "aggregator")
WORKLOADS = {"Deployment", "StatefulSet", "JobSet"}

Documents = list[dict[str, Any]]


@dataclass(frozen=True)
class Container:
    """One container, with the pod and the workload around it."""

    workload: dict[str, Any]
    pod: dict[str, Any]
    spec: dict[str, Any]

    def __str__(self) -> str:
        """`Deployment/trainer: trainer`."""
        workload = self.workload
        return f"{workload['kind']}/{workload['metadata']['name']}: {self.spec['name']}"

    @property
    def ports(self) -> set[int]:
        """The ports that it declares."""
        return {port["containerPort"] for port in self.spec.get("ports", [])}

    @property
    def is_init(self) -> bool:
        """Whether it ends before the others begin."""
        return self.spec in self.pod.get("initContainers", [])


def overlays() -> list[Path]:
    """What is rendered: the overlays that ship, and those of the tests, which have the components
    that no other has."""
    folders = (K8S / "overlays", ROOT / "tests" / "deploy" / "overlays")
    return sorted(file.parent for folder in folders for file in folder.glob("*/kustomization.yaml"))


def kubectl() -> str:
    """Path of a kubectl: that of the lock file, where it is installed."""
    found = rendering.kubectl()
    assert found is not None, "there is no kubectl: install requirements/dev.txt"
    return found


def other_kubectl() -> str | None:
    """Path of the machine's own kubectl beside it; None where there is none."""
    found = shutil.which("kubectl")
    return found if found != kubectl() else None


@functools.cache
def text(overlay: Path) -> str:
    """An overlay as kubectl writes it."""
    return rendering.render(overlay, by=kubectl())


@functools.cache
def render(overlay: Path) -> Documents:
    """All documents of an overlay; the same objects each time, for reading only."""
    return list(yaml.load_all(text(overlay), Loader=yaml.CSafeLoader))


def of_kind(documents: Documents, kind: str) -> dict[str, dict[str, Any]]:
    """Documents of one kind by name."""
    return {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}


def templates(workload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pod templates of a workload."""
    if workload["kind"] == "JobSet":
        for job in workload["spec"]["replicatedJobs"]:
            yield job["template"]["spec"]["template"]
    else:
        yield workload["spec"]["template"]


def pods(documents: Documents) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each workload with one of its pod templates."""
    for document in documents:
        if document["kind"] in WORKLOADS:
            for template in templates(document):
                yield document, template


def containers(documents: Documents) -> Iterator[Container]:
    """All containers, init containers included."""
    for workload, template in pods(documents):
        pod = template["spec"]
        for spec in pod.get("initContainers", []) + pod["containers"]:
            yield Container(workload, pod, spec)


def services(documents: Documents) -> Iterator[Container]:
    """The containers that run a service of ours."""
    for container in containers(documents):
        if container.spec["name"] in SERVICES:
            yield container


def environment(documents: Documents, container: Container) -> dict[str, str]:
    """The literal environment of a container: ConfigMaps by envFrom, then its own values."""
    maps = of_kind(documents, "ConfigMap")
    found: dict[str, str] = {}
    for source in container.spec.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]["data"]
    own = container.spec.get("env", [])
    return found | {item["name"]: item["value"] for item in own if "value" in item}


def recipe(documents: Documents, container: Container, folder: Path) -> config.Recipe:
    """What the container's service loads: the mounted recipe under the container's environment."""
    mounted = Path(container.spec["args"][0])
    mounts = {mount["mountPath"]: mount["name"] for mount in container.spec["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in container.pod["volumes"]}
    name = volumes[mounts[str(mounted.parent)]]["configMap"]["name"]
    file = folder / mounted.name
    file.write_text(of_kind(documents, "ConfigMap")[name]["data"][mounted.name])
    return config.load(file, environ=environment(documents, container))
