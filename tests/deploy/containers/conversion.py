"""Rendered manifests to documents that `podman kube play` understands. Pure.

Podman plays Pods, ConfigMaps and PersistentVolumeClaims, and knows no Services, StatefulSets or
scaling. So `workloads()` reads what there is to run, and `Workload.played()` gives the documents of
one pod of it:

- a Deployment's pods are called `generator-1`, `generator-2`, ...; a StatefulSet's `queue-0`, with
  its claims made as `data-queue-0`;
- Services become `names`: network aliases of every pod that they select, so that a headless Service
  of several pods answers with all of their addresses, as in a cluster;
- what the node does in a cluster is left to the caller: `probes` of the containers, and the grace
  period;
- memory-backed emptyDirs, which podman takes for disks, become folders in the host's memory;
- `fsGroup` becomes the owner of the volumes;
- containers are started again when they fail, but not after status 0;
- ports are not published on the host, as podman would understand them;
- images are the ones on this machine, `localhost/...`.

Left out, and so not tested: network policies, service accounts, disruption budgets, topology
spread, and limits on ephemeral storage and emptyDirs.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]

NOT_PLAYED = {"Namespace", "NetworkPolicy", "PodDisruptionBudget", "ServiceAccount"}
"""Kinds that mean nothing to containers on one machine."""

MEMORY = "/dev/shm/headrace-deploy"
"""Where memory-backed emptyDirs lie, a folder a pod."""

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet, with what it refers to."""

    name: str
    kind: str
    replicas: int
    names: tuple[str, ...]
    """Of the Services that select its pods: what other pods call it."""
    grace_s: int
    """`terminationGracePeriodSeconds`."""
    surge: bool
    """A rolling update starts a new pod before it stops an old one."""
    pod: Document
    """The template."""
    claims: tuple[Document, ...]
    """Volumes of their own that a StatefulSet's pods have."""
    beside: tuple[Document, ...]
    """ConfigMaps and PersistentVolumeClaims of all."""

    @property
    def container(self) -> Document:
        """Its only container that is not an init container."""
        (container,) = self.pod["spec"]["containers"]
        return dict(container)

    @property
    def probes(self) -> dict[str, Document]:
        """Of its container, by name, as far as there are any."""
        return {name: self.container[name] for name in PROBES if name in self.container}

    def pod_name(self, number: int) -> str:
        """Of its `number`th pod, from 0: a StatefulSet's begin with 0, a Deployment's with 1."""
        return f"{self.name}-{number if self.kind == 'StatefulSet' else number + 1}"

    def memory_folders(self, pod_name: str) -> list[str]:
        """Folders that must be there before the pod is played, writable for all."""
        volumes = self.pod["spec"].get("volumes", [])
        return [f"{MEMORY}/{pod_name}/{v['name']}" for v in volumes if _in_memory(v)]

    def played(self, pod_name: str, environment: Mapping[str, str] | None = None) -> list[Document]:
        """Documents for one pod. `environment` is added to that of its containers, or replaces it:
        what `kubectl set env` does."""
        spec = copy.deepcopy(self.pod["spec"])
        # By "Always" podman would also start init containers again that have done their work.
        spec["restartPolicy"] = "OnFailure"
        volumes = spec.setdefault("volumes", [])
        for volume in volumes:
            if _in_memory(volume):
                del volume["emptyDir"]
                volume["hostPath"] = {"path": f"{MEMORY}/{pod_name}/{volume['name']}"}
        claims = [_claim(self.claims_of(pod_name)[c["metadata"]["name"]], c) for c in self.claims]
        for name, claim in self.claims_of(pod_name).items():
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            container["image"] = local(container["image"])
            # Podman is told nothing of them: whoever plays the pod probes it, as a node would.
            for probe in PROBES:
                container.pop(probe, None)
            # Podman would take them for ports of the host, one pod each.
            container.pop("ports", None)
            # After the ConfigMaps, so that these hold.
            own = {item["name"]: item for item in container.get("env", [])}
            own |= {name: {"name": name, "value": v} for name, v in (environment or {}).items()}
            container["env"] = list(own.values())
        owner = spec.get("securityContext", {}).get("fsGroup")
        metadata = {"name": pod_name, "labels": self.pod["metadata"]["labels"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        needed = [_owned(d, owner) for d in (*self._needed(spec), *claims)]
        return [*needed, pod]

    def claims_of(self, pod_name: str) -> dict[str, str]:
        """Names of the pod's own claims, by volume."""
        names = [claim["metadata"]["name"] for claim in self.claims]
        return {name: f"{name}-{pod_name}" for name in names}

    def _needed(self, spec: Document) -> list[Document]:
        """Documents beside the pod that it refers to."""
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        maps = {s["configMapRef"]["name"] for c in containers for s in c.get("envFrom", [])}
        maps |= {v["configMap"]["name"] for v in spec["volumes"] if "configMap" in v}
        claims = {
            v["persistentVolumeClaim"]["claimName"]
            for v in spec["volumes"]
            if "persistentVolumeClaim" in v
        }
        wanted = {"ConfigMap": maps, "PersistentVolumeClaim": claims}
        return [d for d in self.beside if d["metadata"]["name"] in wanted[d["kind"]]]


def workloads(documents: list[Document]) -> dict[str, Workload]:
    """What a rendered overlay runs, by name. ValueError for what cannot be converted."""
    for document in documents:
        known = {"Deployment", "StatefulSet", "Service", "ConfigMap", "PersistentVolumeClaim"}
        if document["kind"] not in known | NOT_PLAYED:
            name = document["metadata"]["name"]
            raise ValueError(f"{document['kind']}/{name}: no conversion for podman; add one")
    services = [d for d in documents if d["kind"] == "Service"]
    beside = tuple(d for d in documents if d["kind"] in {"ConfigMap", "PersistentVolumeClaim"})
    found = {}
    for document in documents:
        if document["kind"] in {"Deployment", "StatefulSet"}:
            workload = _workload(document, services, beside)
            found[workload.name] = workload
    return found


def _workload(
    document: Document, services: list[Document], beside: tuple[Document, ...]
) -> Workload:
    spec, template = document["spec"], document["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    strategy = spec.get("strategy", {}).get("type", "RollingUpdate")
    return Workload(
        name=document["metadata"]["name"],
        kind=document["kind"],
        replicas=spec.get("replicas", 1),
        names=tuple(
            s["metadata"]["name"] for s in services if s["spec"]["selector"].items() <= labels
        ),
        grace_s=template["spec"].get("terminationGracePeriodSeconds", 30),
        surge=document["kind"] == "Deployment" and strategy == "RollingUpdate",
        pod=template,
        claims=tuple(spec.get("volumeClaimTemplates", [])),
        beside=beside,
    )


def local(image: str) -> str:
    """The image as this machine's store names it, which is never asked of a registry."""
    return image if image.startswith("localhost/") else f"localhost/{image}"


def _in_memory(volume: Document) -> bool:
    return (volume.get("emptyDir") or {}).get("medium") == "Memory"


def _claim(name: str, template: Document) -> Document:
    """A StatefulSet's claim of one pod."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": template["spec"],
    }


def _owned(document: Document, owner: int | None) -> Document:
    """A claim whose volume belongs to the pod's fsGroup."""
    if document["kind"] != "PersistentVolumeClaim" or owner is None:
        return document
    ids = {f"volume.podman.io/{kind}": str(owner) for kind in ("uid", "gid")}
    metadata = {**document["metadata"], "annotations": ids}
    return {**document, "metadata": metadata}
