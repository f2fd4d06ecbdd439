"""The manifests as tests read them: rendered by kubectl, and the recipe of each container."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common import config

ROOT = Path(__file__).parents[2]
SERVICES = ("generator", "scorer", "trainer", "aggregator")
WORKLOADS = {"Deployment", "StatefulSet"}
OLDEST_KUBECTL = (1, 21)
"""Before it, `kubectl kustomize` read no folder as a resource."""


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


def kubectl() -> str:
    """Path of a kubectl that can render the overlays; skips the test where there is none."""
    found = shutil.which("kubectl")
    if found is None:
        pytest.skip("kubectl is not installed")
    said = subprocess.run(
        [found, "version", "--client"], capture_output=True, text=True, check=True
    ).stdout
    number = re.search(r"v(\d+)\.(\d+)\.", said)
    assert number is not None, said
    if (int(number[1]), int(number[2])) < OLDEST_KUBECTL:
        pytest.skip(f"kubectl {number[0]}x is older than {OLDEST_KUBECTL[0]}.{OLDEST_KUBECTL[1]}")
    return found


def render(overlay: Path) -> list[dict[str, Any]]:
    """All documents of an overlay."""
    # Nothing is asked of a cluster; without a KUBECONFIG nothing can be.
    environment = {**os.environ, "KUBECONFIG": os.devnull}
    done = subprocess.run(
        [kubectl(), "kustomize", str(overlay)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    """Documents of one kind by name."""
    return {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}


def containers(documents: list[dict[str, Any]]) -> Iterator[Container]:
    """All containers, init containers included."""
    for document in documents:
        if document["kind"] in WORKLOADS:
            pod = document["spec"]["template"]["spec"]
            for spec in pod.get("initContainers", []) + pod["containers"]:
                yield Container(document, pod, spec)


def environment(documents: list[dict[str, Any]], container: Container) -> dict[str, str]:
    """The literal environment of a container: ConfigMaps by envFrom, then its own values."""
    maps = of_kind(documents, "ConfigMap")
    found: dict[str, str] = {}
    for source in container.spec.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]["data"]
    own = container.spec.get("env", [])
    return found | {item["name"]: item["value"] for item in own if "value" in item}


def recipe(documents: list[dict[str, Any]], container: Container, folder: Path) -> config.Recipe:
    """What the container's service loads: the mounted recipe under the container's environment."""
    mounted = Path(container.spec["args"][0])
    mounts = {mount["mountPath"]: mount["name"] for mount in container.spec["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in container.pod["volumes"]}
    name = volumes[mounts[str(mounted.parent)]]["configMap"]["name"]
    file = folder / mounted.name
    file.write_text(of_kind(documents, "ConfigMap")[name]["data"][mounted.name])
    return config.load(file, environ=environment(documents, container))
